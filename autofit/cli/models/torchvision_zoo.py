"""torchvision models with random weights, each with a batch of the kind and size that it was made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

from autofit.cli.models.workload import Workload, refuse_option
from autofit.errors import ConfigError

SAMPLES = 4
FRAMES = 16  # the clip length of torchvision's video recipes
OBJECTS = 4
CATEGORIES = 91  # of COCO, as torchvision numbers them
KEYPOINTS = 17
SEGMENTATION_SIZE = 520  # torchvision's published segmentation weights all resize to it
FLOW_SIZE = (368, 496)  # RAFT's first training stage, FlyingChairs
FLOW_DECAY = 0.8  # the weight of each earlier estimate, Teed & Deng 2020, equation 7


def names() -> list[str]:
    """Every torchvision model that can be trained; the quantized ones are made for inference."""
    return [name for name in list_models() if not name.startswith("quantized_")]


def load(name: str, *, image_size: int | None, sequence_length: int | None) -> Workload:
    """The model of that name and a batch for its task; raises ConfigError for an image size that it cannot have."""
    refuse_option("--sequence-length", sequence_length, of=name, because="it takes no token sequences")
    _, *folder, _ = get_model_builder(name).__module__.removeprefix("torchvision.").split(".")
    loaders: dict[str, Callable[[str, int | None], Workload]] = {
        "segmentation": _segmentation,
        "detection": _detection,
        "video": _video,
        "optical_flow": _optical_flow,
    }
    loader = loaders.get(folder[0], _classification) if folder else _classification
    return loader(name, image_size)


def _classification(name: str, image_size: int | None) -> Workload:
    size = image_size or _published_size(name)
    arguments = _constructor_arguments(name, size)
    model = _build(name, arguments)
    classes = _classes(model)
    batch = (torch.randn(SAMPLES, 3, size, size), torch.randint(classes, (SAMPLES,)))
    return Workload(model, batch, f"3 × {size} × {size} images, {classes} classes")


def _segmentation(name: str, image_size: int | None) -> Workload:
    size = image_size or SEGMENTATION_SIZE
    classes = 21
    batch = (torch.randn(SAMPLES, 3, size, size), torch.randint(classes, (SAMPLES, size, size)))
    return Workload(_build(name, {}), batch, f"3 × {size} × {size} images, a class of {classes} per pixel")


def _detection(name: str, image_size: int | None) -> Workload:
    model = _build(name, {})
    size = _detection_size(name, model, image_size)
    images = [torch.rand(3, size, size) for _ in range(SAMPLES)]
    targets = [_objects(name, size) for _ in range(SAMPLES)]
    return Workload(model, (images, targets), f"3 × {size} × {size} images, {OBJECTS} objects in each")


def _objects(name: str, size: int) -> dict[str, Tensor]:
    """One image's targets, in the form that torchvision's detectors take."""
    corner = torch.rand(OBJECTS, 2) * size / 2
    objects = {
        "boxes": torch.cat([corner, corner + size / 4], dim=-1),
        "labels": torch.randint(1, CATEGORIES, (OBJECTS,)),
    }
    if name.startswith("maskrcnn"):
        objects["masks"] = torch.randint(2, (OBJECTS, size, size), dtype=torch.uint8)
    if name.startswith("keypointrcnn"):
        objects["labels"] = torch.ones(OBJECTS, dtype=torch.int64)  # people are the only category
        points = corner[:, None] + torch.rand(OBJECTS, KEYPOINTS, 2) * size / 4
        objects["keypoints"] = torch.cat([points, torch.ones(OBJECTS, KEYPOINTS, 1)], dim=-1)
    return objects


def _video(name: str, image_size: int | None) -> Workload:
    published = _published_size(name)
    size = image_size or published
    if name.startswith("mvit") and size != published:
        raise ConfigError(f"{name} is built for {published} px, got --image-size {size}. Leave it out.")
    model = _build(name, {})
    classes = _classes(model)
    batch = (torch.randn(SAMPLES, 3, FRAMES, size, size), torch.randint(classes, (SAMPLES,)))
    return Workload(model, batch, f"clips of {FRAMES} frames, 3 × {size} × {size}, {classes} classes")


def _optical_flow(name: str, image_size: int | None) -> Workload:
    height, width = (image_size, image_size) if image_size else FLOW_SIZE
    if height < 128 or height % 8:
        raise ConfigError(f"{name} takes images of at least 128 px in multiples of 8, got --image-size {height}.")
    pair = [torch.rand(SAMPLES, 3, height, width) * 2 - 1 for _ in range(2)]
    batch = (*pair, torch.randn(SAMPLES, 2, height, width))
    return Workload(_build(name, {}), batch, f"pairs of 3 × {height} × {width} images", {"loss_fn": flow_loss})


def flow_loss(estimates: list[Tensor], target: Tensor) -> Tensor:
    """L1 distance of every estimate to the flow, later ones weighing more (Teed & Deng 2020, equation 7)."""
    last = len(estimates) - 1
    weighted = [FLOW_DECAY ** (last - index) * (flow - target).abs().mean() for index, flow in enumerate(estimates)]
    return torch.stack(weighted).sum()


def _build(name: str, arguments: dict[str, Any]) -> nn.Module:
    if "weights_backbone" in inspect.signature(get_model_builder(name)).parameters:
        arguments = {**arguments, "weights_backbone": None}
    try:
        model: nn.Module = get_model(name, weights=None, **arguments)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"torchvision cannot build {name} with {arguments}: {error}") from error
    return model.train()


def _published_size(name: str) -> int:
    """Pixels of the smallest crop that weights were published for: what it was trained at, not what it was tuned to."""
    crops = [weights.transforms.keywords["crop_size"] for weights in get_model_weights(name)]
    return min(crop if isinstance(crop, int) else crop[0] for crop in crops)


def _constructor_arguments(name: str, size: int) -> dict[str, Any]:
    """Constructor arguments that the name alone does not give: the size, where layers depend on it."""
    if name.startswith("vit_"):
        return {"image_size": size}
    if name.startswith("maxvit"):
        return {"input_size": (size, size)}
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}  # torch's own initialisation: theirs takes a minute
    return {}


def _classes(model: nn.Module) -> int:
    """Outputs of the last layer that has any: every classifier of torchvision ends in a Linear or a convolution."""
    ends = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d))]
    last = ends[-1]
    return last.out_features if isinstance(last, nn.Linear) else last.out_channels


def _detection_size(name: str, model: nn.Module, image_size: int | None) -> int:
    """Pixels that the detector resizes every image to, set to `image_size` if given; SSD is built for one size."""
    transform: Any = model.transform
    fixed = transform.fixed_size
    if fixed is None and image_size is not None:
        transform.min_size, transform.max_size = (image_size,), max(image_size, transform.max_size)
    elif fixed is not None and image_size not in (None, fixed[0]):
        raise ConfigError(f"{name} is built for images of {fixed[0]} px, got --image-size {image_size}. Leave it out.")
    return int(fixed[0] if fixed is not None else max(transform.min_size))
