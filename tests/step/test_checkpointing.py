"""Recomputing changes no number, keeps fewer bytes, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.candidate import Checkpointing
from autofit.errors import ConfigError
from autofit.step.blocks import discover_blocks, keep_checkpointable, observe_calls
from autofit.step.checkpointing import CheckpointPlan, checkpointed

FULL = Checkpointing(mode="full")
SELECTIVE = Checkpointing(mode="selective")
NONE = Checkpointing()


def full(*blocks: str) -> Checkpointing:
    return Checkpointing(mode="full", blocks=blocks)


class Residual(nn.Module):
    """A block with dropout and, if asked for, running statistics."""

    def __init__(self, width: int = 8, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), norm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.norm(self.up(x)))))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class UNet(nn.Module):
    """Levels whose outputs are used again much later."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._level(width, width) for _ in range(2))
        self.up = nn.ModuleList(self._level(2 * width, width) for _ in range(2))

    @staticmethod
    def _level(width: int, out: int) -> nn.Sequential:
        layers = nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for level in self.up:
            skip = skips.pop()
            x = level(torch.cat([F.interpolate(x, skip.shape[2:]), skip], dim=1))
        return x


@dataclass
class State:
    """What a block passes on."""

    hidden: torch.Tensor
    scale: torch.Tensor | None = None


class Elaborate(nn.Module):
    """Takes keywords and containers, fills a list, and returns a tuple with a None and a dataclass in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(
        self, state: State, *, shift: torch.Tensor, history: list[torch.Tensor], options: dict[str, Any]
    ) -> tuple[State, None, torch.Tensor]:
        hidden = self.block(state.hidden) + shift * sum(history) * options["factor"]
        history.append(hidden)
        return State(hidden, state.scale), None, hidden.mean()


class Elaborating(nn.Module):
    """Passes one list to all blocks, which it goes on filling, as DenseNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Elaborate() for _ in range(3))
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, history, total = State(x), [x], torch.zeros(())
        for layer in self.layers:
            state, nothing, mean = layer(
                state, shift=self.shift, history=history, options={"factor": self.shift.mean()}
            )
            assert nothing is None
            history.append(mean)
            total = total + mean
        assert len(history) == 7
        return state.hidden * total


class Ema(nn.Module):
    """Reads and writes buffers in every forward: one in place, one by assignment, one that starts as None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(1, 8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0, keepdim=True), 0.5)
            self.steps = self.steps + 1
        y = self.second(torch.tanh(self.linear(x - self.mean) * self.steps))
        if self.last is not None:
            y = y * self.last
        self.last = x.detach().mean(0)
        return y


def spectral(block: nn.Module, norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    norm(block.up), norm(block.down)
    return block


def headless(model: nn.Module) -> nn.Module:
    """Without a head that starts at zero, through which no gradient would come."""
    model.heads = nn.Identity()
    return model


def transformers_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers' models")
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=19, n_positions=8, n_embd=8, n_layer=2, n_head=2)
        config.bos_token_id = config.eos_token_id = 0
        return transformers.GPT2LMHeadModel(config).train()
    if kind == "bert":
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=19, **sizes)).train()
    config = transformers.T5Config(vocab_size=19, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).train()


def tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 19, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids}


def vectors() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def images(size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def linear_stack() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1))))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "blocks with BatchNorm and dropout": (lambda: Stack(Residual(), Residual(), Residual()), vectors),
    "ResNet-18": (lambda: torchvision.models.resnet18(num_classes=3), lambda: images(32)),
    "DenseNet": (lambda: torchvision.models.DenseNet(4, (2, 2), 8, num_classes=3), lambda: images(32)),
    "VGG with BatchNorm": (lambda: torchvision.models.vgg.make_layers([4, 4, "M", 8, 8, "M"], batch_norm=True), images),
    "Swin": (
        lambda: torchvision.models.SwinTransformer([2, 2], 8, [2, 2], [2, 2], [2, 2], stochastic_depth_prob=0.5),
        images,
    ),
    "ViT": (lambda: headless(torchvision.models.VisionTransformer(16, 8, 2, 2, 8, 16, dropout=0.1)), images),
    "GPT-2": (lambda: transformers_model("gpt2"), tokens),
    "BERT": (lambda: transformers_model("bert"), tokens),
    "T5": (lambda: transformers_model("t5"), tokens),
    "U-Net": (UNet, images),
    "twenty Linear, flat": (linear_stack, vectors),
    "Transformer layers": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: vectors()[None],
    ),
    "spectral norm": (
        lambda: Stack(*(spectral(Residual(), nn.utils.parametrizations.spectral_norm) for _ in range(2))),
        vectors,
    ),
    "spectral norm by hooks": (
        lambda: Stack(*(spectral(Residual(), nn.utils.spectral_norm) for _ in range(2))),
        vectors,
    ),
    "InstanceNorm with running statistics": (
        lambda: Stack(*(Residual(norm=lambda n: nn.InstanceNorm1d(n, track_running_stats=True)) for _ in range(2))),
        lambda: torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)),
    ),
    "BatchNorm with cumulative average": (
        lambda: Stack(*(Residual(norm=lambda n: nn.BatchNorm1d(n, momentum=None)) for _ in range(2))),
        vectors,
    ),
    "buffers that are read and written": (lambda: Stack(Ema(), Ema()), vectors),
    "one BatchNorm used throughout": (
        lambda: (lambda norm: nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(8, 8), norm))))(
            nn.BatchNorm1d(8)
        ),
        vectors,
    ),
    "keywords, containers, dataclasses": (Elaborating, vectors),
    "recurrent layers": (lambda: Recurrent(nn.GRU(8, 8), nn.GRU(8, 8)), vectors),
}


class Recurrent(nn.Module):
    """Recurrent layers, which return tuples."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)[0])[0]


