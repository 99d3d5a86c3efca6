"""One small, plain step before any trial: does it train at all, and which blocks can be recomputed?"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from autofit.candidate import Candidate
from autofit.errors import AutofitError, ConfigError, StepError
from autofit.loss import Weighting, check_weighting, resolve_loss, resolve_weighting
from autofit.oom import Failure
from autofit.step.blocks import Blocks, discover_blocks, keep_checkpointable, observe_calls
from autofit.trial import TrialSetup

logger = logging.getLogger(__name__)

# Above this the loss or the gradient of a whole batch is not the weighted sum of its parts': rounding is below, also
# that of TF32 convolutions.
SEPARABLE_TOLERANCE = 1e-2
_SHOWN = 5  # blocks that are named in a note


@dataclass(frozen=True)
class ProbeResult:
    """Blocks that may be recomputed, what the user should know, and trainable parameters that no gradient reached."""

    blocks: Blocks
    notes: tuple[str, ...]
    unused: tuple[str, ...] = ()


def probe(setup: TrialSetup, *, block_patterns: tuple[str, ...] | None) -> ProbeResult:
    """Forward and backward in float32 at the sample batch's own size, or as much of it as fits.

    Raises StepError when the model or the loss fails or is not finite, ConfigError when the loss is not a scalar or
    does not reach the parameters. Where not even one sample fits, blocks are kept unobserved: the trials will say so.
    """
    blocks = discover_blocks(setup.model, patterns=block_patterns)
    samples, shrunk = min(max(setup.layout.samples, 2), setup.samples), False
    while True:
        reports = setup.reports(_plain_step, samples, blocks)
        failure = setup.first_failure(reports)
        if failure is None:
            seen = [report.value for report in reports if report.value is not None]
            unused = tuple(dict.fromkeys(name for _, names in seen for name in names))
            return ProbeResult(seen[0][0], _weighting_notes(setup), unused)
        out_of_memory = failure.kind in ("memory", "maybe_memory")
        if not out_of_memory and not shrunk:
            _raise(failure)
        if samples == 1 or not out_of_memory:  # too few samples can fail otherwise, as under BatchNorm
            return ProbeResult(blocks, ())
        samples, shrunk = samples // 2, True


def _plain_step(setup: TrialSetup, samples: int, blocks: Blocks) -> tuple[Blocks, tuple[str, ...]]:
    """The blocks as they ran, and the names of trainable parameters that got no gradient."""
    candidate = Candidate(micro_batch_size=samples, accumulation_steps=1)
    step = setup.train_step(candidate)
    parts = step.split(setup.batch_of(samples))
    resident = [*setup.model.parameters(), *setup.model.buffers()]
    with (
        setup.meter.metered(cap_bytes=setup.cap_bytes, resident=resident),
        observe_calls(setup.model, blocks.names) as observed,
        step.activated(),
    ):
        loss = step.micro_step(parts[0])
        if not bool(loss.isfinite()):
            raise StepError(
                f"The loss of the sample batch is {float(loss)} in float32, before any step was taken. Look for "
                "logarithms or divisions of zero, unnormalised inputs, or targets outside the classes.",
                phase="forward",
            )
        unused = tuple(n for n, p in setup.model.named_parameters() if p.requires_grad and p.grad is None)
        if all(parameter.grad is None for parameter in setup.model.parameters()):
            raise ConfigError(
                "The loss does not reach the model's parameters: after backward none of them has a gradient. "
                "Compute it from the model's output, without detach(), item() or torch.no_grad()."
            )
    return keep_checkpointable(blocks, observed), unused


def _raise(failure: Failure) -> None:
    if isinstance(failure.error, AutofitError):
        raise failure.error
    raise StepError(
        f"The model or its loss failed on the sample batch in plain float32, before anything was tuned: "
        f"{failure.message}"
    ) from failure.error


def describe_blocks(blocks: Blocks) -> tuple[str, ...]:
    """What people should know of the blocks that were found."""
    notes = []
    if blocks.names:
        names = ", ".join(blocks.names[:_SHOWN]) + (", …" if len(blocks.names) > _SHOWN else "")
        notes.append(f"Blocks that can be recomputed: {len(blocks.names)}, {blocks.found_by}: {names}.")
    else:
        notes.append("No blocks were found that could be recomputed, so checkpointing was not tried.")
    if blocks.left_out:
        named = "; ".join(f"{name}: {reason}" for name, reason in blocks.left_out[:_SHOWN])
        notes.append(f"Blocks left out of checkpointing: {named}.")
    return tuple(notes)


def _weighting_notes(setup: TrialSetup) -> tuple[str, ...]:
    """How micro-batches are weighted, and whether that gives the full batch's loss."""
    weighting = _weighting(setup, _few_samples(setup))
    difference, failure = setup.attempt(_difference_of_parts)
    notes = [weighting.describe()]
    if failure is None and difference is not None and difference > SEPARABLE_TOLERANCE:
        mismatch = (
            f"The loss or gradient of a whole batch differs by {difference:.1%} from that of its micro-batches, so "
            "accumulated gradients are not the full batch's. Pass loss_weight= to say how micro-batches weigh."
        )
        logger.warning("%s", mismatch)
        notes.append(mismatch)
    return tuple(notes)


def _few_samples(setup: TrialSetup) -> Any:
    return setup.batch_of(min(max(setup.layout.samples, 3), 8))


def _weighting(setup: TrialSetup, batch: Any) -> Weighting:
    options = setup.loss_options
    return resolve_weighting(
        batch,
        loss_fn=options.get("loss_fn"),
        compute_loss=options.get("compute_loss"),
        loss_weight=options.get("loss_weight"),
        model=setup.model,
    )


def _difference_of_parts(setup: TrialSetup) -> float | None:
    """How far the loss of a few samples is from that of their parts, as a share; None where that cannot be said."""
    options, batch = setup.loss_options, _few_samples(setup)
    loss = resolve_loss(loss_fn=options.get("loss_fn"), compute_loss=options.get("compute_loss"))
    return check_weighting(loss, setup.model, setup.layout, batch, _weighting(setup, batch))
