"""Models of transformers: their own losses are means over labels, and parts are weighted by the labels that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.batch import infer_layout, to_device
from autofit.loss import check_weighting, resolve_loss, resolve_weighting

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 23
SMALL = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
BERT = {**SMALL, "intermediate_size": 8, "max_position_embeddings": 16}
GPT = {"vocab_size": VOCABULARY, "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16}
T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
XLNET = {"vocab_size": VOCABULARY, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}

MODELS = {
    "BertForMaskedLM": ("BertConfig", BERT, False),
    "BertForTokenClassification": ("BertConfig", BERT, False),
    "BertLMHeadModel": ("BertConfig", {**BERT, "is_decoder": True}, True),
    "GPT2LMHeadModel": ("GPT2Config", GPT, True),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "intermediate_size": 8}, True),
    "XLNetLMHeadModel": ("XLNetConfig", XLNET, False),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}, False),
}


def tiny(name: str) -> nn.Module:
    """A model with random weights, without dropout so that losses can be compared."""
    config_name, values, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**values)
    return getattr(transformers, name)(config).eval()


def token_batch(name: str) -> Any:
    """Six samples of uneven numbers of labels; the fourth has none, the fifth only a first one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (6, 9), generator=generator)
    labels = ids % 2 if "Classification" in name else ids.clone()
    for row, kept in enumerate([9, 4, 2, 0, 1, 3]):
        labels[row, kept:] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return transformers.BatchEncoding(batch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [[6], [2, 4], [3, 2, 1], [1] * 6], ids=str)
def test_parts_add_up_to_the_batch(name: str, sizes: list[int]) -> None:
    """The weighted sum over parts is the model's own loss, with labels shifted where the model shifts them."""
    model, batch = tiny(name), token_batch(name)
    loss, weighting = resolve_loss(), resolve_weighting(batch, model=model)
    parts = infer_layout(batch).split(batch, sizes)
    factors = weighting.coefficients(parts, sizes)
    with torch.no_grad():
        total = sum(f * loss(model, part) for f, part in zip(factors, parts, strict=True) if f)
        torch.testing.assert_close(total, loss(model, batch), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_shifted_labels_are_recognised(name: str) -> None:
    """Causal language models leave the first label out; encoders, encoder-decoders and XLNet do not."""
    said = resolve_weighting(token_batch(name), model=tiny(name)).describe()
    assert ("first position left out" in said) is MODELS[name][2]


class Compiled(nn.Module):
    """What torch.compile makes of a module, as far as its structure goes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


class Adapted(nn.Module):
    """What peft makes of a model, as far as its structure goes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = model

    def get_base_model(self) -> nn.Module:
        return self.base


@pytest.mark.parametrize("wrap", [nn.DataParallel, Compiled, Adapted, lambda m: Compiled(nn.DataParallel(Adapted(m)))])
def test_wrappers_are_looked_through(wrap: Any) -> None:
    """Data-parallel, compiled and adapted models are the model inside."""
    said = resolve_weighting(token_batch("GPT2LMHeadModel"), model=wrap(tiny("GPT2LMHeadModel"))).describe()
    assert "first position left out" in said


def test_a_wrong_weighting_is_noticed() -> None:
    """Weighting uneven token counts by samples is off by percents, although fresh weights lose the same everywhere."""
    name = "GPT2LMHeadModel"
    model, batch, loss = tiny(name), token_batch(name), resolve_loss()
    layout = infer_layout(batch)
    by_samples = resolve_weighting(batch, model=model, loss_weight="samples")
    right = check_weighting(loss, model, layout, batch, resolve_weighting(batch, model=model))
    wrong = check_weighting(loss, model, layout, batch, by_samples)
    assert right is not None
    assert wrong is not None
    assert right < 1e-5 < 1e-2 < wrong


def test_batch_encodings_stay_batch_encodings() -> None:
    """Split, resized and moved, a tokenizer's output keeps its type and keys."""
    batch = token_batch("GPT2LMHeadModel")
    layout = infer_layout(batch)
    made = [*layout.split(batch, [4, 2]), layout.resize(batch, 9), to_device(batch, "cpu", copy=True)]
    assert [type(part) for part in made] == [transformers.BatchEncoding] * 4
    assert [len(part["labels"]) for part in made] == [4, 2, 9, 6]
    assert len(batch["labels"]) == 6


def test_model_outputs_are_batches_too() -> None:
    """What one model gives can be the batch of another: items and attributes stay the same."""
    output = transformers.modeling_outputs.BaseModelOutput(
        last_hidden_state=torch.rand(5, 3, 2), hidden_states=(torch.rand(5, 3), torch.rand(5, 3))
    )
    part = infer_layout(output).split(output, [3, 2])[1]
    assert type(part) is type(output)
    assert part.last_hidden_state is part["last_hidden_state"]
    assert [len(part[0]), len(part.hidden_states[1])] == [2, 2]


def test_speech_models_with_ctc_follow_their_config() -> None:
    """A summed loss adds up; a mean is one over samples."""
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    convolutions = {"conv_dim": (4,), "conv_stride": (4,), "conv_kernel": (4,), "num_conv_pos_embeddings": 2}
    batch = {"input_values": torch.randn(5, 400), "labels": torch.randint(1, 9, (5, 3))}
    batch["labels"][1:4, 1:] = -100
    for reduction, kind in [("sum", "sum"), ("mean", "samples")]:
        config = transformers.Wav2Vec2Config(
            vocab_size=9, **small, **convolutions, num_conv_pos_embedding_groups=2, ctc_loss_reduction=reduction
        )
        model = transformers.Wav2Vec2ForCTC(config)
        weighting = resolve_weighting(batch, model=model)
        assert weighting.kind == kind
        found = check_weighting(resolve_loss(), model, infer_layout(batch), batch, weighting)
        assert found is not None
        assert found < 1e-5


def test_semantic_segmentation_follows_its_config() -> None:
    """Pixels of the config's ignored index do not count."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[8],
        patch_sizes=[4],
        strides=[4],
        num_attention_heads=[1],
        mlp_ratios=[1],
        decoder_hidden_size=8,
        num_labels=3,
        semantic_loss_ignore_index=7,
    )
    model = transformers.SegformerForSemanticSegmentation(config)
    batch = {"pixel_values": torch.rand(3, 3, 16, 16), "labels": torch.randint(0, 3, (3, 16, 16))}
    batch["labels"][0, :9] = 7
    weighting = resolve_weighting(batch, model=model)
    assert "not 7" in weighting.describe()
    found = check_weighting(resolve_loss(), model, infer_layout(batch), batch, weighting)
    assert found is not None
    assert found < 1e-5
