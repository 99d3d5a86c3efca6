"""The meter of Apple GPUs, whose allocator knows what it holds now but keeps no peaks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.memory.meter import Meter, Reading, until_exit

# What torch sets when PYTORCH_MPS_HIGH_WATERMARK_RATIO does not say otherwise (`ATen/mps/MPSAllocator.h`).
DEFAULT_FRACTION = 1.7
LARGEST_FRACTION = 2.0


class MpsMeter(Meter):
    """Looks at the allocator after every operator, since its peaks are not kept. `runtime` is `torch.mps`.

    Not validated: no such device was at hand.
    """

    source = "measured: memory in use on torch.mps after every operator"

    def __init__(self, device: torch.device, *, runtime: Any = None) -> None:
        super().__init__(device)
        self._runtime = torch.mps if runtime is None else runtime

    def outside_bytes(self) -> int:
        """0: what the driver allocates for the process is in the peaks already, with what the frameworks use."""
        return 0

    @contextmanager
    def capped(self, cap_bytes: int) -> Iterator[None]:
        """Sets the share of the recommended working set; afterwards the one that torch starts with.

        torch does not tell which share is set, so one that was set by a call, and not by the environment, is lost.
        """
        share = cap_bytes / self._runtime.recommended_max_memory()
        self._runtime.set_per_process_memory_fraction(min(share, LARGEST_FRACTION))
        try:
            yield
        finally:
            initial = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", DEFAULT_FRACTION))
            self._runtime.set_per_process_memory_fraction(initial)

    @contextmanager
    def metered(self, *, cap_bytes: int | None, resident: Iterable[torch.Tensor]) -> Iterator[Callable[[], Reading]]:
        """The highest that was seen after any operator; `resident` is in it already. Retries are not counted: 0."""
        with nullcontext() if cap_bytes is None else self.capped(cap_bytes):
            highest = _Highest(self._runtime)
            with until_exit(highest.read) as current, highest:
                yield current

    def release(self) -> None:
        """Collects garbage, waits for the device and empties the cache."""
        gc.collect()
        self._runtime.synchronize()
        self._runtime.empty_cache()

    def allocated_bytes(self) -> int:
        """What tensors occupy."""
        return int(self._runtime.current_allocated_memory())


class _Highest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hook untyped
    """Keeps the highest figures seen after any operator."""

    def __init__(self, runtime: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime
        self._reserved = self._allocated = 0

    def read(self) -> Reading:
        self._reserved = max(self._reserved, self._runtime.driver_allocated_memory())
        self._allocated = max(self._allocated, self._runtime.current_allocated_memory())
        return Reading(self._reserved, self._allocated, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.read()
        return result
