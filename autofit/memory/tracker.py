"""Every storage of a device followed from birth to death, while a step runs.

The same tracker serves two ends. On real tensors it takes each birth and death to the allocator model, and so lets a
device without a caching allocator run out of memory where CUDA would have. On fake tensors it writes them down for a
replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from threading import Lock
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.memory.allocator import AllocatorOutOfMemoryError, CachingAllocator
from autofit.memory.pool import Block
from autofit.memory.replay import Event
from autofit.units import format_bytes


@dataclass(slots=True)
class EventLog:
    """Births and deaths in order, and for each the operator (counted from 1; 0 before the first) it happened in."""

    events: list[Event] = field(default_factory=list)
    operators: list[int] = field(default_factory=list)

    def add(self, storage: int, nbytes: int, operator: int) -> None:
        """Writes down a birth, or with 0 bytes a death."""
        self.events.append((storage, nbytes))
        self.operators.append(operator)


# Types of which it is known, without a look at their attributes, that they wrap no other tensors.
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class _Life(ref[UntypedStorage]):
    """A storage that is alive, without keeping it so; `number` is its name in the log, 0 before it is counted."""

    __slots__ = ("block", "key", "nbytes", "number")

    block: Block | None
    key: int
    nbytes: int
    number: int


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hook untyped
    """Follows the storages of `device_type` that operators return while it is entered, and those named as resident.

    A storage not seen before is a birth of its bytes, the end of the last tensor on it a death; growing or shrinking
    counts as the birth of a new one and then the death of the old, as the allocator sees it. Storages without bytes do
    not count. With an `allocator`, a birth that finds no room raises `torch.OutOfMemoryError` out of the very operator.
    With a `log`, births and deaths are written down.

    Of tensor subclasses that wrap others, and of sparse tensors, the inner tensors count. Not seen is what happens
    inside one operator, `UntypedStorage.resize_` until an operator next returns a tensor on that storage, and tensors
    in opaque layouts (MKL-DNN). Deaths are counted when the next operator begins. To be entered once; leaving it
    forgets every storage, and later deaths change nothing.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device_type: str, *, allocator: CachingAllocator | None = None, log: EventLog | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self._allocator = allocator
        self.log = log
        self.operators = 0
        self._on_device = attrgetter(f"is_{device_type}")
        self._alive: dict[int, _Life] = {}  # by the address of the storage itself, not of its data
        self._births = 0
        # A death can come at any moment: from the garbage collector while another is being counted, or in another
        # thread. So births and deaths queue, a birth with its bytes, and whoever holds the lock works the queue off.
        # Deaths do no more than that: a signal whose handler raises in the callback of a weak reference is lost.
        self._pending: deque[_Life | tuple[_Life, int]] = deque()
        self._working = Lock()
        self._refusal: str | None = None

    @property
    def allocator(self) -> CachingAllocator | None:
        """The allocator model, in which everything that died until now is counted."""
        self.settle()
        return self._allocator

    def resident(self, tensors: Iterable[Tensor]) -> None:
        """Counts what is alive already (parameters, buffers, gradients, optimizer state) as born now, in order."""
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._pending:
            self.settle()
        self.operators += 1
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) is Tensor:
            self._see(result)
        elif result is not None:
            for tensor in _tensors_in(result):
                self._see(tensor)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self.settle()
        self._alive.clear()
        self._pending.clear()

    def _see(self, tensor: Tensor) -> None:
        if type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            self.resident(getattr(tensor, name) for name in names)
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            self.resident(parts_of_sparse(tensor))
            return
        key = storage._cdata
        life = self._alive.get(key)
        nbytes = storage.nbytes()
        if life is None or life() is None:
            if nbytes == 0 or not self._on_device(tensor):
                return
            life = self._alive[key] = _Life(storage, self._pending.append)
            life.key = key
            life.block = None
            life.number = 0
        elif life.nbytes == nbytes:
            return
        life.nbytes = nbytes
        self._pending.append((life, nbytes))
        self.settle()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise torch.OutOfMemoryError(refusal)

    def _forget(self, life: _Life) -> None:
        if self._alive.get(life.key) is life:
            del self._alive[life.key]

    def settle(self) -> None:
        """Works the queue off, unless that is being done already further up or in another thread."""
        pending = self._pending
        while pending and self._working.acquire(blocking=False):
            try:
                while pending:
                    event = pending.popleft()
                    if isinstance(event, _Life):
                        self._forget(event)
                        self._count(event, 0)
                    else:
                        self._count(*event)
            finally:
                self._working.release()

    def _count(self, life: _Life, nbytes: int) -> None:
        """Gives a storage room for `nbytes`, none for 0, and then takes its former room back."""
        former, number = life.block, life.number
        life.block, life.number = None, 0
        if nbytes:
            if self._allocator is not None:
                try:
                    life.block = self._allocator.malloc(nbytes)
                except AllocatorOutOfMemoryError as error:
                    self._refuse(life, former, number, error)
                    return
            self._births += 1
            life.number = self._births
            if self.log is not None:
                self.log.add(life.number, nbytes, self.operators)
        if former is not None and self._allocator is not None:
            self._allocator.free(former)
        if number and self.log is not None:
            self.log.add(number, 0, self.operators)

    def _refuse(self, life: _Life, former: Block | None, number: int, error: AllocatorOutOfMemoryError) -> None:
        """Leaves a storage as it was; a new one is not counted at all."""
        # Kept for the operator that asked: a death that happens to work the queue off has nobody to raise it to.
        self._refusal = self._describe(error)
        life.block, life.number = former, number
        if not number:
            self._forget(life)

    def _describe(self, error: AllocatorOutOfMemoryError) -> str:
        """In the words of the CUDA allocator's own message."""
        reserved, allocated = error.reserved_bytes, error.allocated_bytes
        return (
            f"{self.device_type.upper()} out of memory. Tried to allocate {format_bytes(error.requested_bytes)}. The "
            f"cap is {format_bytes(error.limit_bytes)} of which {format_bytes(error.limit_bytes - reserved)} is free. "
            f"Of the reserved {format_bytes(reserved)}, {format_bytes(allocated)} is allocated by tensors, and "
            f"{format_bytes(reserved - allocated)} is reserved but unallocated (as the CUDA allocator would hold them)."
        )


def _tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors_in(item)


def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse tensor consists of; none for a layout that keeps them to itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
