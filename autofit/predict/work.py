"""What the operators of a step compute and move, counted while it is traced without values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import flop_registry

from autofit.predict.recorder import Trace
from autofit.predict.solver import Floats

_COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator: floating point operations of its matrix products, bytes read and written, dtype of its inputs.

    `host_bytes` of them go to the host or come from there.
    """

    operations: float
    moved_bytes: float
    dtype: torch.dtype | None
    host_bytes: float = 0


@dataclass(frozen=True)
class Tally:
    """Operators one after another, as `Operation` describes them, one entry each."""

    operations: Floats
    moved_bytes: Floats
    host_bytes: Floats
    dtypes: tuple[torch.dtype | None, ...]

    @classmethod
    def of(cls, operators: Sequence[Operation]) -> Tally:
        """The tally of `operators`."""
        return cls(
            np.array([operator.operations for operator in operators], dtype=np.float64),
            np.array([operator.moved_bytes for operator in operators], dtype=np.float64),
            np.array([operator.host_bytes for operator in operators], dtype=np.float64),
            tuple(operator.dtype for operator in operators),
        )

    def __len__(self) -> int:
        return len(self.dtypes)

    @cached_property
    def places(self) -> dict[torch.dtype | None, NDArray[np.bool_]]:
        """Which entries are of each dtype."""
        return {dtype: np.array([other == dtype for other in self.dtypes]) for dtype in set(self.dtypes)}


@dataclass(frozen=True)
class Work:
    """The operators of one micro-step, with the gradients of earlier ones there, and of the optimizer step."""

    micro_step: Tally
    optimizer_step: Tally


class WorkLog:
    """Counts what runs on the device, between one cut of a trace and the next; pass it to `trace_step` as `watch`."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._after: defaultdict[int, list[Operation]] = defaultdict(list)
        self._segments: dict[int, Tally] = {}

    def __call__(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, cut: int) -> None:
        """Counts one operator that ran after the trace's `cut`-th cut."""
        given = list(_tensors((*args, *kwargs.values())))
        read = [tensor for tensor in given if self._on_device(tensor)]
        written = [tensor for tensor in _tensors((out,)) if self._on_device(tensor)]
        if not _runs(operator, read, written):
            return
        formula = flop_registry.get(operator.overloadpacket)
        self._after[cut].append(
            Operation(
                operations=0 if formula is None else formula(*args, **kwargs, out_val=out),
                moved_bytes=sum(_bytes(tensor) for tensor in read) + sum(_bytes(tensor) for tensor in written),
                dtype=next((tensor.dtype for tensor in read if tensor.dtype.is_floating_point), None),
                host_bytes=self._between_host_and_device(operator, [*given, *_tensors((out,))]),
            )
        )

    def _between_host_and_device(self, operator: Any, tensors: Sequence[torch.Tensor]) -> int:
        if operator.overloadpacket not in _COPIES or len({self._on_device(tensor) for tensor in tensors}) == 1:
            return 0
        return min(_bytes(tensor) for tensor in tensors)

    def work(self, trace: Trace) -> Work:
        """The last micro-step and the last optimizer step of `trace`: what all but the first are like."""
        *_, micro, optimizer = marked(trace)
        return Work(self._between(micro, optimizer), self._between(optimizer, len(trace.cuts) + 1))

    def segment(self, number: int) -> Tally:
        """What ran between the `number`-th cut of the trace, from 1 on, and the next; ask when the trace is there."""
        if number not in self._segments:
            self._segments[number] = Tally.of(self._after[number])
        return self._segments[number]

    def _between(self, start: int, stop: int) -> Tally:
        return Tally.of([operation for number in range(start, stop) for operation in self._after[number]])

    def _on_device(self, tensor: Any) -> bool:
        return bool(getattr(tensor, "fake_device", tensor.device).type == self._device_type)


def marked(trace: Trace) -> list[int]:
    """The numbers of the cuts that are marks, counted from 1."""
    return [number for number, (_, _, mark) in enumerate(trace.cuts, 1) if mark is not None]


Sized = tuple[int, Tally]


def work_at(samples: float, low: tuple[int, Work], high: tuple[int, Work]) -> Work:
    """The work of a micro-batch of `samples` on the line through two others, given as (samples, work)."""
    small, large = low[1], high[1]
    return Work(
        tally_at(samples, (low[0], small.micro_step), (high[0], large.micro_step)),
        tally_at(samples, (low[0], small.optimizer_step), (high[0], large.optimizer_step)),
    )


def tally_at(samples: float, low: Sized, high: Sized) -> Tally:
    """The operators for `samples`, on the line through those for two others, given as (samples, operators).

    Where different operators ran, the larger ones in proportion: better than nothing, and said nowhere to be exact.
    """
    (few, small), (many, large) = low, high
    share = (samples - few) / (many - few)

    def along(a: Floats, b: Floats) -> Floats:
        if len(a) != len(b):
            return b * (samples / many)
        return np.maximum(a + (b - a) * share, 0)

    return Tally(
        along(small.operations, large.operations),
        along(small.moved_bytes, large.moved_bytes),
        along(small.host_bytes, large.host_bytes),
        large.dtypes,
    )


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _runs(operator: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel runs: views hand out the storage that they were given, and empty tensors are not filled."""
    if operator._schema.is_mutable:
        return bool(read or written)
    if operator.overloadpacket.__name__.startswith(("empty", "new_empty")):
        return False
    given = {tensor.untyped_storage()._cdata for tensor in read}
    return any(tensor.untyped_storage()._cdata not in given for tensor in written)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading or writing the tensor touches; an expanded one has fewer than its shape says."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
