"""timm models with random weights and images of the size in their configuration."""

from __future__ import annotations

from typing import Any

import torch

from autofit.cli.models.workload import Workload, near_misses, refuse_option
from autofit.errors import ConfigError

SAMPLES = 4


def load(name: str, *, image_size: int | None, sequence_length: int | None) -> Workload:
    """The timm model of that name as an image classifier; raises ConfigError when timm or the name is missing."""
    refuse_option("--sequence-length", sequence_length, of=f"timm:{name}", because="it takes no token sequences")
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"--model timm:{name} needs timm ({error}). Install it: pip install 'torch-autofit[timm]'"
        ) from error
    if not timm.is_model(name):
        raise ConfigError(
            f"{name!r} is no timm model.{near_misses(name, timm.list_models())} All names: timm.list_models()."
        )
    size: dict[str, Any] = {"img_size": image_size} if image_size and _is_built_for_one_size(name) else {}
    try:
        model: Any = timm.create_model(name, pretrained=False, **size)
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"timm cannot build {name} with {size or 'its defaults'}: {error}") from error
    channels, height, width = model.default_cfg["input_size"]
    if image_size:
        height = width = image_size
    classes = model.num_classes
    batch = (torch.randn(SAMPLES, channels, height, width), torch.randint(classes, (SAMPLES,)))
    return Workload(model.train(), batch, f"{channels} × {height} × {width} images, {classes} classes")


def _is_built_for_one_size(name: str) -> bool:
    """Whether its layers depend on the image's size, as timm itself marks it: then the constructor must be told."""
    import timm

    configuration = timm.get_pretrained_cfg(name)
    return configuration is not None and configuration.fixed_input_size
