"""What is believed to fit, from peaks and from predictions."""

from __future__ import annotations

import pytest
from simulated import affine_bytes, fitted, ran_out, space

from autofit.candidate import Candidate
from autofit.plan import Trial
from autofit.search.evidence import Evidence
from autofit.search.fit import Fit
from autofit.search.lines import Space
from autofit.units import GiB

LINE = space(precisions=("float32",))
SPACE = Space(LINE)
(FLOAT32,) = SPACE.lines


def at(size: int, candidates: list[Candidate] = LINE) -> Candidate:
    """The candidate of that micro-batch."""
    return next(c for c in candidates if c.micro_batch_size == size)


def limit(tried: dict[int, Trial], *, cap: int | None = 10 * GiB, predict=None) -> int:
    """The largest micro-batch that is believed to fit; 0 for none."""
    evidence = Evidence(SPACE, [(at(size), trial) for size, trial in tried.items()], cap_bytes=cap)
    index = Fit(SPACE, cap_bytes=cap, predict=predict).limit(FLOAT32, evidence)
    return FLOAT32.sizes[index] if index >= 0 else 0


def fit(size: int, gib: float) -> Trial:
    """A trial that fitted."""
    return fitted(at(size), seconds=1, peak=int(gib * GiB))


def oom(size: int) -> Trial:
    """A trial that did not."""
    return ran_out(at(size))


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        pytest.param({}, 512, id="nothing known: the largest, since running out early is cheap"),
        pytest.param({512: oom(512)}, 64, id="ran out: far down at once"),
        pytest.param({512: oom(512), 64: oom(64)}, 8, id="and again"),
        pytest.param({1: oom(1)}, 0, id="not even one sample"),
        pytest.param({512: oom(512), 64: fit(64, 5)}, 128, id="one peak: all of it put down to samples"),
        pytest.param({512: oom(512), 64: fit(64, 6), 32: fit(32, 4)}, 128, id="two peaks: a straight line to the cap"),
        pytest.param({64: fit(64, 9)}, 74, id="nothing larger on that view: half the peak taken to be base"),
        pytest.param({64: fit(64, 5), 128: oom(128)}, 86, id="a failure that the model did not expect: the bracket"),
        pytest.param({8: fit(8, 5), 9: oom(9)}, 8, id="nothing between"),
        pytest.param({64: fit(64, 5), 32: fit(32, 5)}, 512, id="peaks that do not grow speak against nothing"),
        pytest.param({64: fit(64, 5), 32: oom(32)}, 128, id="a failure below a fit rules out only itself"),
    ],
)
def test_limit_from_peaks(tried, expected):
    """Without a predictor the peaks lead to the limit."""
    assert limit(tried) == expected


def test_limit_without_a_cap():
    """With no cap told, what was held when it ran out stands in for it."""
    tried = {512: ran_out(at(512), reached=10 * GiB), 64: fit(64, 6), 32: fit(32, 4)}
    assert limit(tried, cap=None) == 128
    assert limit({64: fit(64, 6), 32: fit(32, 4)}, cap=None) == 512


@pytest.mark.parametrize(
    ("tried", "share", "expected"),
    [
        ({}, 1.0, 74),
        ({}, 0.5, 171),
        ({74: fit(74, 5)}, 1.0, 128),
        ({74: fit(74, 20)}, 1.0, 74),
        ({74: oom(74)}, 1.0, 64),
        ({171: oom(171)}, 0.5, 128),
        ({171: fit(171, 9)}, 2.0, 171),
    ],
)
def test_limit_from_predictions(tried, share, expected):
    """A predictor's limit moves with what was measured: down by failures, up by peaks below what was predicted."""
    assert limit(tried, predict=lambda c: int(share * affine_bytes(c))) == expected


def mostly_base(candidate: Candidate) -> int:
    """9 GiB whatever the micro-batch, 10 GiB at 512."""
    return int((9 + candidate.micro_batch_size / 512) * GiB)


@pytest.mark.parametrize(
    ("failed", "expected"),
    [((512,), 256), ((512, 256), 1), ((512, 256, 1), 0)],
    ids=["further than proven", "the smallest remains", "until it fails"],
)
def test_failures_push_further_than_they_prove(failed, expected):
    """Each failure against prediction is followed by a longer step, but none rules out the smallest split unseen."""
    assert limit({size: oom(size) for size in failed}, predict=mostly_base) == expected


def test_predictions_are_asked_for_once_and_rarely():
    """A predictor takes milliseconds: it is asked some log2(n) times for a line, and never twice the same."""
    asked: list[Candidate] = []

    def predict(candidate: Candidate) -> int:
        asked.append(candidate)
        return affine_bytes(candidate)

    believed = Fit(SPACE, cap_bytes=10 * GiB, predict=predict)
    for _ in range(3):
        believed.limit(FLOAT32, Evidence(SPACE, []))
    assert len(asked) == len(set(asked)) <= 7


def test_other_lines_lend_their_figures():
    """A line without a peak starts from the base and slope of another; from 16 to 32 bits the slope doubles."""
    candidates = space(precisions=("bfloat16", "float32"))
    both = Space(candidates)
    half, single = both.lines
    tried = [(c, fitted(c, seconds=1, peak=affine_bytes(c))) for c in half.candidates if c.micro_batch_size in (32, 64)]
    believed = Fit(both, cap_bytes=10 * GiB, predict=None)
    evidence = Evidence(both, tried)
    assert single.sizes[believed.limit(single, evidence)] == 74
    assert half.sizes[believed.limit(half, evidence)] == 128


def test_other_lines_rule_nothing_out():
    """What is only borrowed leaves the smallest split of a line to be tried."""
    both = Space(space(precisions=("bfloat16", "float32")))
    half, single = both.lines
    tried = [(half.candidates[0], fitted(half.candidates[0], seconds=1, peak=10 * GiB))]
    assert Fit(both, cap_bytes=10 * GiB, predict=None).limit(single, Evidence(both, tried)) == 0
