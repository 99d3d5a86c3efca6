"""LoRA models of peft, and models with their own gradient checkpointing switched on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autofit
from tests.integrations.conftest import Texts, watch_sizes
from tests.states import FullState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def lora(bert: Any) -> Any:
    """The BERT classifier with a frozen base and small trainable matrices."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(bert, peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_lora_model_is_tuned_and_trained(lora: Any, texts: Texts, mode: str) -> None:
    """The frozen base gets no gradients and no optimizer state, tuning leaves no trace, and the loss falls."""
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=1e-2)
    frozen = {name: value.clone() for name, value in lora.named_parameters() if not value.requires_grad}
    before = FullState(lora, optimizer)
    space = autofit.SearchSpace(accumulation_steps=[4], precision="float32", checkpointing=mode)
    plan = autofit.tune(
        lora, texts.batch(4), target_batch=16, optimizer=optimizer, device="cpu", space=space, max_trials=1
    )
    assert before.differences(lora, optimizer) == []
    assert 0 < plan.environment.trainable_parameters < plan.environment.parameters / 4
    assert plan.best.predicted_peak_bytes == plan.best.peak_reserved_bytes
    inside = watch_sizes(lora.base_model.model.bert.encoder.layer[1].intermediate)
    step = plan.train_step(lora, optimizer)
    losses = [step(texts.batch(16)).loss.item() for _ in range(10)]
    assert len(inside) == 10 * 4 * (1 if mode == "none" else 2)
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, lora.get_parameter(name)) for name, value in frozen.items())
    assert set(optimizer.state) == {p for p in lora.parameters() if p.requires_grad}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_model_with_its_own_checkpointing(bert: Any, texts: Texts, mode: str) -> None:
    """`gradient_checkpointing_enable()` stays in force, alone or with autofit's: the gradient is a plain model's."""
    enable = getattr(bert, "activation_checkpointing_enable", bert.gradient_checkpointing_enable)
    bert.eval()  # without dropout, whose random numbers would tell the two apart
    plain = torch.autograd.grad(bert(**texts.batch(16)).loss, list(bert.parameters()))
    enable()
    bert.train()
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    space = autofit.SearchSpace(accumulation_steps=[4], precision="float32", checkpointing=mode)
    plan = autofit.tune(bert, texts.batch(4), target_batch=16, device="cpu", space=space, max_trials=1)
    assert bert.is_gradient_checkpointing
    gradients: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad.clone() for p in bert.parameters()))
    step = plan.train_step(bert, optimizer)
    losses = [step(texts.batch(16)).loss.item()]
    errors = [(a - b).norm() / b.norm().clamp_min(1e-3) for a, b in zip(gradients, plain, strict=True)]
    assert max(errors) < 1e-4
    losses += [step(texts.batch(16)).loss.item() for _ in range(10)]
    assert losses[-1] < losses[0]
