"""Finding the blocks of a model, by name, by mark, by structure, and by watching a forward."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autofit.errors import ConfigError
from autofit.step.blocks import Blocks, discover_blocks, keep_checkpointable, observe_calls
from autofit.step.chains import Slice

CLASSIFIERS = [
    ("resnet18", {"BasicBlock": 8}),
    ("resnet50", {"Bottleneck": 16}),
    ("densenet121", {"_DenseLayer": 58}),
    ("mobilenet_v3_small", {"InvertedResidual": 11}),
    ("efficientnet_b0", {"MBConv": 16}),
    ("convnext_tiny", {"CNBlock": 18}),
    ("vit_b_16", {"EncoderBlock": 12}),
    ("swin_t", {"SwinTransformerBlock": 12}),
    ("regnet_y_400mf", {"ResBottleneckBlock": 16}),
    ("squeezenet1_0", {"Fire": 8}),
    ("googlenet", {"Inception": 9, "InceptionAux": 2}),
    (
        "inception_v3",
        {"InceptionA": 3, "InceptionB": 1, "InceptionC": 4, "InceptionD": 1, "InceptionE": 2, "InceptionAux": 1},
    ),
    ("mnasnet0_5", {"_InvertedResidual": 16}),
    ("shufflenet_v2_x0_5", {"InvertedResidual": 16}),
    ("maxvit_t", {"MaxVitLayer": 11}),
]
OTHERS = [
    (torchvision.models.segmentation.fcn_resnet50, {"Bottleneck": 16}),
    (torchvision.models.segmentation.deeplabv3_resnet50, {"Bottleneck": 16}),
    (torchvision.models.detection.fasterrcnn_resnet50_fpn, {"Bottleneck": 16}),
    (torchvision.models.detection.retinanet_resnet50_fpn, {"Bottleneck": 16}),
]


def kinds(model: nn.Module, blocks: Blocks) -> dict[str, int]:
    """How many blocks there are of each class."""
    found: dict[str, int] = {}
    for name in blocks.names:
        kind = type(model.get_submodule(name)).__name__
        found[kind] = found.get(kind, 0) + 1
    return found


@pytest.mark.parametrize(("name", "expected"), CLASSIFIERS, ids=[name for name, _ in CLASSIFIERS])
def test_classifiers_of_torchvision(name, expected):
    """Every family of image classifiers is cut where its authors would cut it."""
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    # regnet reads its widths from tensors, which meta tensors do not hold
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = torchvision.models.get_model(name, weights=None, **options)
    assert kinds(model, discover_blocks(model)) == expected


@pytest.mark.parametrize(("build", "expected"), OTHERS, ids=[build.__name__ for build, _ in OTHERS])
def test_segmentation_and_detection(build, expected):
    """Of models with a backbone and heads, the backbone's blocks are found."""
    with torch.device("meta"):
        model = build(weights=None, weights_backbone=None)
    assert kinds(model, discover_blocks(model)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "vgg11",
            ("features[0:3]", "features[3:6]", "features[6:11]", "features[11:16]", "features[16:21]", "classifier"),
        ),
        ("alexnet", ("features[0:3]", "features[3:6]", "features[6:13]", "classifier")),
    ],
)
def test_stacks_of_layers_are_cut_after_poolings(name, expected):
    """Models that are one long Sequential are cut into runs, each up to a pooling."""
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    blocks = discover_blocks(model)
    assert blocks.names == expected
    assert "runs of layers" in blocks.found_by


class Parts(nn.Module):
    """A module of the given parts; how it would call them does not matter."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


class Encoder(Parts):
    """One class among others."""


class Decoder(Parts):
    """Another class among others."""


class ByHand(nn.Module):
    """Weights without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8))
        self.down = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(x @ self.up) @ self.down


class Affine(nn.Module):
    """Parameters of two dimensions that multiply no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Residual(nn.Module):
    """A block as people write them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Blocks in sequence and a change of width, as in many vision models."""

    def __init__(self, depth: int, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.downsample = downsample or linear()
        self.blocks = nn.Sequential(*(Residual() for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.downsample(x))


class Mixture(nn.Module):
    """A block that holds a list of its own, of experts that run side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.experts = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x)[0]
        return x + sum(expert(x) for expert in self.experts)


