"""The training runs of the xMem study, as far as they are described in public: models, batches, and the loop.

Transformers' configurations are written out from the hub's public files; no weights and no hub are needed. The study
used transformers 4.51.3; where that differs from later versions in memory, `study_cache` and `study_attention` do what
it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

IMAGE_PIXELS = 86
TOKENS = 128
STEPS = 4

RunPhase = Literal["forward", "backward", "optimizer"]
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Run:
    """One training run. `zero_grad`: 0 at the start of a step, 1 between forward and backward, 2 after the step."""

    model: str
    batch: int
    optimizer: str
    zero_grad: int


def make_model(name: str) -> nn.Module:
    """The model, on `meta` where it can be: only shapes are needed."""
    if name.startswith("RegNet"):  # computes its widths with tensors
        return _torchvision(name)
    with torch.device("meta"):
        return _torchvision(name) if name in _TORCHVISION else _transformers(name)


def make_batch(run: Run) -> dict[str, torch.Tensor] | tuple[torch.Tensor, torch.Tensor]:
    """Images and classes, or tokens that are their own labels."""
    if run.model in _TORCHVISION:
        return torch.empty(run.batch, 3, IMAGE_PIXELS, IMAGE_PIXELS), torch.empty(run.batch, dtype=torch.int64)
    tokens = torch.empty(run.batch, TOKENS, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": torch.empty_like(tokens), "labels": torch.empty_like(tokens)}


def train(model: nn.Module, run: Run, batch: Any, device: torch.device, at: Callable[[RunPhase], None]) -> None:
    """The study's loop: outputs and loss live until the next forward has returned. `at` hears the phases."""
    optimizer: Optimizer = getattr(torch.optim, run.optimizer)(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for _ in range(STEPS):
        at("forward")
        if run.zero_grad == 0:
            optimizer.zero_grad()
        if isinstance(batch, dict):
            moved = {key: value.to(device) for key, value in batch.items()}
            outputs = model(**moved, past_key_values=study_cache(model))
            loss = outputs.loss
        else:
            images, classes = (value.to(device) for value in batch)
            outputs = model(images)
            loss = F.cross_entropy(outputs, classes)
        if run.zero_grad == 1:
            optimizer.zero_grad()
        at("backward")
        loss.backward()
        at("optimizer")
        optimizer.step()
        if run.zero_grad == 2:
            optimizer.zero_grad()
        if isinstance(batch, dict):
            del moved
        else:
            torch.max(outputs, 1)
            del images, classes


_TORCHVISION: dict[str, tuple[str, int]] = {
    "ConvNeXtBase": ("convnext_base", 1000),
    "ConvNeXtTiny": ("convnext_tiny", 1000),
    "MnasNet": ("mnasnet1_0", 10),
    "MobileNetV2": ("mobilenet_v2", 1000),
    "MobileNetV3Large": ("mobilenet_v3_large", 10),
    "MobileNetV3Small": ("mobilenet_v3_small", 10),
    "RegNetX400MF": ("regnet_x_400mf", 1000),
    "RegNetY400MF": ("regnet_y_400mf", 1000),
    "ResNet101": ("resnet101", 1000),
    "ResNet152": ("resnet152", 1000),
    "VGG16": ("vgg16", 1000),
    "VGG19": ("vgg19", 1000),
}


def _torchvision(name: str) -> nn.Module:
    import torchvision

    constructor, classes = _TORCHVISION[name]
    model: nn.Module = getattr(torchvision.models, constructor)(weights=None, num_classes=classes)
    return model


_T5 = {"feed_forward_proj": "relu", "d_kv": 64, "vocab_size": 32128, "decoder_start_token_id": 0}

# Class, attention, configuration.
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai-community/gpt2": ("GPT2", "sdpa", {}),
    "distilbert/distilgpt2": ("GPT2", "sdpa", {"n_layer": 6}),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2",
        "sdpa",
        {
            "n_layer": 10,
            "n_embd": 768,
            "n_head": 12,
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "EleutherAI/gpt-neo-125M": (
        "GPTNeo",
        "eager",
        {
            "num_layers": 12,
            "hidden_size": 768,
            "num_heads": 12,
            "attention_types": [[["global", "local"], 6]],
            "max_position_embeddings": 2048,
            "attention_dropout": 0.0,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
        },
    ),
    "facebook/opt-350m": (
        "OPT",
        "sdpa",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "T5-small": ("T5", "eager", {**_T5, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}),
    "t5-base": ("T5", "eager", {**_T5, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "Qwen/Qwen3-4B": (
        "Qwen3",
        "sdpa",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2",
        "sdpa",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "google/gemma-2-2b-it": (
        "Gemma2",
        "eager",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
        },
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        "Llama",
        "sdpa",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    ),
}


def _transformers(name: str) -> nn.Module:
    import transformers

    family, attention, values = _CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**values)
    config._attn_implementation = study_attention() if family == "GPT2" else attention
    head = "ForConditionalGeneration" if family == "T5" else "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model: nn.Module = getattr(transformers, f"{family}{head}")(config)
    if family == "GPT2":  # each layer had a causal mask of its own
        for block in model.transformer.h:
            mask = torch.empty(1, 1, config.n_positions, config.n_positions, dtype=torch.bool)
            block.attn.register_buffer("study_bias", mask, persistent=False)
    return model


def study_cache(model: nn.Module) -> Any:
    """A cache that keeps the first keys and values as they are; later versions of transformers copy them."""
    from transformers import DynamicCache, EncoderDecoderCache

    class AsTheyAre(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: Any, **more: Any) -> Any:
            self.kept = [*getattr(self, "kept", []), (keys, values)]
            return keys, values

    config: Any = model.config
    return EncoderDecoderCache(AsTheyAre(), AsTheyAre()) if config.is_encoder_decoder else AsTheyAre()


def study_attention() -> str:
    """Attention that copies its inputs first where they are not contiguous; registered with transformers by name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def contiguous_sdpa(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **more: Any
    ) -> Any:
        return sdpa_attention_forward(module, query.contiguous(), key.contiguous(), value.contiguous(), *others, **more)

    AttentionInterface.register("contiguous_sdpa", contiguous_sdpa)
    AttentionMaskInterface.register("contiguous_sdpa", sdpa_mask)
    return "contiguous_sdpa"
