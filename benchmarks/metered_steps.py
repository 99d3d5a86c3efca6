"""Small models trained on the CPU under the tracked meter, and what was predicted for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.memory import meter_for
from autofit.optimizers import optimizer_factory
from autofit.predict import Predictor
from autofit.snapshot import restored
from autofit.step.blocks import discover_blocks
from autofit.trial import TrialSetup, measure_need

ROOM = 1 << 40

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
SPLITS = ((4, 1), (3, 2))


def compare_all() -> Iterator[tuple[str, str, Candidate, int, int]]:
    """Model, optimizer, candidate, metered and predicted peak of allocated bytes."""
    for name, model, batch, options, precisions in _subjects():
        # Either precisions or optimizers vary, so that the table takes about a minute.
        chosen = {"AdamW"} if len(precisions) > 1 else set(OPTIMIZERS)
        for optimizer, make in OPTIMIZERS.items():
            if optimizer not in chosen:
                continue
            predictor = Predictor(model, batch, device="cpu", optimizer=make, **options)
            for candidate in _candidates(model, precisions):
                metered = _metered(model, batch, candidate, make, options)
                yield name, optimizer, candidate, metered, predictor.predict(candidate).peak_allocated_bytes


def _metered(model: nn.Module, batch: Any, candidate: Candidate, make: Any, options: Any) -> int:
    device = torch.device("cpu")
    with restored(model, None, device=device) as snapshot:
        setup = TrialSetup(
            model=model,
            sample_batch=batch,
            layout=infer_layout(batch),
            samples=candidate.micro_batch_size * candidate.accumulation_steps,
            device=device,
            meter=meter_for(device),
            cap_bytes=ROOM,
            outside_bytes=0,
            snapshot=snapshot,
            make_optimizer=optimizer_factory(make, model),
            loss_options=options,
        )
        reading = measure_need(candidate, setup, available_bytes=ROOM)
    assert reading is not None
    return reading.peak_allocated_bytes


def _candidates(model: nn.Module, precisions: tuple[Precision, ...]) -> Iterator[Candidate]:
    blocks = discover_blocks(model, patterns=None).names
    for precision in precisions:
        for checkpointing in (Checkpointing(), Checkpointing(mode="full", blocks=blocks)):
            for size, steps in SPLITS:
                yield Candidate(
                    micro_batch_size=size, accumulation_steps=steps, precision=precision, checkpointing=checkpointing
                )


def _subjects() -> Iterator[tuple[str, nn.Module, Any, dict[str, Any], tuple[Precision, ...]]]:
    """Convolutions in float32 only: this is a benchmark of bytes, and CPUs are slow at the others."""
    import transformers
    from torchvision import models

    images = torch.zeros(2, 3, 64, 64), torch.zeros(2, dtype=torch.int64)
    with_loss: dict[str, Any] = {"loss_fn": F.cross_entropy}
    for name in ("resnet18", "mobilenet_v3_small"):
        yield name, getattr(models, name)(num_classes=10), images, with_loss, ("float32",)
    vision = models.VisionTransformer(64, 16, 2, 2, 64, 128)
    yield "vision transformer", vision, images, with_loss, ("float32", "bfloat16")
    tokens = torch.ones(2, 32, dtype=torch.int64)
    words = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    config: Any = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, use_cache=False)
    yield "gpt2", transformers.GPT2LMHeadModel(config), words, {}, ("float32", "bfloat16")
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128, vocab_size=100
    )
    yield "bert", transformers.BertForMaskedLM(config), words, {}, ("float32", "bfloat16")
