"""The options of the caching allocator, and the two size rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import ConfigError
from autofit.memory import AllocatorConfig
from autofit.units import GiB, MiB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False", {}),
        (" max_split_size_mb : 128 ,garbage_collection_threshold:0.6", {"max_split_size": 128 * MiB}),
        ("max_split_size_mb:64,max_non_split_rounding_mb:32", {"max_non_split_rounding": 32 * MiB}),
        ("large_segment_size_mb:12", {"large_segment_size": 12 * MiB}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * 16}),
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            {"roundup_power2_divisions": (1,) * 9 + (2, 4) + (8,) * 5},
        ),
        (
            "roundup_power2_divisions:[64:8,256:4],backend:native",
            {"roundup_power2_divisions": (8,) * 7 + (0, 4) + (0,) * 7},
        ),
        ("pinned_use_cuda_host_register:True,expandable_segments:True", {"expandable_segments": True}),
    ],
)
def test_options_are_read_as_torch_reads_them(text: str, expected: dict[str, Any]) -> None:
    """Each option ends in its field, in bytes; what has no bearing on device memory is skipped."""
    config = AllocatorConfig.parse(text)
    for name, value in expected.items():
        assert getattr(config, name) == value
    assert config.is_default == (not expected)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_split_size_mb:10", "max_split_size"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding"),
        ("large_segment_size_mb:10", "large_segment_size"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions"),
        ("roundup_power2_divisions:[100:2]", "roundup_power2_divisions"),
        ("expandable_segments:yes", "expandable_segments"),
        ("max_split_size_mb:many", "many"),
        ("backend:cudaMallocAsync", "cudaMallocAsync"),
        ("expandable_segments", "key:value"),
    ],
)
def test_what_torch_refuses_is_refused(text: str, named: str) -> None:
    """A value outside its range, or one that cannot be read, is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=named):
        AllocatorConfig.parse(text)


def test_every_interval_needs_its_divisions() -> None:
    """Fewer divisions than powers of two are refused."""
    with pytest.raises(ConfigError, match="16"):
        AllocatorConfig(roundup_power2_divisions=(1, 2))


@pytest.mark.parametrize(
    ("nbytes", "divisions", "expected"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200 * MiB, 0, 1200 * MiB),
        (1200, 4, 1536),  # not above 512 × divisions: the plain rule
        (1200 * MiB, 4, 1280 * MiB),  # 1024 + 256
        (1024 * MiB, 4, 1024 * MiB),
        (1025 * MiB, 4, 1280 * MiB),
        (1800 * MiB, 4, 2048 * MiB),
        (1200 * MiB, 1, 1200 * MiB),
    ],
)
def test_sizes_are_rounded(nbytes: int, divisions: int, expected: int) -> None:
    """To 512 B, or with divisions to equal steps between two powers of two."""
    assert AllocatorConfig(roundup_power2_divisions=(divisions,) * 16).round_size(nbytes) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(MiB - 1, MiB), (2 * MiB + 1, 2 * MiB + 512), (5 * MiB, 6 * MiB), (9 * MiB, 9 * MiB), (65 * GiB, 96 * GiB)],
)
def test_each_interval_has_its_own_divisions(nbytes: int, expected: int) -> None:
    """The interval is the power of two below the size; below 2 MiB it is the first, above 32 GiB the last."""
    config = AllocatorConfig(roundup_power2_divisions=(0, 0, 2, *(0,) * 12, 2))
    assert config.round_size(nbytes) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (33 * MiB, 34 * MiB),
    ],
)
def test_segments_have_their_sizes(size: int, expected: int) -> None:
    """2 MiB for small blocks, 20 MiB up to 10 MiB, from there a multiple of 2 MiB."""
    assert AllocatorConfig().segment_size(size) == expected


@given(nbytes=st.integers(1, 64 * GiB), divisions=st.sampled_from([0, 1, 2, 4, 16, 64]))
def test_rounding_never_loses_bytes_and_is_stable(nbytes: int, divisions: int) -> None:
    """A rounded size holds the request, is a multiple of 512 B, rounds to itself and fits its segment."""
    config = AllocatorConfig(roundup_power2_divisions=(divisions,) * 16)
    size = config.round_size(nbytes)
    assert size >= nbytes
    assert size % 512 == 0
    assert config.round_size(size) == size
    assert config.segment_size(size) >= size
    if divisions > 1:
        assert size - nbytes < max(512, nbytes // divisions)