class Step(NamedTuple):
    """All numbers that a few steps leave."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    next_random: torch.Tensor


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch).loss if isinstance(batch, dict) else model(batch)
    return output.float().square().mean()


def steps(
    model: nn.Module, batch: Any, checkpointing: Checkpointing, *, count: int = 2, autocast: bool = False
) -> Step:
    """A few forwards and backwards from the same seed; gradients add up."""
    torch.manual_seed(0)
    plan = CheckpointPlan(model, checkpointing)
    losses = []
    for _ in range(count):
        with plan.active(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, batch)
            loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Step(losses, gradients, dict(model.named_buffers()), torch.rand(1))


def without_cache(model: nn.Module) -> nn.Module:
    """transformers computes attention otherwise when it also fills a cache; not the question here."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model


def assert_equal(actual: Step, expected: Step) -> None:
    for one, other in ((actual.gradients, expected.gradients), (actual.buffers, expected.buffers)):
        assert one.keys() == other.keys()
        assert not [name for name in one if not same(one[name], other[name])]
    assert all(map(same, actual.losses, expected.losses))
    assert same(actual.next_random, expected.next_random)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def assert_undone(model: nn.Module) -> None:
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in MODELS for mode in (FULL, SELECTIVE) if (name, mode) != ("recurrent layers", SELECTIVE)],
    ids=str,
)
def test_every_number_is_bit_equal(name, mode):
    """Losses, gradients, buffers and the random numbers that follow are those of training without recomputing."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model = without_cache(build())
    plain, recomputing = copy.deepcopy(model), model
    expected = steps(plain, batch(), NONE)
    actual = steps(recomputing, batch(), mode)
    assert_equal(actual, expected)
    assert any(gradient is not None and gradient.any() for gradient in actual.gradients.values())
    assert_undone(recomputing)


@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=str)
@pytest.mark.parametrize("name", ["blocks with BatchNorm and dropout", "GPT-2", "twenty Linear, flat"])
def test_every_number_is_bit_equal_under_autocast(name, mode):
    """The recomputation runs in the precision of the forward."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model = without_cache(build())
    twin = copy.deepcopy(model)
    assert_equal(steps(model, batch(), mode, autocast=True), steps(twin, batch(), NONE, autocast=True))


def test_recurrent_layers_are_not_recomputed_selectively():
    """They write over their products without a trace; of other blocks beside them selection goes on."""
    model = Recurrent(nn.GRU(8, 8), nn.LSTM(8, 8))
    with pytest.raises(ConfigError, match="recurrent layers"):
        CheckpointPlan(model, Checkpointing(mode="selective", blocks=("one",)))
    with pytest.raises(ConfigError, match="needs blocks"):
        CheckpointPlan(model, SELECTIVE)
    CheckpointPlan(model, FULL)


