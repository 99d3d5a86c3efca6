"""Hugging Face models from their configuration, with random weights and a training head."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autofit.cli.models.workload import Workload, near_misses, refuse_option
from autofit.device import host_total_bytes
from autofit.errors import ConfigError
from autofit.units import format_bytes

SAMPLES = 4
SEQUENCE_LENGTH = 128
IMAGE_SIZE = 224  # for configurations that name none: convolutional networks
HUB_SECONDS = 5


@dataclass(frozen=True)
class Head:
    """One task that a model can be trained for: the auto class that builds it and the batch that it takes."""

    task: str
    auto_class: str
    mapping: str
    batch: Callable[[Any, int | None], tuple[dict[str, Tensor], str]]


def load(name: str, *, image_size: int | None, sequence_length: int | None) -> Workload:
    """The model of a local folder, a model type (`bert`) or a hub id, built from its configuration.

    Raises ConfigError when transformers is missing, the name is not known or not reachable, or no head is known for it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"--model hf:{name} needs transformers. Install it: pip install 'torch-autofit[transformers]'"
        )
    config = _configuration(name)
    head = _head(name, config)
    size = image_size if head.batch is _images else sequence_length
    if head.batch is _images:
        refuse_option("--sequence-length", sequence_length, of=f"hf:{name}", because="it takes images")
        if image_size and hasattr(config, "image_size"):
            config.image_size = image_size
    else:
        refuse_option("--image-size", image_size, of=f"hf:{name}", because="it takes token sequences")
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a training step has no use for the cache of keys and values
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # absent from some defaults (T5), needed for labels
    model = _build(name, head, config)
    batch, description = head.batch(config, size)
    return Workload(model.train(), batch, f"{head.task}, {description}")


def _build(name: str, head: Head, config: Any) -> nn.Module:
    import transformers

    build = partial(getattr(transformers, head.auto_class).from_config, config)
    try:
        with torch.device("meta"):
            needed = sum(parameter.nbytes for parameter in build().parameters())
        if needed > host_total_bytes():
            raise ConfigError(
                f"hf:{name} has {format_bytes(needed)} of parameters, and this machine "
                f"{format_bytes(host_total_bytes())} of memory. Pass a folder with the config.json of a smaller one."
            )
        model: nn.Module = build()
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"transformers cannot build hf:{name} for {head.task}: {error}") from error
    return model


def _configuration(name: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if Path(name).is_dir():
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The folder {name!r} holds no configuration that transformers reads: {error}") from error
    if name in CONFIG_MAPPING:
        return CONFIG_MAPPING[name]()
    try:
        return AutoConfig.from_pretrained(name, local_files_only=not _hub_answers(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is neither a local folder nor a model type of transformers, and the Hugging Face hub gave no "
            f"configuration of that name.{near_misses(name, list(CONFIG_MAPPING))} Without a network, pass a model "
            f"type (hf:bert), or a folder with its config.json."
        ) from error


def _hub_answers(name: str) -> bool:
    """Whether the hub has this configuration, asked once and briefly: transformers itself retries for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except Exception:  # whatever its HTTP library raises; the local cache is asked next
        return False
    return True


def _head(name: str, config: Any) -> Head:
    """The head that the configuration was saved with, else the first that exists for this kind of model."""
    import transformers

    found = [head for head in HEADS if type(config) in getattr(transformers, head.mapping)]
    if config.is_encoder_decoder:
        found = [head for head in found if head.batch is not _tokens or head.mapping == SEQ2SEQ]
    saved = config.architectures or ()
    for head in found:
        if getattr(transformers, head.mapping)[type(config)].__name__ in saved:
            return head
    if not found:
        raise ConfigError(
            f"No training head is known for hf:{name} (model type {config.model_type!r}); known tasks: "
            f"{', '.join(head.task for head in HEADS)}. Write a factory: --model file.py:FACTORY."
        )
    return found[0]


def _tokens(config: Any, size: int | None) -> tuple[dict[str, Tensor], str]:
    length, tokens = _random_tokens(config, size)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    return batch, f"sequences of {length} tokens"


def _texts(config: Any, size: int | None) -> tuple[dict[str, Tensor], str]:
    length, tokens = _random_tokens(config, size)
    labels = torch.randint(config.num_labels, (SAMPLES,))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return batch, f"sequences of {length} tokens, {config.num_labels} classes"


def _images(config: Any, size: int | None) -> tuple[dict[str, Tensor], str]:
    pixels: Any = size or getattr(config, "image_size", None) or IMAGE_SIZE
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    channels = getattr(config, "num_channels", 3)
    labels = torch.randint(config.num_labels, (SAMPLES,))
    batch = {"pixel_values": torch.randn(SAMPLES, channels, height, width), "labels": labels}
    return batch, f"{channels} × {height} × {width} images, {config.num_labels} classes"


def _random_tokens(config: Any, sequence_length: int | None) -> tuple[int, Tensor]:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if sequence_length and longest and sequence_length > longest:
        raise ConfigError(f"--sequence-length {sequence_length} is above the {longest} positions of this model.")
    length = sequence_length or min(SEQUENCE_LENGTH, longest or SEQUENCE_LENGTH)
    return length, torch.randint(text.vocab_size, (SAMPLES, length))


SEQ2SEQ = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"
HEADS = (
    Head("sequence to sequence", "AutoModelForSeq2SeqLM", SEQ2SEQ, _tokens),
    Head("masked language model", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", _tokens),
    Head("causal language model", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", _tokens),
    Head("image classification", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _images),
    Head(
        "sequence classification",
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        _texts,
    ),
)
