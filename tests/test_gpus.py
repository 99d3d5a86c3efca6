"""The catalogue of GPUs."""

from __future__ import annotations

import pytest

from autofit.errors import ConfigError
from autofit.gpus import GPUS, Gpu, find_gpu
from autofit.units import GiB


def test_the_catalogue_covers_a_decade() -> None:
    """More than twenty models, from the GTX 1660 to the B200."""
    assert len(GPUS) > 20
    assert {"GTX 1660", "B200"} <= set(GPUS)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_figures_are_plausible(gpu: Gpu) -> None:
    """No rate falls with the precision, tensor cores come with their generation, and units are not mixed up."""
    assert 4 * GiB < gpu.total_bytes < 200 * GiB
    assert 1e11 < gpu.bandwidth < 1e13
    assert 1e12 < gpu.float32 < 2e14
    assert (gpu.tf32 is not None) == (gpu.bfloat16 is not None) == (gpu.capability >= (8, 0))
    if gpu.tf32 is not None and gpu.bfloat16 is not None:
        assert gpu.float32 <= gpu.tf32 < gpu.bfloat16 == gpu.float16


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "RTX-4090"])
def test_names_are_found_however_they_are_written(name: str) -> None:
    """The maker's prefixes, case, spaces and hyphens do not count."""
    assert find_gpu(name).name == "RTX 4090"


@pytest.mark.parametrize(
    ("name", "hint"), [("RTX 4900", "RTX 4090"), ("A100", "'A100 40GB' or 'A100 80GB'"), ("?", "Known")]
)
def test_unknown_names_get_the_nearest(name: str, hint: str) -> None:
    """A wrong or incomplete name is answered with those that come closest."""
    with pytest.raises(ConfigError, match=r"no GPU") as error:
        find_gpu(name)
    assert hint in str(error.value)
