"""From the text after `--model` to a model and a batch: torchvision, timm, Hugging Face, or a factory of the user's."""

from __future__ import annotations

from autofit.cli.models.workload import Workload, near_misses
from autofit.errors import ConfigError

__all__ = ["Workload", "load_workload"]

FORMS = (
    "a torchvision name (resnet18), timm:NAME, hf:NAME (a Hugging Face model type, local folder or hub id), "
    "package.module:FACTORY or file.py:FACTORY"
)


def load_workload(name: str, *, image_size: int | None = None, sequence_length: int | None = None) -> Workload:
    """Builds the model that `name` stands for, with random weights, and a small random batch for it.

    `image_size` in pixels and `sequence_length` in tokens replace what the model was made for. Both the weights and
    the batch come from torch's global generator: seed it first. Raises ConfigError for a name that is not known, an
    optional package that is missing, and an option that the model has no use for.
    """
    source, colon, rest = name.partition(":")
    if not colon:
        return _torchvision(name, image_size, sequence_length)
    if not source or not rest:
        raise ConfigError(f"{name!r} is not a model. Allowed: {FORMS}.")
    if source == "timm":
        from autofit.cli.models import timm_zoo

        return timm_zoo.load(rest, image_size=image_size, sequence_length=sequence_length)
    if source == "hf":
        from autofit.cli.models import hf_zoo

        return hf_zoo.load(rest, image_size=image_size, sequence_length=sequence_length)
    from autofit.cli.models import factory

    return factory.load(name, image_size=image_size, sequence_length=sequence_length)


def _torchvision(name: str, image_size: int | None, sequence_length: int | None) -> Workload:
    from autofit.cli.models import torchvision_zoo

    if name.endswith(".py"):
        raise ConfigError(f"{name!r} names a file but no factory in it: write {name}:FACTORY.")
    if name not in torchvision_zoo.names():
        raise ConfigError(
            f"{name!r} is no torchvision model.{near_misses(name, torchvision_zoo.names())} Allowed: {FORMS}."
        )
    return torchvision_zoo.load(name, image_size=image_size, sequence_length=sequence_length)
