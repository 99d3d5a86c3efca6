"""The backward pass, walked in Python, in the engine's order and with the engine's releases.

The engine of autograd cannot run on fake CUDA tensors without a driver, and on fake tensors of any device it adds
gradients out of place where it adds real ones in place. `PythonEngine` takes its place during a trace. Source of the
rules: `torch/csrc/autograd/engine.cpp`, `input_buffer.cpp` and `functions/accumulate_grad.h`, torch 2.6 to 2.14.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch's stubs know neither `_sequence_nr` nor `_input_metadata`

# The reference count of a gradient that only one local variable of the function that asks holds: that variable and the
# argument of `getrefcount`.
_ONE_VARIABLE = 2
# A storage that one tensor holds counts two: the tensor, and the Python object that the trace follows it by.
_ONE_TENSOR = 2


class SavedTensors:
    """What the forward pass saves for backward, held so that it can be released when the engine would release it.

    Dropping a node is not enough: whoever keeps an output keeps the nodes behind it. The engine empties a node once it
    has run, and so does `release`. What one node saved and another reads, as recomputation does with the inputs of its
    block, stays. `stand_in` gives a tensor to hold in place of the one that is saved, None for that one itself.
    """

    def __init__(
        self,
        on_save: Callable[[torch.Tensor], None],
        *,
        stand_in: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None,
    ) -> None:
        self._on_save = on_save
        self._stand_in = stand_in
        self._read: list[_Saved] = []
        self._running = -1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Everything that autograd saves inside goes through here."""
        with _hooks_make_way(self), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    @contextmanager
    def running(self, sequence: int, *, keep: bool) -> Iterator[None]:
        """Around the run of a node; what it saved and read inside is released on exit, unless the graph is kept."""
        outer, self._read, self._running = (self._read, self._running), [], sequence
        try:
            yield
        finally:
            if not keep:
                for saved in self._read:
                    saved.tensor = None
            self._read, self._running = outer

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        self._on_save(tensor)
        # The node that saves was created last.
        sequence = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        other = self._stand_in(tensor)
        if other is not None:
            return _Saved(other, sequence)
        node: Node = tensor.grad_fn
        # A node that saves its own output must not hold itself, or it would never be freed.
        own = node is not None and node._sequence_nr() == sequence
        return _Saved(tensor.detach() if own else tensor, sequence)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.tensor is None:
            raise RuntimeError("Trying to backward through the graph a second time: what it saved has been released.")
        # What an earlier node saved is not this one's. A copy made to be saved may have got a node of its own since.
        if saved.sequence >= self._running:
            self._read.append(saved)
        return saved.tensor


@dataclass(slots=True, eq=False)
class _Saved:
    tensor: torch.Tensor | None
    sequence: int