class Level(nn.Module):
    """One level of a U-Net, around the next."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.down, self.inner, self.up = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        return self.up(x if self.inner is None else x + self.inner(x))


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def tutorial_cnn() -> nn.Sequential:
    return chain(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


STRUCTURES = {
    "twenty Linear, flat": (
        lambda: chain(*(layer for _ in range(20) for layer in (linear(), nn.ReLU()))),
        ("[0:10]", "[10:20]", "[20:30]", "[30:40]"),
    ),
    "twenty Linear with ReLU, nested": (
        lambda: chain(*(chain(linear(), nn.ReLU()) for _ in range(20))),
        ("[0:5]", "[5:10]", "[10:15]", "[15:20]"),
    ),
    "a list of Linear with GELU": (
        lambda: Parts(layers=nn.ModuleList(chain(linear(), nn.GELU()) for _ in range(3))),
        ("layers.0", "layers.1", "layers.2"),
    ),
    "a list of Linear with ReLU, which keeps its output": (
        lambda: Parts(layers=nn.ModuleList(chain(linear(), nn.ReLU()) for _ in range(3))),
        (),
    ),
    "two convolutions, flat": (tutorial_cnn, ("[0:3]", "[3:7]", "[7:12]")),
    "two convolutions, as attributes": (
        lambda: Parts(conv1=nn.Conv2d(3, 6, 5), conv2=nn.Conv2d(6, 16, 5), fc1=linear(), fc2=linear()),
        (),
    ),
    "three Linear": (lambda: chain(linear(), nn.ReLU(), linear(), nn.ReLU(), linear()), ("[0:4]",)),
    "two Linear, which would be all at once": (lambda: chain(nn.Flatten(), linear(), nn.ReLU(), linear()), ()),
    "an in-place activation never starts a run": (
        lambda: chain(
            *(layer for _ in range(4) for layer in (chain(nn.ReLU(inplace=True), linear()), nn.MaxPool1d(1)))
        ),
        (),
    ),
    "nor does one at the very start": (
        lambda: chain(nn.ReLU(inplace=True), nn.LayerNorm(4), *(linear() for _ in range(4))),
        ("[1:4]", "[4:6]"),
    ),
    "one activation used throughout": (
        lambda: (lambda act: chain(*(layer for _ in range(4) for layer in (linear(), act))))(nn.ReLU()),
        ("[0:4]", "[4:8]"),
    ),
    "Sequentials as attributes": (
        lambda: Parts(**{name: chain(linear(), nn.ReLU(), linear()) for name in ("down1", "down2", "up1", "up2")}),
        ("down1", "down2", "up1", "up2"),
    ),
    "stages of blocks": (
        lambda: Parts(stem=linear(), stages=nn.ModuleList([Stage(1), Stage(2)])),
        ("stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"),
    ),
    "stages with a large change of width": (
        lambda: Parts(stages=nn.ModuleList([Stage(2, Decoder(a=linear(), b=linear())), Stage(2)])),
        ("stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"),
    ),
    "stages of blocks as attributes": (
        lambda: Parts(s1=Encoder(b1=Residual(), b2=Residual()), s2=Encoder(b1=Residual(), b2=Residual())),
        ("s1.b1", "s1.b2", "s2.b1", "s2.b2"),
    ),
    "a block's own list is part of it": (
        lambda: Parts(layers=nn.ModuleList(Mixture() for _ in range(2))),
        ("layers.0", "layers.1"),
    ),
    "the odd one between its like": (
        lambda: Parts(a=Residual(), b=Encoder(x=linear(), y=linear()), c=Residual(), head=linear()),
        ("a", "b", "c"),
    ),
    "levels inside each other": (
        lambda: Parts(net=Level(Level(Level(None))), more=linear()),
        ("net.inner.inner",),
    ),
    "two different halves": (
        lambda: Parts(net=Parts(encoder=Encoder(a=linear(), b=linear()), decoder=Decoder(a=linear(), b=linear()))),
        ("net.encoder", "net.decoder"),
    ),
    "weights without layers": (
        lambda: Parts(layers=nn.ModuleList(ByHand() for _ in range(2))),
        ("layers.0", "layers.1"),
    ),
    "few blocks beside a long stack": (
        lambda: Parts(
            stack=chain(*(linear() for _ in range(16))),
            **{name: Encoder(inner=chain(linear(), linear())) for name in ("a", "b")},
        ),
        ("a", "b", "stack[0:4]", "stack[4:8]", "stack[8:12]", "stack[12:16]"),
    ),
    "recurrent layers": (lambda: Parts(one=nn.LSTM(4, 4), two=nn.LSTM(4, 4)), ("one", "two")),
    "spectral norm does not make a layer a block": (
        lambda: Parts(
            a=nn.utils.parametrizations.spectral_norm(linear()), b=nn.utils.parametrizations.weight_norm(linear())
        ),
        (),
    ),
    "lazy layers": (
        lambda: Parts(layers=nn.ModuleList(chain(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(4)) for _ in range(2))),
        ("layers.0", "layers.1"),
    ),
    "scales and shifts are no weights": (lambda: Parts(one=Affine(), layer=linear(), two=Affine()), ()),
    "nothing at all": (lambda: nn.ReLU(), ()),
}


@pytest.mark.parametrize(("build", "expected"), STRUCTURES.values(), ids=STRUCTURES)
def test_structures_people_write(build, expected):
    """Blocks are what is worth recomputing; where nothing is, there are none, and it says so."""
    blocks = discover_blocks(build())
    assert blocks.names == expected
    assert blocks.found_by
    if not expected:
        assert "no part of the model" in blocks.found_by


def test_single_layers_are_left_out_with_a_reason():
    """A model of single layers says for each why it is no block."""
    blocks = discover_blocks(Parts(conv1=nn.Conv2d(3, 6, 5), norm=nn.BatchNorm2d(6), fc=linear()))
    assert blocks.left_out == tuple((name, "recomputing it alone frees nothing") for name in ("conv1", "fc"))


def test_layers_that_transformers_marks():
    """The layers that transformers would checkpoint are found without importing it, and a marked stage is opened."""
    transformers = pytest.importorskip("transformers", reason="needs transformers' models")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    with torch.device("meta"):
        bert = transformers.BertModel(transformers.BertConfig(**small))
        gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_head=2, n_layer=2))
        t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
        )
        resnet = transformers.ResNetModel(transformers.ResNetConfig(depths=[1, 2], hidden_sizes=[8, 16]))
        swin = transformers.SwinModel(transformers.SwinConfig(embed_dim=8, depths=[1, 2], num_heads=[2, 2]))
    found = discover_blocks(bert)
    assert found.names == ("encoder.layer.0", "encoder.layer.1", "encoder.layer.2")
    assert found.found_by == "layers that transformers marks (3 × BertLayer)"
    assert discover_blocks(gpt).names == ("transformer.h.0", "transformer.h.1")
    assert discover_blocks(t5).names == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    assert kinds(swin, discover_blocks(swin)) == {"SwinLayer": 3}
    assert kinds(resnet, discover_blocks(resnet)) == {"ResNetBottleNeckLayer": 3}  # marked are its single convolutions


def test_layers_declared_unsplittable():
    """Where no layer is marked, the classes named in `_no_split_modules` are taken."""
    model = Parts(layers=nn.ModuleList([Residual(), Encoder(a=linear(), b=linear())]))
    model._no_split_modules = ["Residual"]
    assert discover_blocks(model).names == ("layers.0",)


def test_names_start_inside_wrappers():
    """Blocks of a compiled model have the names that the plain model gives them."""
    model = Parts(layers=nn.ModuleList(Residual() for _ in range(2)))
    assert discover_blocks(torch.compile(model)).names == discover_blocks(model).names == ("layers.0", "layers.1")


PATTERNS = {
    "a name": (["head"], ("head",)),
    "names in any order": (["layers.1", "layers.0"], ("layers.0", "layers.1")),
    "a pattern": (["layers.*"], ("layers.0", "layers.1")),
    "a class": (["Residual"], ("layers.0", "layers.1")),
    "a pattern of classes": (["Resid*"], ("layers.0", "layers.1")),
    "leaves, if one wants to": (["*.up"], ("layers.0.up", "layers.1.up")),
    "the outer of two": (["layers.0.up", "layers.0"], ("layers.0",)),
    "a slice": (["stack[0:2]"], ("stack[0:2]",)),
    "slices and modules": (["stack[2:4]", "stack[0:2]", "layers.1"], ("layers.1", "stack[0:2]", "stack[2:4]")),
    "a module holds its slices": (["stack[0:2]", "stack"], ("stack",)),
    "a slice holds its modules": (["stack[0:2]", "stack.1", "stack.2"], ("stack[0:2]", "stack.2")),
    "the same twice": (["head", "he*"], ("head",)),
    "a second name for a module": (["tied"], ("tied",)),
    "a module under both of its names": (["tied", "head"], ("head",)),
}


def named_model() -> Parts:
    head = linear()
    return Parts(
        layers=nn.ModuleList(Residual() for _ in range(2)),
        stack=chain(linear(), nn.ReLU(), linear(), nn.ReLU()),
        head=head,
        tied=head,
    )


@pytest.mark.parametrize(("patterns", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_blocks_by_name(patterns, expected):
    """Users name blocks by name, pattern, class or slice; of nested ones the outermost is taken."""
    blocks = discover_blocks(named_model(), patterns=patterns)
    assert blocks.names == expected
    assert all(pattern in blocks.found_by for pattern in patterns)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.0", r"called 'layer\.0'\. Near: 'layers\.0'"),
        ("Residul", r"Near: 'Residual'"),
        ("zzz", r"called 'zzz'\. Allowed: a name as in"),
        ("", r"called ''"),
        ("layers", r"'layers' is a ModuleList, which has no forward .* 'layers\.\*'"),
        ("layers[0:1]", r"of 'layers', which is a ModuleList. Only an nn\.Sequential"),
        ("stck[0:1]", r"called 'stck'\. Near: 'stack'"),
        ("stack[2:9]", r"'stack\[2:9\]' is empty or outside of its nn\.Sequential, which has 4 layers"),
        ("stack[2:2]", r"'stack\[2:2\]' is empty or outside"),
    ],
)
def test_names_that_mean_nothing(pattern, message):
    """A name that matches nothing is an error that says what is near and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        discover_blocks(named_model(), patterns=["head", pattern])


