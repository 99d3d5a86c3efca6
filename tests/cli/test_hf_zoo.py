"""Hugging Face models from their configurations, without weights and without a network."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.cli.models import hf_zoo, load_workload
from autofit.errors import ConfigError

transformers = pytest.importorskip("transformers")

TINY: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    },
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "vit": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
}  # fmt: skip


def save(folder: Path, kind: str, **values: Any) -> str:
    """A folder with a tiny configuration, as a hub repository holds it; returns the name for --model."""
    small = {} if kind == "vit" else {"vocab_size": 50}
    config = transformers.CONFIG_MAPPING[kind](**{**TINY[kind], **small, **values})
    config.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub does not answer."""
    monkeypatch.setattr(hf_zoo, "_hub_answers", lambda name: False)


@pytest.mark.parametrize(
    ("kind", "model", "keys", "description"),
    [
        ("bert", "BertForMaskedLM", {"input_ids", "attention_mask", "labels"}, "masked language model, sequences of 9"),
        ("gpt2", "GPT2LMHeadModel", {"input_ids", "attention_mask", "labels"}, "causal language model"),
        ("llama", "LlamaForCausalLM", {"input_ids", "attention_mask", "labels"}, "causal language model"),
        ("t5", "T5ForConditionalGeneration", {"input_ids", "attention_mask", "labels"}, "sequence to sequence"),
        ("vit", "ViTForImageClassification", {"pixel_values", "labels"}, "image classification, 3 × 224 × 224"),
    ],
)
def test_each_kind_gets_a_training_head_and_its_batch(
    tmp_path: Path, kind: str, model: str, keys: set[str], description: str
) -> None:
    """The model runs on its batch, returns a loss and is differentiable."""
    workload = load_workload(save(tmp_path, kind), sequence_length=None if kind == "vit" else 9)
    assert type(workload.model).__name__ == model
    assert set(workload.sample_batch) == keys
    assert workload.description.startswith(description)
    assert workload.model.training
    workload.model(**workload.sample_batch).loss.backward()


def test_the_head_that_was_saved_is_built(tmp_path: Path) -> None:
    """`architectures` in the configuration decides where it names one."""
    name = save(tmp_path, "bert", architectures=["BertForSequenceClassification"], num_labels=3)
    workload = load_workload(name)
    assert type(workload.model).__name__ == "BertForSequenceClassification"
    assert workload.sample_batch["labels"].shape == (4,)
    assert workload.description == "sequence classification, sequences of 128 tokens, 3 classes"
    workload.model(**workload.sample_batch).loss.backward()


def test_the_cache_of_keys_and_values_is_off(tmp_path: Path) -> None:
    """It would hold memory that training has no use for."""
    model: Any = load_workload(save(tmp_path, "gpt2")).model
    assert model.config.use_cache is False


def test_the_image_size_reaches_the_configuration(tmp_path: Path) -> None:
    """A vision transformer's position embedding follows --image-size."""
    workload = load_workload(save(tmp_path, "vit"), image_size=32)
    assert workload.sample_batch["pixel_values"].shape == (4, 3, 32, 32)
    workload.model(**workload.sample_batch).loss.backward()


def test_a_model_type_takes_its_default_configuration(no_hub: None) -> None:
    """`hf:prophetnet` needs no network; the default sequence length is bounded by the positions."""
    config = hf_zoo._configuration("bert")
    assert config.model_type == "bert"
    assert config.hidden_size == 768


def test_an_unknown_name_fails_quickly_with_near_misses(no_hub: None) -> None:
    """No half minute of retries."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match="Did you mean 'roberta'"):
        load_workload("hf:robberta")
    assert time.monotonic() - began < 5


def test_the_hub_is_asked_once_and_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its HTTP library raises means no answer."""
    import huggingface_hub

    timeouts = []

    def unreachable(url: str, *, timeout: float) -> None:
        timeouts.append(timeout)
        raise ConnectionError(url)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    assert hf_zoo._hub_answers("someone/something") is False
    assert timeouts == [hf_zoo.HUB_SECONDS]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("bert", {"image_size": 32}, "--image-size 32 does not apply"),
        ("vit", {"sequence_length": 32}, "--sequence-length 32 does not apply"),
        ("gpt2", {"sequence_length": 2000}, "above the 1024 positions"),
    ],
)
def test_options_without_a_use_are_refused(tmp_path: Path, kind: str, options: dict[str, int], said: str) -> None:
    """Nothing is ignored silently."""
    with pytest.raises(ConfigError, match=said):
        load_workload(save(tmp_path, kind), **options)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """The message names the folder."""
    with pytest.raises(ConfigError, match="holds no configuration"):
        load_workload(f"hf:{tmp_path}")


def test_a_kind_without_a_known_head_is_refused(no_hub: None) -> None:
    """Speech models have no batch here; the message says what to do."""
    with pytest.raises(ConfigError, match="Write a factory"):
        load_workload("hf:whisper")


def test_a_model_larger_than_the_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is built, instead of being killed while it is."""
    monkeypatch.setattr(hf_zoo, "host_total_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"KiB of parameters, and this machine 1000 B of memory"):
        load_workload(save(tmp_path, "bert"))


def test_missing_transformers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra of this package, not just the name of the other."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'torch-autofit\[transformers\]'"):
        load_workload("hf:bert")


def test_the_batch_is_random_but_seeded(tmp_path: Path) -> None:
    """The same seed gives the same tokens."""
    name = save(tmp_path, "gpt2")
    torch.manual_seed(1)
    first = load_workload(name).sample_batch["input_ids"]
    torch.manual_seed(1)
    assert torch.equal(first, load_workload(name).sample_batch["input_ids"])
