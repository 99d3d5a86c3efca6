"""The walk against torch's engine: the same births and deaths in the same order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autofit.predict.target import FakeMode
from autofit.predict.walk import PythonEngine, SavedTensors
from tests.models import ConvNet, image_batch
from tests.predict.stepping import record, sized_events

transformers = pytest.importorskip("transformers")
models = pytest.importorskip("torchvision.models")

TOKENS = torch.ones(2, 16, dtype=torch.int64)
UNMASKED = {"input_ids": TOKENS, "labels": TOKENS}
WORDS = {**UNMASKED, "attention_mask": torch.ones_like(TOKENS)}
IMAGES = image_batch(2, size=32)
SIZES: dict[str, Any] = {"vocab_size": 100}
BERT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    **SIZES,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0, **SIZES
    )
    config._attn_implementation = "eager"  # the other kinds look at values of the mask
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=1, **BERT)
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_kv=16, num_heads=2, d_ff=64, decoder_start_token_id=0, **SIZES
    )
    return transformers.T5ForConditionalGeneration(config)


def swin() -> nn.Module:
    return models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=10)


def vision_transformer() -> nn.Module:
    return models.VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=10)


def recomputed(make: Callable[[], nn.Module], *kinds: str) -> nn.Module:
    model = make()
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


class Straight(torch.autograd.Function):
    """Two outputs of which one may stay unused; arguments that are no tensors come first."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: torch.Tensor, name: str, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * factor, y * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return None, gradients[0] * ctx.factor + x * 0, None, gradients[1] * ctx.factor + y * 0


class Odd(nn.Module):
    """What a walk can trip over: a Function, a tied and a frozen weight, changes in place, a kept activation.

    Not among them: views changed in place, for which torch records other nodes with fake tensors than with real ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 10)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.mean(1))
        used, _ = Straight.apply(2.0, x, "name", x * 3)
        x = self.frozen(used) + x.expand_as(x)
        x = self.tied(x).relu()
        y = x.clone().mul_(2.0).add_(x)
        self.kept = y
        with torch.no_grad():
            x.sum()
        return self.head(y.sum(1) + x.transpose(1, 2).amax(1))


CASES: list[tuple[Callable[[], nn.Module], Any]] = [
    (ConvNet, IMAGES),
    (partial(models.resnet18, num_classes=10), IMAGES),
    (partial(models.mobilenet_v3_small, num_classes=10), IMAGES),
    (vision_transformer, IMAGES),
    (swin, IMAGES),
    (Odd, IMAGES),
    (gpt2, WORDS),
    (bert, UNMASKED),
    (llama, WORDS),
    (t5, UNMASKED),
    (partial(recomputed, ConvNet, "Sequential"), IMAGES),
    (partial(recomputed, partial(models.resnet18, num_classes=10), "BasicBlock"), IMAGES),
    (partial(recomputed, vision_transformer, "EncoderBlock"), IMAGES),
    (partial(recomputed, gpt2, "GPT2Block"), WORDS),
    (partial(recomputed, bert, "BertLayer"), UNMASKED),
]


def _name(case: tuple[Callable[[], nn.Module], Any]) -> str:
    make = case[0]
    inner = make.args[0] if isinstance(make, partial) and make.func is recomputed else make
    plain = inner.func if isinstance(inner, partial) else inner
    return f"{plain.__name__}{'' if inner is make else '-recomputed'}"


@pytest.mark.parametrize("case", CASES, ids=_name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_walk_releases_what_the_engine_releases_when_it_does(case: tuple[Callable[[], nn.Module], Any]) -> None:
    """On fake tensors the walk gives the events, byte for byte, of the real engine on real tensors."""
    make, batch = case
    walked, real = (sized_events(record(make, batch, fake=fake)) for fake in (True, False))
    assert walked == real


@pytest.fixture
def walking() -> Any:
    """Fake tensors with the walk in the engine's place; gives the names of what it ran."""
    ran: list[int] = []
    with FakeMode(), PythonEngine(SavedTensors(lambda _: None), on_node=ran.append, in_place=True).active():
        yield ran