@contextmanager
def _hooks_make_way(saved: SavedTensors) -> Iterator[None]:
    """Lets `torch.func` transforms run inside: they refuse to start under hooks, and save nothing for this backward."""
    original = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] != saved._pack:
            with original(error_message):
                yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with original(error_message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(saved._pack, saved._unpack)

    torch.autograd.graph.disable_saved_tensors_hooks = disabled
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = original


@dataclass(slots=True)
class _Task:
    """One backward pass under way: gradients that wait for their node, and how many each node still waits for."""

    keep_graph: bool
    accumulate: bool
    buffers: dict[Node, dict[int, torch.Tensor]] = field(default_factory=dict)
    waiting: dict[Node, int] = field(default_factory=dict)
    ready: list[tuple[int, int, Node]] = field(default_factory=list)
    captures: dict[tuple[Node, int], int] = field(default_factory=dict)
    captured: dict[int, torch.Tensor] = field(default_factory=dict)
    needed: set[Node] | None = None


class PythonEngine:
    """Stands in for `torch._C._EngineBase`: the same methods, walked in Python.

    `on_node` hears the sequence number of each node before it runs. `in_place` adds gradients that meet in place, as
    the engine does unless a dispatch mode is active: the meter of a device without a caching allocator is one. Hooks on
    parameters run; hooks on other tensors and on nodes cannot be read from Python and do not.
    """

    def __init__(self, saved: SavedTensors, *, on_node: Callable[[int], None], in_place: bool) -> None:
        self._saved = saved
        self._on_node = on_node
        self._in_place = in_place
        self._ties = count()
        self._callbacks: list[Callable[[], None]] = []
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """`backward()` and `torch.autograd.grad` inside come here."""
        variable: Any = torch.autograd.Variable
        engine, task_id = variable._execution_engine, torch._C._current_graph_task_id
        variable._execution_engine = self
        # Recomputation is kept per task of the engine; without one it would start over for every tensor.
        torch._C._current_graph_task_id = lambda: self._depth if self._depth else task_id()
        try:
            with self._saved.active():
                yield
        finally:
            variable._execution_engine, torch._C._current_graph_task_id = engine, task_id

    def run_backward(
        self,
        tensors: Sequence[torch.Tensor | GradientEdge],
        gradients: Sequence[torch.Tensor],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[torch.Tensor | GradientEdge] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Runs backward from `tensors`; the gradients of `inputs` unless they are accumulated."""
        task = _Task(keep_graph, accumulate_grad)
        roots = [_edge(tensor) for tensor in tensors]
        task.captures = {tuple(_edge(tensor)): index for index, tensor in enumerate(inputs)}
        self._count_waiting(task, [node for node, _ in roots])
        if not keep_graph:
            _let_go(tensors)
        for (node, index), gradient in zip(roots, gradients, strict=True):
            self._add(task.buffers.setdefault(node, {}), index, gradient)
        for node in {id(node): node for node, _ in roots}.values():
            if not task.waiting.get(node):
                self._push(task, node)
        del roots, node
        self._depth += 1
        try:
            with torch.set_grad_enabled(create_graph):
                while task.ready:
                    self._run(task, heapq.heappop(task.ready)[2])
            while self._depth == 1 and self._callbacks:
                self._callbacks.pop(0)()
        finally:
            self._depth -= 1
        if accumulate_grad:
            return ()
        return tuple(task.captured.get(index) for index in range(len(inputs)))

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Runs `callback` when the outermost backward pass has ended."""
        self._callbacks.append(callback)

    def is_checkpoint_valid(self) -> bool:
        """Reentrant checkpointing works with `backward()`, which is all that a training step calls."""
        return True

    def _count_waiting(self, task: _Task, roots: list[Node]) -> None:
        """How many edges lead to each node, and which nodes lead to the inputs that were asked for."""
        order, seen, stack = [], set(roots), list(dict.fromkeys(roots))
        while stack:
            node = stack.pop()
            order.append(node)
            for following, _ in node.next_functions:
                if following is not None:
                    task.waiting[following] = task.waiting.get(following, 0) + 1
                    if following not in seen:
                        seen.add(following)
                        stack.append(following)
        if task.captures:
            task.needed = {node for node, _ in task.captures}
            for node in sorted(order, key=lambda node: node._sequence_nr()):
                if any(following in task.needed for following, _ in node.next_functions):
                    task.needed.add(node)

    def _push(self, task: _Task, node: Node) -> None:
        heapq.heappush(task.ready, (-node._sequence_nr(), next(self._ties), node))

    def _run(self, task: _Task, node: Node) -> None:
        buffer = task.buffers.pop(node)
        for index in list(buffer):
            target = task.captures.get((node, index))
            if target is not None and not task.accumulate:
                task.captured[target] = buffer[index]
        if task.needed is not None and (node not in task.needed or not _leads_on(task, node)):
            if task.accumulate and (node, 0) in task.captures:
                _accumulate(node.variable, [buffer.pop(0)])
            return
        self._on_node(node._sequence_nr())
        if node.name().endswith("AccumulateGrad"):
            gradient = [buffer.pop(0)]
            _accumulate(node.variable, gradient)
            return
        arguments = [buffer.pop(index, None) for index in range(len(node._input_metadata))]
        with self._saved.running(node._sequence_nr(), keep=task.keep_graph):
            results = _call(node, arguments)
            following = node.next_functions
            for index in range(len(arguments)):  # in this order, before what the node saved
                arguments[index] = None
            del node  # the last that holds it, unless someone keeps an output: what else it owns goes now
        self._distribute(task, following, results)

    def _distribute(
        self, task: _Task, following: Sequence[tuple[Node, int]], results: list[torch.Tensor | None]
    ) -> None:
        results.reverse()
        for node, index in following:
            result = results.pop()
            if node is None or (task.needed is not None and node not in task.needed):
                continue
            if result is not None:
                self._add(task.buffers.setdefault(node, {}), index, result)
            del result
            task.waiting[node] -= 1
            if not task.waiting[node]:
                del task.waiting[node]
                if node in task.buffers:
                    self._push(task, node)
                else:
                    self._skip(task, node)

    def _add(self, buffer: dict[int, torch.Tensor], index: int, gradient: torch.Tensor) -> None:
        held = buffer.pop(index, None)
        if held is None:
            buffer[index] = gradient
        elif (
            self._in_place
            and not torch.is_grad_enabled()
            and sys.getrefcount(held) == _ONE_VARIABLE
            and _unshared(held)
        ):
            buffer[index] = held.add_(gradient)
        else:
            buffer[index] = held + gradient

    def _skip(self, task: _Task, node: Node) -> None:
        """A node that no gradient reached: the engine runs it with undefined ones, which gives undefined ones."""
        self._distribute(task, node.next_functions, [None] * len(node.next_functions))


def _edge(tensor: torch.Tensor | GradientEdge) -> tuple[Node, int]:
    edge = tensor if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _let_go(tensors: Sequence[torch.Tensor | GradientEdge]) -> None:
    """The caller of `backward()` still holds the loss, and with it every node; the engine would have emptied them."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and not tensor._is_view():
            tensor.detach_()


def _leads_on(task: _Task, node: Node) -> bool:
    return any(following in (task.needed or ()) for following, _ in node.next_functions)


def _call(node: Node, arguments: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """One result per outgoing edge, of the shape and dtype that the next node expects."""
    if hasattr(node, "apply"):  # a `torch.autograd.Function` in Python: it is told zeros where no gradient came
        for index, wanted in enumerate(node._input_metadata):
            if arguments[index] is None:
                arguments[index] = torch.zeros(tuple(wanted.shape), dtype=wanted.dtype, device=wanted.device)
        results = _by_edge(node, _as_list(node.apply(*arguments)))
    else:
        results = _as_list(node(*arguments))
    for at, (following, index) in enumerate(node.next_functions):
        result = results[at]
        if following is not None and result is not None:
            results[at] = _as_expected(result, following._input_metadata[index])
    return results


def _as_list(results: Any) -> list[torch.Tensor | None]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _by_edge(node: Node, results: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """A Function returns one gradient per argument, but only arguments that are tensors have an edge."""
    wanted = iter([result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed])
    return [None if following is None else next(wanted, None) for following, _ in node.next_functions]


def _as_expected(gradient: torch.Tensor, wanted: Any) -> torch.Tensor:
    shape = tuple(wanted.shape)
    if gradient.shape != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype != wanted.dtype:
        gradient = gradient.to(wanted.dtype)
    return gradient if gradient.device == wanted.device else gradient.to(wanted.device)


def _unshared(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return _uses(tensor) == 1 and torch._C._storage_Use_Count(storage._cdata) == _ONE_TENSOR and _is_dense(tensor)


def _uses(tensor: Any) -> int:
    """How many hold the tensor in C++; all of Python counts as one."""
    return int(tensor._use_count())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: the elements fill their range of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _accumulate(variable: Any, gradients: list[torch.Tensor]) -> None:
    """`AccumulateGrad`: takes the gradient over if nothing else holds it and its layout is the parameter's."""
    gradient = gradients.pop()
    for hook in list((variable._backward_hooks or {}).values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
        del replaced
    if variable.grad is not None:
        variable.grad = variable.grad + gradient if torch.is_grad_enabled() else variable.grad.add_(gradient)
    elif sys.getrefcount(gradient) == _ONE_VARIABLE and _uses(gradient) == 1 and _has_layout(gradient, variable):
        variable.grad = gradient
    elif _is_dense(variable):
        variable.grad = torch.empty_strided(
            variable.shape, variable.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    else:
        variable.grad = gradient.clone(memory_format=torch.contiguous_format)
    del gradient
    for hook in list((getattr(variable, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(variable)


def _has_layout(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    if not _is_dense(variable):
        return gradient.is_contiguous()
    sides = zip(gradient.stride(), variable.stride(), variable.shape, strict=True)
    return all(mine == other for mine, other, size in sides if size > 1)
