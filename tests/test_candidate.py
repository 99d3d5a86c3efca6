"""Candidates, their splits, and the space of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autofit.candidate import Candidate, Checkpointing, SearchSpace, balanced
from autofit.errors import ConfigError

samples = st.integers(min_value=1, max_value=3000)


@given(samples, st.data())
def test_balanced_split(count: int, data: st.DataObject) -> None:
    """E7, E8: the parts add up exactly, differ by one at most, and the larger ones come first."""
    parts = data.draw(st.integers(min_value=1, max_value=count))
    sizes = balanced(count, parts)
    assert sum(sizes) == count
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("count", "parts"), [(3, 4), (3, 0), (0, 1)])
def test_balanced_refuses_empty_parts(count: int, parts: int) -> None:
    """No part is ever empty."""
    with pytest.raises(ConfigError, match="at least one"):
        balanced(count, parts)


def test_the_split_that_the_design_names() -> None:
    """512 samples in 6 steps."""
    assert Candidate(micro_batch_size=86, accumulation_steps=6).split(512) == (86, 86, 85, 85, 85, 85)


@given(samples)
def test_every_split_of_a_space_meets_the_target(count: int) -> None:
    """Each candidate's micro-batches add up to the target in the accumulation steps that it names."""
    splits = SearchSpace().splits(count)
    for size, steps in splits:
        sizes = Candidate(micro_batch_size=size, accumulation_steps=steps).split(count)
        assert sum(sizes) == count
        assert len(sizes) == steps
        assert max(sizes) == size
    assert (count, 1) in splits
    assert len({size for size, _ in splits}) == len(splits)


@given(samples, samples, st.data())
def test_another_batch_keeps_the_micro_batch(count: int, other: int, data: st.DataObject) -> None:
    """The last batch of an epoch is split so that no part is empty or larger than the candidate's micro-batch."""
    size, steps = data.draw(st.sampled_from(SearchSpace().splits(count)))
    sizes = Candidate(micro_batch_size=size, accumulation_steps=steps).split(other)
    assert sum(sizes) == other
    assert 1 <= min(sizes) <= max(sizes) <= size


def test_a_space_of_512_has_45_micro_batches() -> None:
    """Balanced splits leave far fewer micro-batches than samples."""
    assert len(SearchSpace().splits(512)) == 45


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"micro_batch_size": 48}, ((47, 11),)),
        ({"micro_batch_size": [64, 128]}, ((64, 8), (128, 4))),
        ({"accumulation_steps": 4}, ((128, 4),)),
        ({"accumulation_steps": [1, 2]}, ((256, 2), (512, 1))),
        ({"micro_batch_size": range(100, 200), "accumulation_steps": [2, 3, 4, 5]}, ((103, 5), (128, 4), (171, 3))),
        ({"micro_batch_size": 1000}, ((512, 1),)),
        ({"micro_batch_size": 48, "even_split": True}, ((32, 16),)),
        ({"micro_batch_size": range(100, 600), "even_split": True}, ((64, 8), (128, 4), (256, 2), (512, 1))),
        ({"accumulation_steps": range(1, 9), "even_split": True}, ((64, 8), (128, 4), (256, 2), (512, 1))),
    ],
)
def test_splits_of_a_named_space(space: dict[str, object], expected: tuple[tuple[int, int], ...]) -> None:
    """Micro-batches are upper bounds, accumulation steps are exact; nothing is larger than the target."""
    assert SearchSpace(**space).splits(512) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "float17"},
        {"micro_batch_size": 0},
        {"micro_batch_size": []},
        {"micro_batch_size": "many"},
        {"checkpointing": "some"},
        {"unknown": 1},
        {"accumulation_steps": [2, -1]},
        {"micro_batch_size": 1.5},
    ],
)
def test_a_space_that_cannot_be_meant(values: dict[str, object]) -> None:
    """Each is a ConfigError that names the field."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        SearchSpace(**values)


def test_a_space_without_any_split() -> None:
    """More steps than samples leaves nothing to try."""
    with pytest.raises(ConfigError, match="No split of 4 samples"):
        SearchSpace(accumulation_steps=5).splits(4)


def test_candidates_are_frozen_and_strict() -> None:
    """Data does not change, unknown fields are refused, and no checkpointing takes no blocks."""
    candidate = Candidate(micro_batch_size=1, accumulation_steps=1)
    with pytest.raises(ValidationError):
        candidate.micro_batch_size = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="takes no blocks"):
        Checkpointing(mode="none", blocks=("a",))
    with pytest.raises(ValidationError, match="Extra inputs"):
        Candidate(micro_batch_size=1, accumulation_steps=1, batch=3)  # type: ignore[call-arg]


def test_json_round_trip() -> None:
    """A candidate reads back equal."""
    candidate = Candidate(
        micro_batch_size=3,
        accumulation_steps=2,
        precision="bfloat16",
        checkpointing=Checkpointing(mode="full", blocks=("a",)),
    )
    assert Candidate.model_validate_json(candidate.model_dump_json()) == candidate


def test_a_mask_of_modes_is_one_checkpointing():
    """Every block in its mode, and back."""
    modes = {"a": "full", "b": "none", "c": "selective", "d": "offload", "e": "full"}
    mask = Checkpointing.of(modes)
    assert mask == Checkpointing(mode="full", blocks=("a", "e"), selective_blocks=("c",), offload_blocks=("d",))
    assert mask.modes == {name: mode for name, mode in modes.items() if mode != "none"}
    assert str(mask) == "full(2)+selective(1)+offload(1)"
    assert Checkpointing.of({"a": "none"}) == Checkpointing()
    assert Checkpointing.of({"a": "offload"}) == Checkpointing(mode="offload", blocks=("a",))
    assert Checkpointing.of({"a": "offload", "b": "selective"}).mode == "selective"


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "none", "blocks": ("a",)},
        {"mode": "full", "selective_blocks": ("a",)},
        {"mode": "selective", "blocks": ("a",), "selective_blocks": ("b",)},
        {"mode": "none", "offload_blocks": ("a",)},
        {"mode": "full", "blocks": ("a",), "selective_blocks": ("a",)},
        {"mode": "full", "blocks": ("a", "a")},
    ],
)
def test_masks_that_cannot_be_meant(fields):
    """A block has one mode, and modes stand in one order."""
    with pytest.raises(ValueError, match=r"blocks"):
        Checkpointing(**fields)
