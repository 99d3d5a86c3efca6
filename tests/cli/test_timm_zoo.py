"""timm models by name."""

from __future__ import annotations

import sys

import pytest
from torch.nn import functional as F

from autofit.cli.models import load_workload
from autofit.errors import ConfigError


def test_missing_timm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra of this package, not just the name of the other."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'torch-autofit\[timm\]'"):
        load_workload("timm:resnet18")


@pytest.mark.parametrize(
    ("name", "image_size", "expected"),
    [
        ("efficientnet_b1", None, (4, 3, 240, 240)),
        ("resnet10t", 64, (4, 3, 64, 64)),
        ("vit_tiny_patch16_224", 64, (4, 3, 64, 64)),
    ],
)
def test_the_batch_has_the_configured_size(name: str, image_size: int | None, expected: tuple[int, ...]) -> None:
    """From the model's default configuration, or as --image-size says; models of one size are built for it."""
    pytest.importorskip("timm")
    workload = load_workload(f"timm:{name}", image_size=image_size)
    images, target = workload.sample_batch
    assert images.shape == expected
    if image_size:
        F.cross_entropy(workload.model(images), target).backward()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet_18", {}, "Did you mean 'resnet18'"),
        ("resnet18", {"sequence_length": 4}, "does not apply"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, options: dict[str, int], said: str) -> None:
    """Unknown names come with near misses."""
    pytest.importorskip("timm")
    with pytest.raises(ConfigError, match=said):
        load_workload(f"timm:{name}", **options)


def test_what_timm_cannot_build_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reason is in the message."""
    timm = pytest.importorskip("timm")

    def refuse(name: str, **options: object) -> None:
        raise TypeError(f"{name} takes no {list(options)}")

    monkeypatch.setattr(timm, "create_model", refuse)
    with pytest.raises(ConfigError, match=r"cannot build resnet18 with its defaults: resnet18 takes no"):
        load_workload("timm:resnet18")
