"""The space as lines."""

from __future__ import annotations

import pytest
from simulated import space

from autofit.candidate import Candidate, Checkpointing
from autofit.search.lines import Space


def test_lines_hold_what_differs_only_in_the_split():
    """Every candidate lies in exactly one line, with its like, the smallest micro-batch first."""
    candidates = space(precisions=("float32", "bfloat16"), modes=("none", "full"))
    lines = Space(candidates).lines
    assert sorted(map(str, (c for line in lines for c in line.candidates))) == sorted(map(str, candidates))
    for line in lines:
        assert len({(c.precision, c.checkpointing) for c in line.candidates}) == 1
        assert list(line.sizes) == sorted(line.sizes)
        assert line.sizes == tuple(c.micro_batch_size for c in line.candidates)


def test_likely_fast_lines_come_first():
    """No recomputation before recomputation, tensor cores before none."""
    lines = Space(space(precisions=("float32", "tf32", "bfloat16"), modes=("full", "none"))).lines
    assert [(line.candidates[0].checkpointing.mode, line.candidates[0].precision) for line in lines] == [
        ("none", "bfloat16"),
        ("none", "tf32"),
        ("none", "float32"),
        ("full", "bfloat16"),
        ("full", "tf32"),
        ("full", "float32"),
    ]


def test_find_is_the_inverse_of_the_lines():
    """Each candidate is found where it lies, and nothing else is found."""
    candidates = space(modes=("none", "full"))
    lines = Space(candidates)
    for candidate in candidates:
        position = lines.find(candidate)
        assert position is not None
        assert lines.lines[position.line].candidates[position.index] == candidate
    assert lines.find(Candidate(micro_batch_size=3, accumulation_steps=7)) is None
    assert lines.find(candidates[0].model_copy(update={"precision": "float16"})) is None
    assert (
        lines.find(candidates[0].model_copy(update={"checkpointing": Checkpointing(mode="full", blocks=("a",))}))
        is None
    )


def test_a_candidate_given_twice_is_one():
    """Repeated candidates do not lengthen a line."""
    candidates = space(precisions=("float32",))
    assert Space(candidates * 2).lines[0].candidates == Space(candidates).lines[0].candidates


def test_twins_are_the_same_without_recomputation():
    """A line that recomputes knows the one that does not, where the space has it."""
    lines = Space(
        space(precisions=("float32", "bfloat16"), modes=("none", "full"))
        + space(precisions=("float16",), modes=("full",))
    )
    for line, twin in zip(lines.lines, lines.twins, strict=True):
        if line.recomputes and line.candidates[0].precision != "float16":
            assert twin is not None
            assert twin.candidates[0].precision == line.candidates[0].precision
            assert not twin.recomputes
        else:
            assert twin is None


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ([(512, 1), (256, 2), (86, 6)], [6 / 512, 2 / 512, 1 / 512]),
        ([(86, 6), (43, 12)], [12 / 516, 6 / 516]),
        ([(8, 1), (16, 1)], [1 / 8, 1 / 16]),
    ],
    ids=["one batch", "one batch, not told which", "different batches"],
)
def test_micro_steps_per_sample(splits, expected):
    """Taken from the batch that all splits share, where there is one, else from the micro-batch alone."""
    (line,) = Space([Candidate(micro_batch_size=size, accumulation_steps=steps) for size, steps in splits]).lines
    assert line.steps == pytest.approx(expected)


def test_more_steps_of_the_same_size_come_first():
    """Of splits that need the same memory the one with the fewest steps is last, where the limit is looked for."""
    candidates = [Candidate(micro_batch_size=2, accumulation_steps=steps) for steps in (5, 7, 6)]
    assert [c.accumulation_steps for c in Space(candidates).lines[0].candidates] == [7, 6, 5]
