"""Real training steps on the CPU, what the host's allocator itself reports of them, and what was predicted.

The events are those of `torch.profiler` with `profile_memory=True`: every block that PyTorch's CPU allocator hands out
or takes back, inside operators too, to the byte.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from autofit.batch import infer_layout
from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.memory import replay
from autofit.predict import Predictor
from autofit.predict.line import SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.step import TrainStep
from autofit.step.blocks import discover_blocks

CPU = torch.device("cpu")
PIXELS = 32
TOKENS = 64
CLASSES = 10
MICRO_BATCH = 6
ACCUMULATION_STEPS = 2
# Samples per optimizer step: two full micro-batches, or a full one and one that lacks a sample.
SPLITS = {"even": 12, "uneven": 11}
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@dataclass(frozen=True)
class Row:
    """One training step: which, its peak in bytes, and the predicted peaks without and with a calibration step."""

    model: str
    optimizer: str
    precision: str
    checkpointing: str
    accumulation: str
    measured_bytes: int
    traced_bytes: int
    calibrated_bytes: int

    @property
    def key(self) -> tuple[str, ...]:
        """What the row is about."""
        return tuple(str(value) for value in list(asdict(self).values())[:5])


@dataclass(frozen=True)
class Workload:
    """A model, made when it is its turn, a batch of MICRO_BATCH samples, and its loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Any
    loss_fn: Callable[..., torch.Tensor] | None = None


def compare(workload: Workload, known: Iterable[tuple[str, ...]]) -> Iterator[Row]:
    """The rows of one model that are not `known`."""
    torch.manual_seed(0)
    done, model = set(known), workload.make().train()
    options = {"loss_fn": workload.loss_fn}
    layout = infer_layout(workload.batch)
    for optimizer, make in OPTIMIZERS.items():
        predictor = Predictor(model, workload.batch, device=CPU, optimizer=make, calibrate=True, **options)
        names = predictor.observed_blocks(discover_blocks(model, patterns=None)).names
        modes = [Checkpointing(), Checkpointing(mode="full", blocks=names)] if names else [Checkpointing()]
        for precision in PRECISIONS:
            for checkpointing in modes:
                candidate = Candidate(
                    micro_batch_size=MICRO_BATCH,
                    accumulation_steps=ACCUMULATION_STEPS,
                    precision=precision,
                    checkpointing=checkpointing,
                )
                for split, samples in SPLITS.items():
                    about = workload.name, optimizer, precision, checkpointing.mode, split
                    if about in done:
                        continue
                    batch = layout.resize(workload.batch, samples)
                    measured = measure(TrainStep(model, make(model.parameters()), candidate, **options), batch)
                    sized = predictor.sized(candidate, samples=samples)
                    yield Row(*about, measured, _requested(sized.without_scratch()), _requested(sized))


def measure(step: TrainStep, batch: Any) -> int:
    """The most bytes that were in use at once, by the allocator's events, in two optimizer steps of `step`.

    As in a trial, the first has one micro-batch and makes the optimizer's state. Parameters and buffers were there
    before; the batch that micro-batches are taken from does not count.
    """
    model = step.model
    resident = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    parts = step.split(batch)
    gc.collect()
    with step.activated(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as seen:
        for some in (parts[:1], parts):
            step.zero_grad()
            losses = [step.micro_step(part) for part in some]
            step.optimizer_step()
            step.zero_grad()
            del losses
    now = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return sum(resident.values()) + peak


def _requested(sized: SizedTrace) -> int:
    return replay(allocator_events(sized)).peak_requested_bytes


def workloads() -> Iterator[Workload]:
    """Convolutional networks and vision transformers of torchvision, then small configurations of transformers."""
    import transformers
    from torchvision import models

    for name in TORCHVISION:
        images = _images(64 if name == "alexnet" else PIXELS)
        yield Workload(name, lambda name=name: getattr(models, name)(num_classes=CLASSES), images, F.cross_entropy)
    images = _images(PIXELS)
    for name, make in _SMALL_VISION.items():
        yield Workload(name, lambda make=make: make(models), images, F.cross_entropy)
    for name, (head, config) in _CONFIGS.items():
        family = name.partition(" ")[0]
        yield Workload(name, lambda f=family, h=head, c=config: _language_model(transformers, f, h, c), _words(head))


def _images(pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(MICRO_BATCH, 3, pixels, pixels), torch.randint(0, CLASSES, (MICRO_BATCH,))


TORCHVISION = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
)
_SMALL_VISION: dict[str, Callable[[Any], nn.Module]] = {
    "googlenet": lambda models: models.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False),
    "vgg11_bn": lambda models: _narrow_head(models.vgg11_bn(num_classes=CLASSES)),
    "vision_transformer": lambda models: models.VisionTransformer(PIXELS, 8, 4, 4, 128, 256, num_classes=CLASSES),
    "swin_transformer": lambda models: models.SwinTransformer(
        [4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.1
    ),
}


def _narrow_head(vgg: nn.Module) -> nn.Module:
    """Its own head has 120 million weights, beside which nothing else would be seen."""
    vgg.avgpool, vgg.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, CLASSES)
    return vgg


_SIZES = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
_T5 = {"d_model": 128, "d_ff": 512, "d_kv": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
}

# The head of each and its configuration.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Albert": ("ForMaskedLM", {**_SIZES, "embedding_size": 64}),
    "Bart": ("ForConditionalGeneration", _BART),
    "Bert": ("ForMaskedLM", _SIZES),
    "DistilBert": ("ForMaskedLM", {"n_layers": 4, "dim": 128, "n_heads": 4, "hidden_dim": 512}),
    "GPT2": ("LMHeadModel", {"n_layer": 4, "n_embd": 128, "n_head": 4}),
    "Llama": ("ForCausalLM", {**_SIZES, "num_key_value_heads": 2}),
    "OPT": ("ForCausalLM", {**_SIZES, "ffn_dim": 512, "word_embed_proj_dim": 128}),
    "Qwen2": ("ForCausalLM", {**_SIZES, "num_key_value_heads": 2}),
    "T5": ("ForConditionalGeneration", _T5),
    "ViT": ("ForImageClassification", {**_SIZES, "image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES}),
}
_VOCABULARY = 2000


def _language_model(transformers: Any, family: str, head: str, values: dict[str, Any]) -> nn.Module:
    words = {} if head == "ForImageClassification" else {"vocab_size": _VOCABULARY, "use_cache": False}
    config = getattr(transformers, f"{family}Config")(**values, **words)
    model: nn.Module = getattr(transformers, f"{family}{head}")(config)
    return model


def _words(head: str) -> dict[str, torch.Tensor]:
    if head == "ForImageClassification":
        labels = torch.randint(0, CLASSES, (MICRO_BATCH,))
        return {"pixel_values": torch.randn(MICRO_BATCH, 3, PIXELS, PIXELS), "labels": labels}
    tokens = torch.randint(2, _VOCABULARY, (MICRO_BATCH, TOKENS))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