def test_blocks_really_run_twice():
    """With a hook inside a block it shows that the block runs again in backward, and not after it is undone."""
    model, runs = Stack(Residual(), Residual()), []
    model.layers[0].up.register_forward_hook(lambda *_: runs.append(1))
    with checkpointed(model, FULL):
        loss = loss_of(model, vectors())
        assert len(runs) == 1
        loss.backward()
    assert len(runs) == 2
    loss_of(model, vectors()).backward()
    assert len(runs) == 3


def test_batches_are_counted_once():
    """BatchNorm counts each batch once, although it runs twice."""
    model = Stack(Residual(), Residual())
    steps(model, vectors(), FULL, count=3)
    assert [int(layer.norm.num_batches_tracked) for layer in model.layers] == [3, 3]


@pytest.mark.parametrize(
    "block", [Residual, Ema, lambda: spectral(Residual(), nn.utils.parametrizations.spectral_norm)]
)
def test_a_retained_graph_is_recomputed_alike(block):
    """A second backward through the same graph gives the same gradients and writes no buffer."""
    model = Stack(block(), block())
    with checkpointed(model, FULL):
        loss = loss_of(model, vectors())
        buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))
    assert all(model.get_buffer(n) is buffer and torch.equal(buffer, old) for n, (buffer, old) in buffers.items())


def test_two_forwards_before_one_backward():
    """Each call is recomputed with the buffers that it saw, though another call has changed them since."""
    torch.manual_seed(0)
    model = Stack(Ema(), Ema())
    gradients = []
    for checkpointing in (NONE, FULL):
        twin = copy.deepcopy(model)
        with checkpointed(twin, checkpointing):
            (loss_of(twin, vectors()) + loss_of(twin, vectors() + 1)).backward()
        gradients.append([p.grad for p in twin.parameters()])
    assert all(map(torch.equal, *gradients))


def test_frozen_blocks_and_inputs_without_gradients():
    """Blocks whose input or weights need no gradient give the others the gradients that they should have."""
    torch.manual_seed(0)
    model = Stack(Residual(), Residual(), Residual())
    model.layers[0].requires_grad_(False)
    model.layers[1].up.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    actual = steps(model, vectors(), FULL)
    assert_equal(actual, steps(twin, vectors(), NONE))
    assert actual.gradients["layers.0.up.weight"] is None
    assert actual.gradients["layers.1.down.weight"].any()


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_it_is_a_plain_forward(training):
    """Under no_grad the block runs once, on the very arguments that it is given."""
    model, seen = Stack(Residual(), Residual()).train(training), []
    model.layers[1].up.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with checkpointed(model, FULL), torch.no_grad():
        outside = model.layers[0](vectors())
        model.layers[1](outside)
    assert len(seen) == 1
    assert seen[0] is outside


def test_evaluation_mode_keeps_its_statistics():
    """A model in evaluation mode that is differentiated all the same uses its running statistics and leaves them."""
    model = Stack(Residual(), Residual())
    steps(model, vectors(), NONE)
    model.eval().zero_grad()
    twin = copy.deepcopy(model)
    assert_equal(steps(model, vectors(), FULL), steps(twin, vectors(), NONE))


def test_hooks_on_a_block_fire_once():
    """Hooks on the block itself stay outside of the recomputation."""
    model, fired = Stack(Residual(), Residual()), []
    block = model.layers[1]
    block.register_forward_pre_hook(lambda *_: fired.append("before"))
    block.register_forward_hook(lambda *_: fired.append("after"))
    block.register_full_backward_hook(lambda *_: fired.append("backward"))
    steps(model, vectors(), FULL, count=1)
    assert fired == ["before", "after", "backward"]


def test_types_names_and_signatures_stay():
    """While it is in force, the model looks the same from outside."""
    model = Stack(Residual(), Residual())
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    with checkpointed(model, FULL):
        assert type(model.layers[0]) is Residual
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == keys
        assert list(inspect.signature(model.layers[0].forward).parameters) == ["x"]
        assert "forward" in vars(model.layers[0])
    assert_undone(model)


