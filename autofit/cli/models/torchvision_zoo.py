"""torchvision models with random weights, each with a batch of the kind and size that it was made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

from autofit.cli.models.workload import Workload, refuse_option
from autofit.errors import ConfigError

SAMPLES = 4
FRAMES = 16  # the clip length of torchvision's video recipes
OBJECTS = 4
KEYPOINTS = 17
SEGMENTATION_SIZE = 520  # torchvision's published segmentation weights all resize to it
FLOW_SIZE = (368, 496)  # RAFT's first training stage, FlyingChairs
FLOW_DECAY = 0.8  # the weight of each earlier estimate, Teed & Deng 2020, equation 7
AUXILIARY_WEIGHT = {"googlenet": 0.3, "inception_v3": 0.4}  # as in their papers


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
    arguments = _size_arguments(name, size)
    loss: dict[str, Any] = {}
    if name in AUXILIARY_WEIGHT:
        arguments["init_weights"] = False  # torch's own initialisation: theirs takes minutes
        loss["loss_fn"] = partial(auxiliary_loss, weight=AUXILIARY_WEIGHT[name])
    model = _build(name, arguments)
    classes = _classes(model)
    batch = (torch.randn(SAMPLES, 3, size, size), torch.randint(classes, (SAMPLES,)))
    return Workload(model, batch, f"3 × {size} × {size} images, {classes} classes", loss)


def _segmentation(name: str, image_size: int | None) -> Workload:
    size = image_size or SEGMENTATION_SIZE
    model = _build(name, {})
    classes = 21
    batch = (torch.randn(SAMPLES, 3, size, size), torch.randint(classes, (SAMPLES, size, size)))
    return Workload(
        model, batch, f"3 × {size} × {size} images, a class of {classes} per pixel", {"loss_fn": segmentation_loss}
    )


def _detection(name: str, image_size: int | None) -> Workload:
    model = _build(name, {})
    size = _detection_size(name, model, image_size)
    corner = torch.rand(SAMPLES, OBJECTS, 2) * size / 2
    targets = {
        "boxes": torch.cat([corner, corner + size / 4], dim=-1),
        "labels": torch.randint(1, 91, (SAMPLES, OBJECTS)),
    }
    if name.startswith("maskrcnn"):
        targets["masks"] = torch.randint(2, (SAMPLES, OBJECTS, size, size), dtype=torch.uint8)
    if name.startswith("keypointrcnn"):
        targets["labels"] = torch.ones(SAMPLES, OBJECTS, dtype=torch.int64)
        points = corner[:, :, None] + torch.rand(SAMPLES, OBJECTS, KEYPOINTS, 2) * size / 4
        targets["keypoints"] = torch.cat([points, torch.ones(SAMPLES, OBJECTS, KEYPOINTS, 1)], dim=-1)
    batch = (torch.rand(SAMPLES, 3, size, size), targets)
    return Workload(
        model, batch, f"3 × {size} × {size} images, {OBJECTS} objects in each", {"compute_loss": detection_loss}
    )


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


def auxiliary_loss(output: Any, target: Tensor, *, weight: float) -> Tensor:
    """Cross-entropy of the main head plus `weight` times that of each auxiliary head (none in evaluation mode)."""
    heads = [output] if isinstance(output, Tensor) else [head for head in output if head is not None]
    main, *auxiliary = (F.cross_entropy(head, target) for head in heads)
    return main + weight * sum(auxiliary, start=main.new_zeros(()))


def segmentation_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross-entropy per pixel, plus half that of the auxiliary head where there is one (torchvision's recipe)."""
    loss = F.cross_entropy(output["out"], target)
    return loss + 0.5 * F.cross_entropy(output["aux"], target) if "aux" in output else loss


def detection_loss(model: nn.Module, batch: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
    """The sum of the losses that a torchvision detector returns; it wants a list of images and one dict for each."""
    images, targets = batch
    per_image = [{key: value[index] for key, value in targets.items()} for index in range(len(images))]
    losses: dict[str, Tensor] = model(list(images), per_image)
    return torch.stack(list(losses.values())).sum()


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


def _size_arguments(name: str, size: int) -> dict[str, Any]:
    """Constructor arguments of the models whose layers depend on the image's size."""
    if name.startswith("vit_"):
        return {"image_size": size}
    if name.startswith("maxvit"):
        return {"input_size": (size, size)}
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
