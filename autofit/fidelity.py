"""Does recomputing a block change the gradient of this very model? Asked once, on two samples, before any trial."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from autofit.candidate import Candidate, Checkpointing, RecomputingMode
from autofit.step.blocks import Blocks
from autofit.trial import TrialSetup

logger = logging.getLogger(__name__)

Gradients = list[torch.Tensor | None]

# Above this, relative, two gradients of the same step differ: far above rounding, far below what a block that computes
# something else gives. Kernels that add in no order are measured, and allowed ten times what they show.
TOLERANCE = 1e-5
NOISE_FACTOR = 10
SAMPLES = 2  # BatchNorm needs two


def keep_faithful(setup: TrialSetup, blocks: Blocks) -> Blocks:
    """The blocks whose recomputation gives the gradients that training without it gives; others are left out.

    Of the blocks for mode `selective` likewise. Where even two samples do not fit nothing is known, and all are kept.
    Raises DeviceLostError.
    """
    if not blocks.names:
        return blocks
    probe = _Probe(setup)
    if probe.plain is None:
        return blocks
    reasons = dict.fromkeys(probe.guilty(blocks.names, "full"), "recomputing it changes gradients")
    names = tuple(name for name in blocks.names if name not in reasons)
    spoilt = probe.guilty(tuple(name for name in blocks.selective if name in names), "selective")
    selective = tuple(name for name in blocks.selective if name in names and name not in spoilt)
    if reasons or spoilt:
        logger.warning("recomputing changes gradients of %s", ", ".join([*reasons, *spoilt]))
    return replace(blocks, names=names, selective=selective, left_out=(*blocks.left_out, *reasons.items()))


class _Probe:
    """Gradients of one micro-step from always the same state, under different checkpointing."""

    def __init__(self, setup: TrialSetup) -> None:
        self._setup = setup
        self.plain = self._gradients(Checkpointing())
        again = self._gradients(Checkpointing())
        noise = 0.0 if self.plain is None or again is None else _difference(self.plain, again)
        self._allowed = max(TOLERANCE, NOISE_FACTOR * noise)

    def guilty(self, names: tuple[str, ...], mode: RecomputingMode) -> tuple[str, ...]:
        """Those of the blocks that change the gradient in this mode, found by halves."""
        if not names or self._is_faithful(Checkpointing(mode=mode, blocks=names)):
            return ()
        if len(names) == 1:
            return names
        half = len(names) // 2
        return self.guilty(names[:half], mode) + self.guilty(names[half:], mode)

    def _is_faithful(self, checkpointing: Checkpointing) -> bool:
        gradients = self._gradients(checkpointing)
        if gradients is None or self.plain is None:
            return False
        return _difference(self.plain, gradients) <= self._allowed

    def _gradients(self, checkpointing: Checkpointing) -> Gradients | None:
        """None when the step fails."""
        gradients, failure = self._setup.attempt(_micro_step, checkpointing)
        if failure is not None:
            logger.info("two samples with checkpointing %s: %s", checkpointing, failure.message)
        return gradients


def _micro_step(setup: TrialSetup, checkpointing: Checkpointing) -> Gradients:
    setup.snapshot.rewind()
    samples = min(SAMPLES, setup.samples)
    candidate = Candidate(micro_batch_size=samples, accumulation_steps=1, checkpointing=checkpointing)
    step = setup.train_step(candidate)
    parts = step.split(setup.batch_of(samples))
    resident = [*setup.model.parameters(), *setup.model.buffers()]
    with setup.meter.metered(cap_bytes=setup.cap_bytes, resident=resident), step.activated():
        step.micro_step(parts[0])
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    return [None if gradient is None else gradient.detach().cpu().clone() for gradient in gradients]


def _difference(one: Gradients, other: Gradients) -> float:
    """How far two gradients are apart, as a share of the first; infinite where one of them has none."""
    apart, size = 0.0, 0.0
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            a, b = a.to_dense().double(), b.to_dense().double()
            apart += float((a - b).square().sum())
            size += float(a.square().sum())
    return (apart / size) ** 0.5 if size else float(apart > 0)
