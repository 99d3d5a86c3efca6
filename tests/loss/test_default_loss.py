"""The loss when nobody passed one."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import GoogLeNet, Inception3
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.googlenet import GoogLeNetOutputs
from torchvision.models.inception import InceptionOutputs
from torchvision.models.segmentation.fcn import FCN

from autofit.batch import infer_layout
from autofit.errors import ConfigError
from autofit.loss import resolve_loss


class Fixed(nn.Module):
    """A model that returns a fixed output, scaled by its only parameter, 1."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self._scaled(self.output)

    def _scaled(self, output: Any) -> Any:
        if isinstance(output, dict):
            return {key: self._scaled(value) for key, value in output.items()}
        if isinstance(output, tuple):
            scaled = map(self._scaled, output)
            return tuple(scaled) if type(output) is tuple else type(output)(*scaled)
        return output * self.weight if isinstance(output, Tensor) else output


def default(output: Any, target: Any) -> Tensor:
    return resolve_loss()(Fixed(output), (torch.rand(2), target))


torch.manual_seed(0)
classes = torch.tensor([0, 2, 1, -100])
logits, other, third = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
tokens, token_logits = torch.tensor([[0, 1, 2, 3, -100]] * 2), torch.randn(2, 5, 7)
masks, pixels = torch.randint(0, 3, (2, 4, 5)), torch.randn(2, 3, 4, 5)
ce = F.cross_entropy

DEFAULTS = {
    "classes": (logits, classes, lambda: ce(logits, classes)),
    "small integers": (logits[:3], classes[:3].to(torch.int32), lambda: ce(logits[:3], classes[:3])),
    "pixels": (pixels, masks, lambda: ce(pixels, masks)),
    "tokens": (token_logits, tokens, lambda: ce(token_logits.flatten(0, 1), tokens.flatten())),
    "tokens, channels first": (token_logits.mT, tokens, lambda: ce(token_logits.mT, tokens)),
    "floats": (logits, other, lambda: F.mse_loss(logits, other)),
    "auxiliary pixels": (
        {"out": pixels, "aux": pixels * 2},
        masks,
        lambda: ce(pixels, masks) + 0.5 * ce(pixels * 2, masks),
    ),
    "pixels alone": ({"out": pixels}, masks, lambda: ce(pixels, masks)),
    "GoogLeNet": (
        GoogLeNetOutputs(logits, other, third),
        classes,
        lambda: ce(logits, classes) + 0.3 * (ce(other, classes) + ce(third, classes)),
    ),
    "Inception": (InceptionOutputs(logits, other), classes, lambda: ce(logits, classes) + 0.4 * ce(other, classes)),
    "no auxiliary": (InceptionOutputs(logits, None), classes, lambda: ce(logits, classes)),
}


@pytest.mark.parametrize(("output", "target", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_default_by_output_and_target(output: Any, target: Tensor, expected: Any) -> None:
    """Cross-entropy for integer targets, squared error for floats, auxiliary outputs at their references' weights."""
    loss = default(output, target)
    torch.testing.assert_close(loss, expected())
    assert loss.requires_grad


Unknown = namedtuple("Unknown", ["scores"])

REFUSED = {
    "broadcasting": (torch.rand(4, 1), torch.rand(4), ["shape (4, 1)", "exactly the output's shape"]),
    "booleans": (torch.rand(4), torch.rand(4) > 0.5, ["dtype bool"]),
    "one logit for two classes": (torch.rand(4, 1), torch.ones(4, dtype=torch.long), ["BCEWithLogitsLoss"]),
    "one logit per sample": (torch.rand(4), torch.ones(4, dtype=torch.long), ["(N, C) with (N,)"]),
    "column of classes": (logits, classes[:, None], ["target of shape (4, 1)"]),
    "as many classes as tokens": (torch.rand(2, 5, 5), tokens, ["dim 1 or the last one"]),
    "tuple": ((logits, other), classes, ["a tuple of 2", "compute_loss"]),
    "namedtuple": (Unknown(logits), classes, ["a Unknown of 1"]),
    "dict": ({"scores": logits}, classes, ["a dict with keys scores"]),
}


@pytest.mark.parametrize(("output", "target", "said"), REFUSED.values(), ids=REFUSED)
def test_no_default_where_it_would_be_a_guess(output: Any, target: Tensor, said: list[str]) -> None:
    """The error says what was seen and what to pass."""
    with pytest.raises(ConfigError) as caught:
        default(output, target)
    for words in said:
        assert words in str(caught.value)


class Features(nn.Conv2d):
    """A backbone as torchvision's segmentation models want it."""

    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x)}


def test_torchvision_segmentation_leaves_out_its_void_class() -> None:
    """Pixels of 255 do not count, as in torchvision's own training."""
    model = FCN(Features(3, 8, 3), nn.Conv2d(8, 4, 1))
    x, target = torch.rand(1, 3, 16, 16), torch.randint(0, 4, (1, 16, 16))
    target[:, :7] = 255
    expected = F.cross_entropy(model(x)["out"], target, ignore_index=255)
    torch.testing.assert_close(resolve_loss()(nn.DataParallel(model), (x, target)), expected)


@pytest.mark.parametrize(("kind", "heads"), [(GoogLeNet, 2), (Inception3, 1)])
def test_torchvision_classifiers_train_their_auxiliary_heads(kind: Any, heads: int) -> None:
    """What they return in training is understood, so that the auxiliary heads get gradients."""
    with torch.device("meta"):
        model = kind(num_classes=3, init_weights=False)
        resolve_loss()(model, (torch.rand(2, 3, 299, 299), torch.ones(2, dtype=torch.long))).backward()
    auxiliary = [p for name, p in model.named_parameters() if "aux" in name.lower()]
    assert len(auxiliary) >= 4 * heads
    assert all(p.grad is not None for p in auxiliary)


def test_torchvision_detection_trains_from_a_list_of_samples() -> None:
    """Images and targets in lists: the model gets both, and its losses are summed; parts have fewer images."""
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8))
    backbone.out_channels = 4
    anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    model = FasterRCNN(
        backbone, num_classes=2, rpn_anchor_generator=anchors, min_size=32, max_size=32, box_detections_per_img=2
    )
    corner = torch.tensor([[2.0, 2.0, 20.0, 20.0]])
    images = [torch.rand(3, 32, 24), torch.rand(3, 24, 32)]
    targets = [{"boxes": corner.repeat(n, 1), "labels": torch.ones(n, dtype=torch.long)} for n in (1, 2)]
    batch = (images, targets)
    layout = infer_layout(batch)
    for part in layout.split(batch, [1, 1]):
        resolve_loss()(model, part).backward()
    assert all(p.grad is not None for p in model.parameters())
