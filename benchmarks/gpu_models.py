"""The models of `benchmarks.gpu`, with random weights: as people train them, and tiny ones for the dry run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn

Build = Callable[[], tuple[nn.Module, Any]]


def images(name: str, size: int, **options: Any) -> tuple[nn.Module, Any]:
    """A model of torchvision and four images."""
    model = torchvision.models.get_model(name, **options)
    return model, (torch.randn(4, 3, size, size), torch.randint(0, 10, (4,)))


def words(kind: str, length: int, **sizes: int) -> tuple[nn.Module, Any]:
    """A model of transformers from its configuration, and four texts."""
    import transformers

    made: dict[str, tuple[Any, Any]] = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    make_config, make_model = made[kind]
    config = make_config(**sizes)
    if kind == "t5":
        config.decoder_start_token_id = 0
    if kind == "gpt2":
        config.bos_token_id = config.eos_token_id = 0
    ids = torch.randint(0, config.vocab_size, (4, length))
    return make_model(config), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Build] = {
    "ResNet-50": partial(images, "resnet50", 224),
    "GPT-2": partial(words, "gpt2", 512),
    "ViT-B/16": partial(images, "vit_b_16", 224),
    "BERT": partial(words, "bert", 256),
    "ResNet-18": partial(images, "resnet18", 224),
    "ConvNeXt-T": partial(images, "convnext_tiny", 224),
    "Swin-T": partial(images, "swin_t", 224),
    "MobileNetV3-L": partial(images, "mobilenet_v3_large", 224),
    "EfficientNet-B0": partial(images, "efficientnet_b0", 224),
    "DenseNet-121": partial(images, "densenet121", 224),
    "VGG-16": partial(images, "vgg16", 224),
    "T5, small": partial(words, "t5", 128),
    "Llama, 8 layers": partial(
        words, "llama", 512, vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8
    ),
}
TINY: dict[str, Build] = {
    "ResNet-18": partial(images, "resnet18", 32, num_classes=10),
}