@pytest.mark.parametrize("keyword", [False, True])
def test_an_argument_that_changes_before_backward_is_an_error(keyword):
    """Recomputing from other values would give wrong gradients in silence; keywords are watched too."""
    block = Scaling()
    x, scale = vectors(), torch.ones(8)
    with checkpointed(Stack(block), full("layers.0")):
        loss = (block(x, scale=scale) if keyword else block(x, scale)).sum()
        scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Scaling(nn.Module):
    """Uses an argument in a way that autograd itself would not have to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x + scale))


@pytest.mark.distributed
def test_under_data_parallelism(tmp_path):
    """F7: names are those inside DistributedDataParallel, and no parameter is marked ready twice."""
    torch.manual_seed(0)
    model = Stack(Residual(), Residual())
    twin = copy.deepcopy(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        assert discover_blocks(parallel).names == ("layers.0", "layers.1")
        torch.manual_seed(0)
        for _ in range(2):
            with checkpointed(parallel, FULL):
                loss_of(parallel, vectors()).backward()
    finally:
        torch.distributed.destroy_process_group()
    expected = steps(twin, vectors(), NONE).gradients
    assert all(same(p.grad, expected[name]) for name, p in model.named_parameters())


class FailsAt(nn.Module):
    """Raises at its n-th run."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.run -= 1
        if self.run == 0:
            raise torch.OutOfMemoryError("no room")
        return x


class Refuses(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")


class RefusesBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Refuses.apply(x)


@pytest.mark.parametrize(
    "culprit", [lambda: FailsAt(1), lambda: FailsAt(2), RefusesBackward], ids=["forward", "recomputation", "backward"]
)
def test_undone_after_running_out_of_memory(culprit):
    """Wherever memory runs out, forwards and buffers are the model's own again, and no batch was counted twice."""
    torch.manual_seed(0)
    model = Stack(Residual(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), culprit(), nn.Linear(8, 8)), Residual())
    buffers = dict(model.named_buffers())
    with pytest.raises(torch.OutOfMemoryError, match="no room"), checkpointed(model, full("layers.*")):
        loss_of(model, vectors()).backward()
    assert_undone(model)
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
    assert max(int(buffer) for name, buffer in buffers.items() if name.endswith("tracked")) == 1


class FailsAtOperator(TorchDispatchMode):
    """Runs out of memory in the n-th operator."""

    def __init__(self, operator: int) -> None:
        super().__init__()
        self.left = operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_undone_wherever_memory_runs_out():
    """Whichever operator finds no room, copies of buffers included, forwards and buffers are the model's own again."""
    model = Stack(Residual(), Residual())
    plan, buffers = CheckpointPlan(model, FULL), dict(model.named_buffers())
    operator, ran_out = 0, True
    while ran_out:
        operator += 1
        try:
            with FailsAtOperator(operator), plan.active():
                loss_of(model, vectors()).backward()
            ran_out = False
        except torch.OutOfMemoryError:
            pass
        assert_undone(model)
        assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
    assert operator > 50


def test_undone_when_applying_it_fails():
    """When one block cannot be patched, those before it are put back."""
    model = Stack(Residual(), Residual())
    plan = CheckpointPlan(model, FULL)
    model.layers[1].__class__ = type("Broken", (Residual,), {"forward": property(lambda self: 1 / 0)})
    with pytest.raises(ZeroDivisionError), plan.active():
        pass
    assert_undone(model)


def test_a_forward_that_others_have_set_is_used_and_put_back():
    """Libraries that set an instance-level forward, as accelerate does, find it called, and later in its place."""
    model, calls = Stack(Residual(), Residual()), []
    inner = model.layers[0].forward

    def theirs(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return inner(x)

    model.layers[0].forward = theirs
    steps(model, vectors(), FULL, count=1)
    assert len(calls) == 2
    assert model.layers[0].forward is theirs


def test_mode_none_touches_nothing():
    """Without checkpointing no forward is replaced."""
    model = Stack(Residual(), Residual())
    with checkpointed(model, NONE):
        assert_undone(model)


def test_caches_of_transformers_are_off_inside():
    """A recomputed layer would fill the cache of keys and values twice; afterwards the setting is what it was."""
    model = transformers_model("t5")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [config.use_cache for config in configs]
    assert True in before
    with checkpointed(model, FULL):
        assert not any(config.use_cache for config in configs)
        assert model(**tokens()).past_key_values is None
    assert [config.use_cache for config in configs] == before


def test_other_configurations_are_left_alone():
    """Only transformers' configurations are switched."""
    model = Stack(Residual(), Residual())
    model.config = type("Config", (), {"use_cache": True})()
    with checkpointed(model, FULL):
        assert model.config.use_cache


def test_shared_modules_are_left_out_but_would_be_right():
    """A block used twice is left out by what a forward shows; named all the same, its gradients are right."""
    torch.manual_seed(0)
    shared = Residual()
    model = Stack(Residual(), shared, shared)
    blocks = discover_blocks(model)
    with observe_calls(model, blocks.names) as observed:
        model(vectors())
    kept = keep_checkpointable(blocks, observed)
    assert kept.names == ("layers.0",)
    assert kept.left_out == (("layers.1", "called 2 times in one forward"),)
    twin = copy.deepcopy(model)
    assert_equal(steps(model, vectors(), full("layers.1")), steps(twin, vectors(), NONE))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (("layers.7",), r"called 'layers\.7'\. Near: 'layers\.[01]'"),
        (("layers[0:1]",), "Only an nn.Sequential"),
    ],
)
def test_unknown_blocks(blocks, message):
    """Names that are not in the model are refused before anything is touched."""
    with pytest.raises(ConfigError, match=message):
        CheckpointPlan(Stack(Residual(), Residual()), full(*blocks))


