"""The meter of a device without a caching allocator: real storages, held as the CUDA allocator would hold them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from autofit.memory.allocator import CachingAllocator
from autofit.memory.config import DEFAULT_CONFIG, AllocatorConfig
from autofit.memory.meter import Meter, Reading, until_exit
from autofit.memory.tracker import StorageTracker, parts_of_sparse


class TrackedMeter(Meter):
    """Counts the storages of tensors with the allocator model, and runs out of memory where that would.

    What happens inside one operator, such as the scratch memory of a convolution, is not seen.
    """

    source = "tracked: storages of tensors, as the CUDA allocator would hold them"

    def __init__(self, device: torch.device, *, config: AllocatorConfig = DEFAULT_CONFIG) -> None:
        super().__init__(device)
        self.config = config

    def outside_bytes(self) -> int:
        """0: there is no device context, and the host's own memory is not what is tuned."""
        return 0

    def capped(self, cap_bytes: int) -> AbstractContextManager[None]:
        """Nothing: there is no allocator to cap outside of a metered run."""
        return nullcontext()

    @contextmanager
    def metered(self, *, cap_bytes: int | None, resident: Iterable[torch.Tensor]) -> Iterator[Callable[[], Reading]]:
        """A fresh allocator model under `cap_bytes` (None: without limit), in which `resident` is alive."""
        allocator = CachingAllocator(cap_bytes, self.config)

        def read() -> Reading:
            return Reading(allocator.peak_reserved_bytes, allocator.peak_allocated_bytes, allocator.retries)

        tracker = StorageTracker(self.device.type, allocator=allocator)
        with until_exit(read) as current, tracker:
            tracker.resident(resident)
            yield current

    def release(self) -> None:
        """Collects garbage; the host's allocator caches nothing."""
        gc.collect()

    def allocated_bytes(self) -> int:
        """Bytes of the storages of all tensors that Python knows of."""
        found: dict[int, int] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for item in gc.get_objects():
                # Not isinstance: it would ask proxies for a `__class__` of their own, and run whatever that does.
                if issubclass(type(item), torch.Tensor):
                    self._add_storages(item, found)
        return sum(found.values())

    def _add_storages(self, tensor: torch.Tensor, found: dict[int, int]) -> None:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse, or a wrapper whose inner tensors are found by themselves
            for part in parts_of_sparse(tensor):
                self._add_storages(part, found)
        else:
            if storage.device.type == self.device.type:
                found[storage._cdata] = storage.nbytes()