def test_slices_must_not_overlap():
    """Two runs that share a layer cannot both be recomputed."""
    with pytest.raises(ConfigError, match=r"'stack\[0:3\]' and 'stack\[2:4\]' overlap"):
        discover_blocks(named_model(), patterns=["stack[0:3]", "stack[2:4]"])


@given(parent=st.from_regex(r"[a-z_]\w*(\.\w+)*|", fullmatch=True), start=st.integers(0, 999), stop=st.integers(0, 999))
def test_slices_survive_their_names(parent, start, stop):
    """A slice is read back from its name."""
    assert Slice.parse(str(Slice(parent, start, stop))) == Slice(parent, start, stop)


LAYERS = {"L": linear, "R": nn.ReLU, "G": nn.GELU, "D": nn.Dropout, "P": lambda: nn.MaxPool1d(1), "F": nn.Flatten}


@given(st.text("LRGDPF", min_size=1, max_size=40))
def test_runs_are_disjoint_and_in_order(layers):
    """However a Sequential is made up, its runs lie within it, in order, share no layer, and hold a weight each."""
    model = chain(*(LAYERS[letter]() for letter in layers))
    slices = [Slice.parse(name) for name in discover_blocks(model).names]
    edges = [edge for slice_ in slices for edge in (slice_.start, slice_.stop)]
    assert edges == sorted(edges)
    assert all(edge <= len(layers) for edge in edges)
    assert all("L" in layers[slice_.start : slice_.stop] for slice_ in slices)
    assert all(b > a for a, b in zip(edges[::2], edges[1::2], strict=True))


