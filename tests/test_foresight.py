"""What tune() knows of a candidate before it tries it."""

from __future__ import annotations

import time

import torch.nn.functional as F

from autofit.candidate import Candidate
from autofit.foresight import Foresight
from autofit.plan import Trial
from autofit.predict import Predictor
from tests.models import ConvNet, image_batch

CANDIDATE = Candidate(micro_batch_size=90, accumulation_steps=1)
TRIAL = Trial(number=0, candidate=CANDIDATE, outcome="feasible")


def predictor() -> Predictor:
    return Predictor(ConvNet(64), image_batch(), loss_fn=F.cross_entropy, device="cpu")


def test_the_peak_is_predicted_under_the_cap() -> None:
    """An allocator that is held back gives back what it caches, and so reserves less than one that is not."""
    free = predictor().predict(CANDIDATE)
    assert free.fit_threshold_bytes < free.peak_reserved_bytes
    caps = (free.fit_threshold_bytes, 2 * free.peak_reserved_bytes, free.fit_threshold_bytes - 1)
    found = [Foresight(predictor(), samples=90, cap_bytes=cap).annotate(TRIAL).predicted_peak_bytes for cap in caps]
    assert found == [free.fit_threshold_bytes, free.peak_reserved_bytes, free.fit_threshold_bytes]


def test_nothing_new_is_predicted_after_the_deadline() -> None:
    """The time that was asked for is not spent on traces; a trial that ran is still told what was predicted for it."""
    late = Foresight(predictor(), samples=90, cap_bytes=1 << 40, deadline=time.monotonic())
    assert late.needed_bytes(CANDIDATE) is None
    assert late.solved(CANDIDATE, cap_bytes=1 << 40, modes={"full"}) == CANDIDATE
    assert late.annotate(TRIAL).predicted_peak_bytes == predictor().predict(CANDIDATE).peak_reserved_bytes
