"""A training step written by hand, recorded: on real tensors with torch's engine, or on fake ones with the walk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autofit.predict.recorder import Recorder, Trace
from autofit.predict.shadow import Shadow
from autofit.predict.target import FakeMode
from autofit.predict.walk import PythonEngine, SavedTensors

CPU = torch.device("cpu")


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Of a dict batch the model's own loss, of any other cross-entropy."""
    if isinstance(batch, dict):
        return model(**batch).loss
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def record(make: Callable[[], nn.Module], batch: Any, *, fake: bool, steps: int = 2, parts: int = 2) -> Trace:
    """What happens to memory in a few optimizer steps of a few micro-batches each."""
    torch.manual_seed(0)
    model = make()
    recorder = Recorder(CPU)
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeMode())
            Shadow(CPU).take_over(model)
        trace = stack.enter_context(recorder.closing())
        if fake:
            # A recorder is a dispatch mode, under which the engine adds out of place.
            engine = PythonEngine(SavedTensors(recorder.saved), on_node=recorder.enter_node, in_place=False)
            stack.enter_context(engine.active())
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.adopt(tensor, "weights")
        optimizer = torch.optim.AdamW(model.parameters())
        moved = {k: v.clone() for k, v in batch.items()} if isinstance(batch, dict) else [v.clone() for v in batch]
        for _ in range(steps):
            for _ in range(parts):
                loss_of(model, moved).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace


def sized_events(trace: Trace) -> list[tuple[int, int]]:
    """The events with their bytes: births positive, deaths negative."""
    return [(event, trace.sizes[event]) if event >= 0 else (event, -trace.sizes[~event]) for event in trace.events]