class InPlace(Residual):
    """Starts by writing over what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.relu_())


class Tossing(Residual):
    """Draws from a generator that torch does not keep."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.random())


class TossingArrays(Residual):
    """Draws from NumPy's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import numpy

        return super().forward(x * float(numpy.random.rand()))


class Counting(Residual):
    """Returns no activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) > 0).sum()


class Constant(Residual):
    """Takes no activations."""

    def forward(self, width: int = 4) -> torch.Tensor:
        return super().forward(torch.ones(1, width))


@dataclasses.dataclass
class Output:
    """A result that is not a plain container."""

    hidden: torch.Tensor
    label: str = ""


class Wrapping(Residual):
    """Returns a dataclass."""

    def forward(self, x: torch.Tensor) -> Output:
        return Output(super().forward(x))


class Everything(nn.Module):
    """Calls its blocks in all the ways that matter."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.shared, self.unused = Residual(), Residual(), Residual(), Residual()
        self.in_place, self.tossing, self.arrays = InPlace(), Tossing(), TossingArrays()
        self.counting, self.constant, self.wrapping, self.added_to = Counting(), Constant(), Wrapping(), Residual()
        self.stack = chain(linear(), nn.ReLU(), linear(), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.shared(self.first(x)))
        x = self.in_place(x)
        x = self.arrays(self.tossing(x)) + self.counting(x) + self.constant()
        x = self.wrapping(x).hidden
        x = x.add_(self.added_to(x))
        return self.last(self.stack(x))


def test_what_a_forward_shows():
    """Only blocks that are called once, on tensors that nobody changes, are kept, in the order of their calls."""
    model = Everything()
    blocks = discover_blocks(
        model, patterns=[*(name for name, _ in model.named_children() if name != "stack"), "stack[0:2]", "stack[2:4]"]
    )
    with observe_calls(model, blocks.names) as observed:
        model(torch.ones(2, 4))
    kept = keep_checkpointable(blocks, observed)
    assert kept.names == ("first", "wrapping", "stack[0:2]", "stack[2:4]", "last")
    assert dict(kept.left_out) == {
        "shared": "called 2 times in one forward",
        "unused": "not called in the forward",
        "in_place": "its input is changed in place",
        "added_to": "its input is changed in place",
        "tossing": "draws from Python's or NumPy's random numbers, which a recomputation cannot repeat",
        "arrays": "draws from Python's or NumPy's random numbers, which a recomputation cannot repeat",
        "counting": "returns no floating-point tensor",
        "constant": "takes no tensor",
    }
    assert kept.found_by == blocks.found_by


def test_only_the_first_run_sees_the_input_of_a_sequential():
    """A Sequential that starts by writing over its input spoils its first run and no other."""
    model = Parts(head=linear(), stack=chain(nn.ReLU(inplace=True), linear(), linear(), linear(), nn.ReLU(), linear()))
    blocks = discover_blocks(model, patterns=["stack[0:3]", "stack[3:6]"])
    with observe_calls(model, blocks.names) as observed:
        model(torch.ones(2, 4))
    assert keep_checkpointable(blocks, observed).names == ("stack[3:6]",)


def test_inputs_are_held_no_longer_than_the_forward():
    """What follows inside, such as backward, finds the memory of the blocks' inputs free."""
    model = Parts(layers=chain(Residual(), Residual()))
    with observe_calls(model, ["layers.*"]) as observed:
        model(torch.ones(2, 4))
        assert not observed._inputs


def test_watching_leaves_nothing_behind():
    """After watching, also when the forward fails, no hook is left and no input is held."""
    model = Parts(layers=chain(Residual(), Residual()))
    with pytest.raises(RuntimeError, match="normalized_shape"), observe_calls(model, ["layers.0"]) as observed:
        model(torch.ones(2, 5))
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules()
    )
    assert not observed._inputs


def test_watching_fake_tensors():
    """One forward on fake tensors, which costs no memory, shows as much."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        model = torchvision.models.resnet18(weights=None)
        blocks = discover_blocks(model)
        with observe_calls(model, blocks.names) as observed:
            model(torch.empty(2, 3, 32, 32))
    assert keep_checkpointable(blocks, observed) == blocks
