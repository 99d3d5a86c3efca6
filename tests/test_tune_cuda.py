"""tune() on a real GPU: the allocator's own cap and statistics, and a model that comes from the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofit
from autofit.candidate import Checkpointing, SearchSpace
from autofit.units import MiB
from tests.models import ConvNet, image_batch, train
from tests.states import FullState

pytestmark = pytest.mark.gpu


def budget_for(tensors_bytes: int) -> int:
    """A budget that leaves so much to the allocator: the context and libraries are outside of it."""
    from autofit.memory import meter_for

    torch.zeros(1, device="cuda")
    return meter_for(torch.device("cuda", 0)).outside_bytes() + tensors_bytes


def test_a_model_from_the_host_is_tuned_on_the_gpu_and_comes_back() -> None:
    """The plan is within the cap; the model lies where it lay, bit for bit, and no device memory is held."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, steps=1)
    F.cross_entropy(model(image_batch()[0]), image_batch()[1]).backward()
    before = FullState(model, optimizer)
    allocated = torch.cuda.memory_allocated()
    plan = autofit.tune(
        model, image_batch(), target_batch=256, optimizer=optimizer, device="cuda", budget=budget_for(160 * MiB)
    )
    assert plan.best.feasible
    assert plan.best.peak_reserved_bytes is not None
    assert plan.best.peak_reserved_bytes <= plan.cap_bytes
    assert plan.environment.memory_source.startswith("measured")
    assert before.differences(model, optimizer) == []
    # cuBLAS keeps its workspaces; nothing else may stay.
    assert torch.cuda.memory_allocated() - allocated <= 80 * MiB


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_bit_identical_on_the_device(precision: Any) -> None:
    """A model that trains on the GPU already goes on as if nothing had been."""
    model = ConvNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, targets = (t.cuda() for t in image_batch())
    F.cross_entropy(model(images), targets).backward()
    optimizer.step()
    before = FullState(model, optimizer)
    space = SearchSpace(precision=precision)
    plan = autofit.tune(model, image_batch(), target_batch=64, optimizer=optimizer, space=space, max_trials=4)
    assert plan.best.feasible
    assert before.differences(model, optimizer) == []


def test_the_plan_trains_inside_its_peak() -> None:
    """What was measured is what runs: training with the plan reserves no more than its peak, to a segment."""
    model = ConvNet().cuda()
    plan = autofit.tune(model, image_batch(), target_batch=256, budget=budget_for(200 * MiB))
    step = plan.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        assert sum(step(image_batch(256)).micro_batches) == 256
    assert plan.best.peak_reserved_bytes is not None
    assert torch.cuda.max_memory_reserved() <= plan.best.peak_reserved_bytes + 20 * MiB
    assert step.oom_events == []


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_no_way_of_saving_activations_changes_a_gradient(mode: str) -> None:
    """Nor a buffer, on the device; and each keeps fewer bytes there between forward and backward."""
    from autofit.step.blocks import discover_blocks
    from autofit.step.checkpointing import checkpointed

    torch.manual_seed(0)
    model = ConvNet(width=32).cuda().train()
    inputs, targets = (tensor.cuda() for tensor in image_batch(32))

    def run(checkpointing: Checkpointing) -> tuple[int, list[torch.Tensor]]:
        model.zero_grad()
        torch.manual_seed(1)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        before = torch.cuda.memory_allocated()
        with checkpointed(model, checkpointing), torch.backends.cudnn.flags(deterministic=True):
            loss = F.cross_entropy(model(inputs), targets)
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        results = [parameter.grad for parameter in model.parameters()] + list(model.buffers())
        results = [result.clone() for result in results if result is not None]
        model.load_state_dict(state)
        return kept, results

    plain_kept, plain = run(Checkpointing())
    names = discover_blocks(model).names
    kept, results = run(Checkpointing.of(dict.fromkeys(names, mode)))
    assert all(torch.equal(one, other) for one, other in zip(results, plain, strict=True))
    assert kept < plain_kept
