"""Which blocks can be recomputed, seen in one micro-step without values."""

from __future__ import annotations

from autofit.candidate import Candidate
from autofit.predict.shadow import fake_batch
from autofit.predict.tracing import Subject, following
from autofit.step.accumulation import Accumulation
from autofit.step.blocks import Blocks, keep_checkpointable, observe_calls

# As in traces: batch normalisation refuses 1.
_SAMPLES = 3


def observed_blocks(subject: Subject, blocks: Blocks) -> Blocks:
    """The blocks that one micro-step shows to be fit for recomputation, and why others are not.

    Raises UntraceableError when the step needs values or the device.
    """
    model = subject.model
    with following(model, device=subject.device, capability=subject.capability) as (recorder, shadow):
        if not model.training:
            model.train()
        with recorder.outside():
            batch = subject.layout.resize(fake_batch(subject.sample_batch, subject.device), _SAMPLES)
        step = Accumulation(
            model,
            shadow.optimizer(subject.optimizer, model),
            Candidate(micro_batch_size=_SAMPLES, accumulation_steps=1),
            device=subject.device,
            **subject.step_options,
        )
        (part,) = step.split(batch)
        with observe_calls(model, blocks.names) as observed, step.activated():
            step.micro_step(part)
        step.zero_grad()
    return keep_checkpointable(blocks, observed)
