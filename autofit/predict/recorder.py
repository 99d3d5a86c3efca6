"""Births and deaths of storages on the traced device, with the operator and the module that each comes from."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autofit.predict.corrections import UNEVEN, as_it_is

Category = Literal[
    "weights",
    "gradients",
    "optimizer_states",
    "buffers",
    "activations",
    "inputs",
    "temporary",
    "scratch",
    "workspaces",
]
Phase = Literal["setup", "forward", "backward", "optimizer"]

# A block in its forward or in its backward.
Span = tuple[str, Literal["forward", "backward"]]

_DEVICE_OF = torch.ops.prim.device.default
_SCALAR_OF = torch.ops.aten._local_scalar_dense.default
_FIND_OVERFLOW = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_UNIFORM = (torch.ops.aten.rand.default, torch.ops.aten.uniform_.default)
_OTHERS_SEQUENCE = 2**62  # accumulation nodes are numbered beyond every node of a forward pass


@dataclass(slots=True)
class Trace:
    """What happened to memory, in order.

    `events` holds `index` for the birth of a storage and `~index` for its death. The other lists have one entry per
    storage: bytes, what it is for, the phase, operator and module it was born in. `marks` names places in `events`.

    Where blocks are followed, `cuts` says from which event on which block runs, forward or backward (None: none of
    them), also at each mark, as (place in `events`, span, mark). `recomputed` has the storages that were born in a
    recomputation, and `ends` what else let go of a storage before it died, as (cuts so far, place in `events`, index).

    `uneven` says that some storage does not grow evenly with the samples.
    """

    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    cuts: list[tuple[int, Span | None, str | None]] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    uneven: bool = False

    def mark(self, name: str) -> None:
        """Names the present place in the events; no block runs there."""
        self.marks.append((len(self.events), name))
        self.cuts.append((len(self.events), None, name))

    def enter(self, span: Span | None) -> None:
        """From here on `span` runs."""
        if (self.cuts[-1][1] if self.cuts else None) != span:
            self.cuts.append((len(self.events), span, None))

    def settle(self) -> None:
        """Puts deaths between two births in order of birth: it changes nothing for the allocator, and what goes with
        a container of no order, such as autocast's cache, goes in another one every time. Likewise `ends`.
        """
        start, events, births = 0, self.events, list[int]()
        for end in sorted({at for at, _, _ in self.cuts} | {len(events)}):
            while start < end:
                stop = start
                while stop < end and events[stop] < 0:
                    stop += 1
                events[start:stop] = sorted(events[start:stop], reverse=True)
                births.append(stop)
                start = stop + 1
            start = end
        births.append(len(events))
        self.ends = sorted((cuts, births[bisect_left(births, at)], index) for cuts, at, index in self.ends)


class _Life(weakref.ref[torch.UntypedStorage]):
    """A storage that is followed: its address, and its index in the trace."""

    __slots__ = ("index", "key")

    key: int
    index: int


class Scratch(Protocol):
    """Memory that an operator takes beside its results."""

    def lasting(self, operator: Any, phase: Phase) -> Sequence[int]:
        """Bytes of blocks that the operator takes now and never gives back."""

    def passing(self, operator: Any, args: Sequence[Any], out: Any) -> Sequence[int]:
        """Bytes of blocks that the operator gives back when it returns."""


# Hears of every operator that ran: itself, its arguments, its result, and how many cuts the trace had.
Watch = Callable[[Any, Sequence[Any], Mapping[str, Any], Any, int], None]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage on `device` that is born under it until it dies.

    Goes above a `FakeTensorMode`. Values that are read from fake tensors are answered with a constant; a single random
    number is 0.5, so that what is left out at random stays.
    """

    def __init__(self, device: torch.device, *, scratch: Scratch | None = None, watch: Watch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase: Callable[[], Phase] = lambda: "setup"
        self.module = ""
        self.entered = ""  # the last submodule to start: where to look after an error
        self._running: Any = None
        self._device_type = device.type
        self._scratch = scratch
        self._watch = watch
        self._live: dict[int, _Life] = {}
        # Callbacks of weak references only queue: a signal whose handler raises in one is lost.
        self._dead: deque[_Life] = deque()
        self._no_overflow: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._making = False
        self._stack: list[str] = []
        self._sequence: list[int] = []
        self._sequence_modules: list[str] = []
        self._sequence_blocks: list[tuple[int, str | None]] = []
        self._standing_for: int | None = None
        self._stand_ins: set[int] = set()
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].device if type(args[0]) is torch.Tensor else args[0].fake_device
        if func is _SCALAR_OF:
            return self._scalar(args[0])
        self._bury()
        self._running = func
        out = as_it_is(func, args, func(*args, **(kwargs or {})))
        self.trace.uneven = self.trace.uneven or func in UNEVEN
        if func is _FIND_OVERFLOW:
            found = args[1].untyped_storage()
            self._no_overflow[found._cdata] = weakref.ref(found)
        elif func in _UNIFORM and out.numel() == 1:
            out.constant = _half(out)
        if isinstance(out, torch.Tensor):
            self._see(out, func)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._see(item, func)
        if self._scratch is not None:
            self._take_scratch(self._scratch, func, args, out)
        if self._watch is not None:
            self._watch(func, args, kwargs or {}, out, len(self.trace.cuts))
        return out

    @property
    def operator(self) -> str | None:
        """The operator that was called last."""
        return self._running.name() if self._running is not None else None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is made inside is not followed: it was there before, as the batch that micro-batches are taken from."""
        self._making = True
        try:
            yield
        finally:
            self._making = False

    def adopt(self, tensor: Any, category: Category) -> None:
        """Says what a tensor's storage is for; one that was never seen is born now. Other values are let be."""
        if not isinstance(tensor, torch.Tensor):
            return
        found = self._found(tensor)
        if found is not None:
            self.trace.categories[found.index] = category
        elif self._on_device(tensor):
            index = self._see(tensor, "")
            if index is not None:
                self.trace.categories[index] = category

    def saved(self, tensor: torch.Tensor) -> None:
        """A tensor is kept for backward: what was temporary is an activation."""
        found = self._found(tensor)
        if found is not None and self.trace.categories[found.index] == "temporary":
            self.trace.categories[found.index] = "activations"

    def enter_node(self, sequence: int) -> None:
        """Backward goes through the node that the forward pass created as its `sequence`-th."""
        if sequence < _OTHERS_SEQUENCE:
            at = bisect_right(self._sequence, sequence)
            self.module = self._sequence_modules[at - 1] if at else ""
            at = bisect_right(self._sequence_blocks, sequence, key=itemgetter(0))
            block = self._sequence_blocks[at - 1][1] if at else None
            self._enter((block, "backward") if block is not None else None)

    def around(self, block: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, of which the trace knows that it is the one of `block`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._at_block(block)
            self._enter((block, "forward"))
            try:
                return forward(*args, **kwargs)
            finally:
                self._at_block(None)
                self._enter(None)

        return run

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor like `tensor` with a storage of its own, which holds the storage of `tensor` in the trace.

        So it shows when backward lets go of what it saved, whoever else holds it. None for what lives long anyway.
        """
        found = self._found(tensor)
        if found is None or self.trace.categories[found.index] in ("weights", "buffers", "inputs"):
            return None
        self._standing_for = found.index
        try:
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        finally:
            self._standing_for = None
        return other.requires_grad_(tensor.requires_grad)

    def mark(self, name: str) -> None:
        """Names the present place in the trace."""
        self._bury()
        self.trace.mark(name)

    def _enter(self, span: Span | None) -> None:
        self._bury()
        self.trace.enter(span)

    def _at_block(self, block: str | None) -> None:
        self._sequence_blocks.append((torch.autograd._get_sequence_nr(), block))  # type: ignore[attr-defined]

    @contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Attributes what happens inside to the submodules of `model` that run."""
        names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            self.entered = names.get(id(module), type(module).__name__)
            self._stack.append(self.entered)
            self._at_module()

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self._stack.pop()
            self._at_module()

        handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def closing(self) -> Iterator[Trace]:
        """Records inside; what dies afterwards is not part of the trace."""
        try:
            with self:
                yield self.trace
        finally:
            self._bury()
            self._live.clear()
            self._outside.clear()
            self.trace.settle()

    def _at_module(self) -> None:
        self.module = self._stack[-1] if self._stack else ""
        self._sequence.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._sequence_modules.append(self.module)

    def _on_device(self, tensor: Any) -> bool:
        return bool(getattr(tensor, "fake_device", tensor.device).type == self._device_type)

    def _see(self, tensor: torch.Tensor, operator: Any) -> int | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._found(tensor)
        if found is not None:
            index = found.index
            if self.trace.sizes[index] == storage.nbytes() or key in self._stand_ins:
                return None
            self._died(found)  # resized: the old block is given back for a new one
        elif not self._on_device(tensor) or key in self._outside:
            return None
        elif self._making:
            self._outside[key] = storage  # kept, so that no other storage takes its place
            return None
        if self._standing_for is not None:
            index = self._standing_for
            self._stand_ins.add(key)
            self._holders[index] = self._holders.get(index, 1) + 1
        else:
            index = self._born(storage.nbytes(), operator)
        life = self._live[key] = _Life(storage, self._dead.append)
        life.key, life.index = key, index
        return index

    def _found(self, tensor: torch.Tensor) -> _Life | None:
        """The tensor's storage, if it is followed; its address may have been that of one that is dead."""
        self._bury()
        return self._live.get(tensor.untyped_storage()._cdata)

    def _bury(self) -> None:
        """Writes down what has died until now."""
        while self._dead:
            self._died(self._dead.popleft())

    def _born(self, nbytes: int, operator: Any) -> int:
        trace, phase = self.trace, self.phase()
        index = len(trace.sizes)
        recomputed = phase == "backward" and torch.is_grad_enabled()
        if recomputed:
            trace.recomputed.add(index)
        trace.events.append(index)
        trace.sizes.append(nbytes)
        trace.categories.append("activations" if recomputed else "temporary")
        trace.phases.append(phase)
        trace.operators.append(operator if isinstance(operator, str) else operator.name())
        trace.modules.append(self.module)
        return index

    def _died(self, life: _Life) -> None:
        key, index = life.key, life.index
        if self._live.get(key) is life:
            del self._live[key]
            self._stand_ins.discard(key)
            holders = self._holders.get(index, 1) - 1
            if holders:
                self._holders[index] = holders
                self.trace.ends.append((len(self.trace.cuts), len(self.trace.events), index))
            else:
                self.trace.events.append(~index)

    def _take_scratch(self, scratch: Scratch, operator: Any, args: Sequence[Any], out: Any) -> None:
        for nbytes in scratch.lasting(operator, self.phase()):
            index = self._born(nbytes, operator)
            self.trace.categories[index] = "workspaces"
        taken = [self._born(nbytes, operator) for nbytes in scratch.passing(operator, args, out)]
        for index in taken:
            self.trace.categories[index] = "scratch"
            self.trace.events.append(~index)

    def _scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """1, so that steps count, masks are full and nothing divides by zero; 0 for whether gradients overflowed."""
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()  # type: ignore[no-any-return]
        storage = tensor.untyped_storage()
        reference = self._no_overflow.get(storage._cdata)
        if reference is not None and reference() is storage:
            return 0.0
        if self._stack and self._on_device(tensor):
            self.trace.notes[f"a value that {self.module} reads from a tensor was taken to be 1"] = None
        if tensor.dtype.is_floating_point:
            return 1.0
        return True if tensor.dtype == torch.bool else 1


def _half(number: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return torch.full(number.shape, 0.5, dtype=number.dtype)
