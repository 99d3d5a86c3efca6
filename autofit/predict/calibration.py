"""What operators take for themselves while they run, seen in one small real step: no trace without values shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.candidate import Candidate
from autofit.errors import ConfigError
from autofit.predict.scratch import Learned, OperatorKey, operator_key
from autofit.predict.tracing import Subject
from autofit.snapshot import restored
from autofit.step.accumulation import Accumulation

_MARK = "autofit operator "
_MEMORY = "[memory]"


def learn_scratch(subject: Subject, candidate: Candidate, sizes: Sequence[int]) -> Learned:
    """Runs a micro-step of each of `sizes` samples for real, in the candidate's precision and checkpointing.

    Afterwards the model is what it was. Raises ConfigError where it does not lie on the traced device with its values.
    """
    model, device = subject.model, subject.device
    if any(parameter.device.type != device.type for parameter in model.parameters()):
        raise ConfigError(
            f"calibrate=True runs a small step on {device.type!r}, and the model does not lie there. Move it there, or "
            "leave calibrate out."
        )
    watch = _on_host if device.type == "cpu" else _on_cuda
    with restored(model, None, device=device):
        if not model.training:
            model.train()
        with watch(device) as taken:
            for size in sizes:
                _micro_step(subject, candidate.model_copy(update={"micro_batch_size": size, "accumulation_steps": 1}))
    return taken()


def _micro_step(subject: Subject, candidate: Candidate) -> None:
    model = subject.model
    step = Accumulation(
        model,
        torch.optim.SGD(model.parameters()),
        candidate,
        device=subject.device,
        **subject.step_options,
    )
    (part,) = step.split(subject.layout.resize(subject.sample_batch, candidate.micro_batch_size))
    with step.activated(), torch.enable_grad():
        step.zero_grad()
        step.micro_step(part)
        step.zero_grad()


Taken = Callable[[], dict[OperatorKey, int]]


@contextmanager
def _on_host(device: torch.device) -> Iterator[Taken]:
    """By the events of the host's allocator, which the profiler hears."""
    keys: list[OperatorKey] = []
    spans: list[tuple[int, int, int]] = []

    class Marking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keys.append(operator_key(func, args))
            with record_function(f"{_MARK}{len(keys) - 1}"):  # type: ignore[no-untyped-call]
                return func(*args, **(kwargs or {}))

    memory: list[tuple[int, int]] = []
    seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    with seen, Marking():  # type: ignore[no-untyped-call]
        yield lambda: _largest(zip(keys, _spare_by_operator(len(keys), spans, memory), strict=True))
    recorded: Any = seen.profiler  # whose stubs know neither results nor bytes
    for event in recorded.kineto_results.events():
        if event.name() == _MEMORY:
            memory.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            spans.append((event.start_ns(), event.end_ns(), int(event.name()[len(_MARK) :])))


def _spare_by_operator(
    count: int, spans: Iterable[tuple[int, int, int]], memory: Iterable[tuple[int, int]]
) -> list[int]:
    """For each operator the bytes that it had in use beyond those that it left in use."""
    result = [0] * count
    remaining = iter(sorted(memory))
    at, nbytes = next(remaining, (None, 0))
    for start, end, number in sorted(spans):
        now = most = 0
        while at is not None and at <= end:
            if at >= start:
                now += nbytes
                most = max(most, now)
            at, nbytes = next(remaining, (None, 0))
        result[number] = most - max(now, 0)
    return result


@contextmanager
def _on_cuda(device: torch.device) -> Iterator[Taken]:
    """By the statistics of the caching allocator. The first run of an operator also makes what lasts: run twice."""
    seen: list[tuple[OperatorKey, int]] = []

    class Metering(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            torch.cuda.reset_peak_memory_stats(device)
            out = func(*args, **(kwargs or {}))
            spare = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
            seen.append((operator_key(func, args), spare))
            return out

    with Metering():  # type: ignore[no-untyped-call]
        yield lambda: _largest(seen)


def _largest(seen: Iterable[tuple[OperatorKey, int]]) -> dict[OperatorKey, int]:
    result: defaultdict[OperatorKey, int] = defaultdict(int)
    for key, spare in seen:
        result[key] = max(result[key], spare)
    return dict(result)