def test_gradients_have_the_parameters_shapes(walking: list[int]) -> None:
    """Broadcast operands get their own shape back, and an unused one gets none."""
    x, bias, unused = (torch.zeros(shape, requires_grad=True) for shape in ((4, 3), (3,), (2,)))
    (x + bias).exp().sum().backward()
    assert (x.grad is not None and x.grad.shape, bias.grad is not None and bias.grad.shape) == ((4, 3), (3,))
    assert unused.grad is None
    assert len(walking) == 5


@pytest.mark.parametrize(("in_place", "operator"), [(True, "aten::add_.Tensor"), (False, "aten::add.Tensor")])
def test_gradients_that_meet_are_added_in_place_unless_a_mode_is_active(in_place: bool, operator: str) -> None:
    """Without a dispatch mode the engine adds to the gradient that nobody else holds, and so takes no third tensor."""
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with FakeMode(), PythonEngine(SavedTensors(lambda _: None), on_node=lambda _: None, in_place=in_place).active():
        x = torch.zeros(8, requires_grad=True)
        middle = x.exp()
        loss = torch.dot(middle.sin(), middle.cos())
        with Names():
            loss.backward()
    assert [name for name in seen if name.startswith("aten::add")] == [operator]


def test_the_loss_may_be_kept(walking: list[int]) -> None:
    """Who keeps the loss and the outputs keeps none of what backward saved."""
    import weakref

    weight = torch.zeros(8, 8, requires_grad=True)
    hidden = (torch.zeros(4, 8) @ weight).exp()
    saved = weakref.ref(hidden.untyped_storage())
    out = hidden.sin()
    loss = out.sum()
    del hidden
    assert saved() is not None
    loss.backward()
    assert saved() is None
    assert loss.shape == ()
    assert out.shape == (4, 8)


def test_a_kept_graph_runs_twice(walking: list[int]) -> None:
    """`retain_graph` keeps what was saved; without it a second backward is refused."""
    x = torch.zeros(3, requires_grad=True)
    loss = x.exp().sum()
    edge = torch.autograd.graph.get_gradient_edge(loss)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward([edge], [torch.ones(())])


def test_grad_returns_gradients_and_sets_none(walking: list[int]) -> None:
    """`torch.autograd.grad` gives those of the inputs, None for one that was not reached, and touches no `.grad`."""
    x, y, z = (torch.zeros(3, requires_grad=True) for _ in range(3))
    middle = x * y
    found = torch.autograd.grad(middle.exp().sum(), [middle, y, z], allow_unused=True)
    assert [None if g is None else tuple(g.shape) for g in found] == [(3,), (3,), None]
    assert x.grad is None
    assert y.grad is None


def test_a_gradient_penalty_can_be_walked(walking: list[int]) -> None:
    """`create_graph` records the walk itself, so that it can be walked back through."""
    x = torch.zeros(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.exp().sum(), [x], create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None


def test_reentrant_checkpoints_walk_inside_the_walk(walking: list[int]) -> None:
    """A Function whose backward calls backward."""
    layer = nn.Linear(4, 4)
    x = torch.zeros(2, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert layer.weight.grad is not None


def test_hooks_of_parameters_run(walking: list[int]) -> None:
    """An optimizer in the backward pass frees each gradient as soon as it is there."""
    heard: list[str] = []
    x = torch.zeros(3, requires_grad=True)
    x.register_hook(lambda gradient: heard.append("before"))
    x.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    x.exp().sum().backward()
    assert heard == ["before"]
    assert x.grad is None


def test_vmap_runs_under_the_walk(walking: list[int]) -> None:
    """`torch.func` refuses hooks on saved tensors; the walk's own stand aside."""
    x = torch.zeros(3, 4, requires_grad=True)
    torch.vmap(lambda row: row.exp())(x).sum().backward()
    assert x.grad is not None


def test_the_engine_is_put_back() -> None:
    """After the walk, also after an error inside it, torch's own engine runs."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    with (
        pytest.raises(ZeroDivisionError),
        PythonEngine(SavedTensors(lambda _: None), on_node=lambda _: None, in_place=True).active(),
    ):
        raise ZeroDivisionError
    assert torch.autograd.Variable._execution_engine is engine  # type: ignore[attr-defined]
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
