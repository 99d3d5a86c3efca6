"""torchvision models by name: the right batch for each task, and a loss that trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.batch import infer_layout
from autofit.cli.models import Workload, load_workload, torchvision_zoo
from autofit.cli.models.torchvision_zoo import flow_loss
from autofit.errors import ConfigError
from autofit.loss import resolve_loss


def loss_of(workload: Workload) -> torch.Tensor:
    """One forward pass as tune() runs it."""
    return resolve_loss(**workload.arguments)(workload.model, workload.sample_batch)


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("squeezenet1_1", 32),
        ("lraspp_mobilenet_v3_large", 32),
        pytest.param("googlenet", 64, marks=pytest.mark.slow),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", 64),
        pytest.param("inception_v3", None, marks=pytest.mark.slow),
        pytest.param("maxvit_t", 224, marks=pytest.mark.slow),
        pytest.param("deeplabv3_mobilenet_v3_large", 64, marks=pytest.mark.slow),
        pytest.param("r3d_18", 32, marks=pytest.mark.slow),
        pytest.param("ssdlite320_mobilenet_v3_large", None, marks=pytest.mark.slow),
        pytest.param("maskrcnn_resnet50_fpn", 64, marks=pytest.mark.slow),
        pytest.param("keypointrcnn_resnet50_fpn", 64, marks=pytest.mark.slow),
        pytest.param("retinanet_resnet50_fpn", 64, marks=pytest.mark.slow),
        pytest.param("raft_small", 128, marks=pytest.mark.slow),
    ],
)
def test_every_task_has_a_batch_and_a_loss_that_trains(name: str, image_size: int | None) -> None:
    """The model is in training mode, the samples are found, and gradients are finite."""
    torch.manual_seed(0)
    workload = load_workload(name, image_size=image_size)
    assert workload.model.training
    assert infer_layout(workload.sample_batch).samples == 4
    loss = loss_of(workload)
    assert loss.shape == ()
    loss.backward()
    gradients = [p.grad for p in workload.model.parameters() if p.grad is not None]
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", "3 × 224 × 224 images, 1000 classes"),
        ("inception_v3", "3 × 299 × 299 images, 1000 classes"),
        ("efficientnet_b1", "3 × 240 × 240 images, 1000 classes"),
        ("swin_v2_t", "3 × 256 × 256 images, 1000 classes"),
        ("s3d", "clips of 16 frames, 3 × 224 × 224, 400 classes"),
        ("lraspp_mobilenet_v3_large", "3 × 520 × 520 images, a class of 21 per pixel"),
        ("raft_small", "pairs of 3 × 368 × 496 images"),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "3 × 320 × 320 images, 4 objects in each"),
    ],
)
def test_the_size_is_the_one_the_model_was_made_for(name: str, expected: str) -> None:
    """Without --image-size the batch has the published training size."""
    assert load_workload(name).description == expected


def test_of_several_published_sizes_the_one_trained_at_counts() -> None:
    """vit_b_16 was trained at 224 px; weights that were tuned on 384 px do not change that."""
    assert torchvision_zoo._published_size("vit_b_16") == 224


def test_a_detector_resizes_to_the_image_size() -> None:
    """Else it would enlarge the images again, and --image-size would have no effect on memory."""
    model: Any = load_workload("fasterrcnn_mobilenet_v3_large_320_fpn", image_size=64).model
    assert model.transform.min_size == (64,)


def test_a_vision_transformer_is_built_for_the_image_size() -> None:
    """Its position embedding follows --image-size."""
    model: Any = load_workload("vit_b_32", image_size=64).model
    assert model.image_size == 64


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet81", {}, "Did you mean 'resnet18'"),
        ("Resnet18", {}, "Did you mean 'resnet18'"),
        ("quantized_resnet18", {}, "Did you mean"),
        ("nothing_like_it_at_all", {}, "timm:NAME"),
        ("model.py", {}, "write model.py:FACTORY"),
        (":resnet18", {}, "is not a model"),
        ("timm:", {}, "is not a model"),
        ("resnet18", {"sequence_length": 8}, "--sequence-length 8 does not apply"),
        ("vit_b_32", {"image_size": 65}, "cannot build vit_b_32"),
        ("raft_small", {"image_size": 100}, "multiples of 8"),
        ("ssdlite320_mobilenet_v3_large", {"image_size": 64}, "320 px"),
        ("mvit_v2_s", {"image_size": 64}, "224 px"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, options: dict[str, int], said: str) -> None:
    """Unknown names come with near misses, options without a use are not ignored."""
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        load_workload(name, **options)


def test_flow_loss_weighs_later_estimates_more() -> None:
    """0.8 to the power of how many came after."""
    target = torch.zeros(1, 2, 4, 4)
    estimates = [target + 1, target + 2, target + 4]
    torch.testing.assert_close(flow_loss(estimates, target), torch.tensor(0.64 + 1.6 + 4))


def test_the_global_generator_decides_the_batch() -> None:
    """The same seed, the same weights and batch."""

    def load() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(7)
        workload = load_workload("squeezenet1_1", image_size=32)
        return workload.model, workload.sample_batch[0]

    (model, images), (model2, images2) = load(), load()
    assert torch.equal(images, images2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters(), strict=True))