def test_nothing_to_recompute():
    """A model without blocks cannot be checkpointed, and the error says what to do."""
    with pytest.raises(ConfigError, match=r"Sequential has no part .* Name submodules"):
        CheckpointPlan(nn.Sequential(nn.Linear(2, 2)), FULL)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that were born under it and are still alive."""

    def __init__(self, older: nn.Module) -> None:
        super().__init__()
        self.bytes = 0
        self._known = weakref.WeakSet(t.untyped_storage() for t in older.state_dict().values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._died, storage.nbytes())
        return result

    def _died(self, size: int) -> None:
        self.bytes -= size


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept_bytes(model: nn.Module, batch: Any, checkpointing: Checkpointing) -> tuple[int, int]:
    """Bytes that are alive between forward and backward, and after backward without the gradients."""
    with no_garbage_collection(), LiveBytes(model) as live, checkpointed(model, checkpointing):
        loss = loss_of(model, batch)
        forward = live.bytes
        loss.backward()
        del loss
        model.zero_grad(set_to_none=True)
        return forward, live.bytes


MEMORY = {
    "ResNet-18": (lambda: torchvision.models.resnet18(), lambda: images(64), 0.6),
    "GPT-2": (lambda: transformers_model("gpt2"), tokens, 0.2),
    "twenty Linear, flat": (
        lambda: nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.ReLU()))),
        lambda: torch.randn(64, 8),
        0.25,
    ),
    "twenty Linear, in a list": (
        lambda: Stack(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(20))),
        lambda: torch.randn(64, 8),
        0.6,
    ),
    "ViT": (lambda: torchvision.models.VisionTransformer(16, 8, 4, 2, 8, 16), images, 0.5),
    "DenseNet": (lambda: torchvision.models.DenseNet(4, (4, 4), 8), lambda: images(32), 0.5),
}


@pytest.mark.parametrize("name", MEMORY)
def test_fewer_bytes_are_kept(name):
    """Between forward and backward far fewer bytes are alive, and afterwards no more, without a garbage collection."""
    build, batch, share = MEMORY[name]
    model, inputs = build(), batch()
    plain, plain_left = kept_bytes(model, inputs, NONE)
    recomputing, left = kept_bytes(model, inputs, FULL)
    assert recomputing < share * plain
    assert left == plain_left


def test_unwritten_buffers_are_not_kept():
    """A block's constants, such as masks, are not copied for the time until backward."""
    model = Stack(Residual(norm=nn.LayerNorm), Residual(norm=nn.LayerNorm))
    x = vectors()
    before, _ = kept_bytes(model, x, FULL)
    for layer in model.layers:
        layer.register_buffer("mask", torch.ones(100, 100))
    after, _ = kept_bytes(model, x, FULL)
    assert before == after


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["the whole model", "its blocks"])
def test_compiled_models(where):
    """The compiler traces through recomputed blocks, and compiled blocks can be recomputed."""
    torch.manual_seed(0)
    model = Stack(Residual(), Residual())
    twin = copy.deepcopy(model)
    for module in [model] if where == "the whole model" else model.layers:
        module.compile(backend="aot_eager")
    actual, expected = steps(model, vectors(), FULL, count=1), steps(twin, vectors(), NONE, count=1)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[name], gradient)
    assert int(model.layers[0].norm.num_batches_tracked) == 1
