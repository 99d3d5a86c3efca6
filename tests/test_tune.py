"""tune() from end to end: real steps, an enforced budget, a plan, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofit
import autofit.tuner
from autofit.candidate import SearchSpace
from autofit.errors import ConfigError, DeviceLostError, InfeasibleError, StepError
from autofit.plan import Trial
from autofit.units import MiB
from tests.models import ConvNet, Wide, image_batch, train, vector_batch
from tests.states import FullState


def tune(model: nn.Module, batch: Any, **options: Any) -> autofit.Plan:
    """autofit.tune on the CPU, on one precision unless asked otherwise."""
    options.setdefault("space", SearchSpace(precision="float32"))
    options.setdefault("device", "cpu")
    return autofit.tune(model, batch, **options)


def live_tensors() -> int:
    """Tensors that the garbage collector knows."""
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def test_a_plan_within_the_budget() -> None:
    """The best trial is feasible, meets the target exactly and stays in the cap; one that would not fit was met."""
    plan = tune(ConvNet(), image_batch(), target_batch=24, budget="24MiB")
    best = plan.best
    assert best.feasible
    assert sum(best.candidate.split(24)) == 24
    assert best.peak_reserved_bytes is not None
    assert 0 < best.peak_reserved_bytes <= plan.cap_bytes <= plan.budget_bytes == 24 * MiB
    assert best.samples_per_second == pytest.approx(24 / best.step_seconds.median)  # type: ignore[union-attr]
    assert {trial.outcome for trial in plan.trials} >= {"feasible"}
    assert any(trial.outcome in ("out_of_memory", "over_budget") for trial in plan.trials)
    assert plan.environment.memory_source == "tracked: storages of tensors, as the CUDA allocator would hold them"
    assert len({trial.candidate for trial in plan.trials}) == len(plan.trials)
    assert autofit.Plan.from_json(plan.to_json()) == plan


def test_the_plan_trains() -> None:
    """plan.train_step gives a step that learns, at exactly the target."""
    torch.manual_seed(0)
    model = ConvNet()
    plan = tune(model, image_batch(), target_batch=6, budget="24MiB", max_trials=3)
    step = plan.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    batch = image_batch(6)
    results = [step(batch) for _ in range(12)]
    assert all(sum(result.micro_batches) == 6 for result in results)
    assert results[-1].loss.item() < 0.9 * results[0].loss.item()


PHASES = {
    "forward": (ConvNet, image_batch, "8MiB", 16),
    "backward": (ConvNet, image_batch, None, 4),
    "optimizer": (Wide, vector_batch, "44MiB", 4),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("phase", PHASES)
def test_bit_identical_after_out_of_memory(phase: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """B4, B5, D1, D4, D5: memory that runs out in any phase changes nothing, and training goes on as without tune()."""
    kind, make_batch, budget, target = PHASES[phase]

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = kind()
        batch = make_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if phase != "optimizer":  # there memory runs out when the optimizer makes its state
            train(model, optimizer, steps=1, batch=batch)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        return model, optimizer, batch

    model, optimizer, batch = start()
    expected = train(model, optimizer, batch=batch)
    model, optimizer, batch = start()
    before, alive = FullState(model, optimizer), live_tensors()
    trials: list[Trial] = []
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "target_batch": target,
        "on_trial": trials.append,
        "max_trials": 6,
    }
    monkeypatch.setattr(autofit.tuner, "_predictor", lambda *_: None)  # so that what cannot fit is tried all the same
    if budget is None:
        _run_out_in_backward(model, monkeypatch)
    with contextlib.suppress(InfeasibleError):
        tune(model, batch, budget=budget, space=SearchSpace(precision=precision), **options)
    monkeypatch.undo()
    failed = [trial.message for trial in trials if trial.outcome == "out_of_memory"]
    assert any(message.startswith(phase) for message in failed), [t.message for t in trials]
    assert before.differences(model, optimizer) == []
    del trials
    assert live_tensors() == alive
    assert train(model, optimizer, batch=batch) == expected


def _run_out_in_backward(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the backward of every micro-batch of more than two samples."""
    original = ConvNet.forward

    def forward(self: ConvNet, x: torch.Tensor) -> torch.Tensor:
        output = original(self, x)
        if len(x) > 2 and output.requires_grad:
            output.register_hook(_out_of_memory)
        return output

    monkeypatch.setattr(ConvNet, "forward", forward)


def _out_of_memory(gradient: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_nothing_fits() -> None:
    """C12: the error names the budget and the smallest peak seen, what would fit, and keeps what was tried."""
    with pytest.raises(InfeasibleError, match=r"budget of 1.0 MiB") as caught:
        tune(ConvNet(), image_batch(), target_batch=8, budget="1MiB")
    error = caught.value
    assert error.budget_bytes == 1 * MiB
    assert error.smallest_peak_bytes is not None
    assert error.smallest_peak_bytes > 1 * MiB
    assert error.plan is not None
    assert error.plan.best_number is None
    assert "would fit it" in str(error)
    plan = tune(ConvNet(), image_batch(), target_batch=8, budget=error.smallest_peak_bytes)
    assert plan.best.feasible


class NoParameters(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"model": lambda x: x}, "torch.nn.Module"),
    "nothing to train": ({"model": NoParameters()}, "no trainable parameters"),
    "frozen": ({"model": ConvNet().requires_grad_(False)}, "no trainable parameters"),
    "target zero": ({"target_batch": 0}, "target_batch"),
    "target negative": ({"target_batch": -4}, "target_batch"),
    "target fraction": ({"target_batch": 2.5}, "target_batch"),
    "target boolean": ({"target_batch": True}, "target_batch"),
    "empty batch": ({"sample_batch": image_batch(0)}, "no samples"),
    "no tensor": ({"sample_batch": {"a": "text"}}, "tensor"),
    "budget above the device": ({"budget": "900TiB"}, "above what the device has"),
    "budget nonsense": ({"budget": "many"}, "many"),
    "budget zero": ({"budget": 0}, "positive"),
    "unknown device": ({"device": "gpu"}, "not a device"),
    "no such device": ({"device": "cuda:7"}, "not available here"),
    "trials": ({"max_trials": 0}, "max_trials"),
    "timeout": ({"timeout": -1}, "timeout"),
    "space": ({"space": {"precision": "float32"}}, "SearchSpace"),
    "precision": ({"space": SearchSpace(precision="tf32")}, "tf32"),
    "blocks": ({"space": SearchSpace(checkpoint_blocks=["no_such_block"])}, "no_such_block"),
    "optimizer": ({"optimizer": "adam"}, "optimizer"),
    "loss shape": ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, "reduction"),
    "loss detached": ({"loss_fn": lambda o, t: F.cross_entropy(o, t).detach()}, "require"),
    "loss is no tensor": ({"loss_fn": lambda o, t: 3.0}, "float"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input(name: str) -> None:
    """What cannot be meant is a ConfigError that says what was passed; nothing changes."""
    changes, message = BAD_CALLS[name]
    call = {"model": ConvNet(), "sample_batch": image_batch(), "target_batch": 8, **changes}
    model, batch = call.pop("model"), call.pop("sample_batch")
    before = FullState(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ConfigError, match=message):
        tune(model, batch, **call)
    if before is not None:
        assert before.differences(model) == []


def test_a_loss_that_is_not_finite() -> None:
    """NaN on the sample batch in float32 is an error of the step, before anything is tuned."""
    with pytest.raises(StepError, match="loss of the sample batch is nan"):
        tune(ConvNet(), image_batch(), target_batch=8, loss_fn=lambda o, t: F.cross_entropy(o, t) * float("nan"))


def test_an_error_of_the_users_own() -> None:
    """A model that fails for a reason that is not memory: the reason, the cause, no retries, nothing changed."""

    class Broken(ConvNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("labels")

    model = Broken()
    before = FullState(model)
    with pytest.raises(StepError, match="labels") as caught:
        tune(model, image_batch(), target_batch=8)
    assert isinstance(caught.value.__cause__, KeyError)
    assert before.differences(model) == []


def test_candidates_that_cannot_train_are_invalid() -> None:
    """A candidate that fails for another reason than memory is left out; the others are not."""

    class OnlyEven(ConvNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) % 2:
                raise ValueError("odd batch")
            return super().forward(x)

    plan = tune(
        OnlyEven(), image_batch(), target_batch=6, space=SearchSpace(precision="float32", accumulation_steps=[1, 2, 3])
    )
    assert plan.best.candidate.accumulation_steps in (1, 3)
    assert {t.outcome for t in plan.trials if t.candidate.accumulation_steps == 2} <= {"invalid"}


def test_an_interrupt_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a trial ends tune() with KeyboardInterrupt, with everything put back."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, steps=1)
    before = FullState(model, optimizer)

    def interrupt(trial: Trial) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tune(model, image_batch(), target_batch=8, optimizer=optimizer, on_trial=interrupt)
    assert before.differences(model, optimizer) == []


def test_a_lost_device_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: a device-side assert is never taken for memory, and never tried again; the plan so far is attached."""
    calls: list[int] = []
    original = ConvNet.forward

    def forward(self: ConvNet, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if len(x) == 3:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return original(self, x)

    monkeypatch.setattr(ConvNet, "forward", forward)
    with pytest.raises(DeviceLostError, match="device-side assert") as caught:
        tune(
            ConvNet(), image_batch(), target_batch=6, space=SearchSpace(accumulation_steps=[1, 2], precision="float32")
        )
    assert calls.count(3) == 1
    assert caught.value.plan is not None


def test_a_model_in_evaluation_mode_is_tuned_in_training_mode() -> None:
    """Models come from checkpoints in evaluation mode; what is tuned is training, and the mode comes back."""
    model = ConvNet().eval()
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    tune(model, image_batch(), target_batch=4, max_trials=1)
    assert True in modes
    assert not any(module.training for module in model.modules())


def test_frozen_norms_of_a_training_model_stay_frozen() -> None:
    """Where the root trains, submodules keep the mode that their owner gave them."""
    model = ConvNet()
    model.blocks[0][1].eval()
    modes: list[bool] = []
    model.blocks[0][1].register_forward_pre_hook(lambda module, _: modes.append(module.training))
    tune(model, image_batch(), target_batch=4, max_trials=1)
    assert set(modes) == {False}


def test_it_logs_and_never_prints(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Trials go to the logger and to `on_trial`, in the order of the plan; nothing goes to the terminal."""
    trials: list[Trial] = []
    with caplog.at_level(logging.INFO, logger="autofit"):
        plan = tune(ConvNet(), image_batch(), target_batch=4, on_trial=trials.append)
    assert [trial.number for trial in trials] == [trial.number for trial in plan.trials]
    assert any("trial 0" in record.message for record in caplog.records)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == ""


def test_storage_is_resumed(tmp_path: Path) -> None:
    """A second run on the same storage measures nothing again."""
    storage = f"sqlite:///{tmp_path}/study.db"
    options: dict[str, Any] = {"target_batch": 6, "storage": storage, "study_name": "s", "budget": "24MiB"}
    first = tune(ConvNet(), image_batch(), **options)
    new: list[Trial] = []
    second = tune(ConvNet(), image_batch(), on_trial=new.append, **options)
    assert new == []
    assert [t.candidate for t in second.trials] == [t.candidate for t in first.trials]


def test_limits_hold() -> None:
    """C1, C8: no more trials than asked for, and what is returned was tried."""
    plan = tune(ConvNet(), image_batch(), target_batch=16, max_trials=2)
    assert len(plan.trials) <= 2
    assert plan.best in plan.trials
    plan = tune(ConvNet(), image_batch(), target_batch=16, timeout=1e-9)
    assert plan.best.feasible


def test_notes_say_what_was_assumed() -> None:
    """C9: no VRAM to tune on a CPU; which leaves were split, how micro-batches weigh, which blocks there are."""
    plan = tune(ConvNet(), image_batch(), target_batch=4, max_trials=1)
    text = " ".join(plan.notes)
    assert "no VRAM" in text
    assert "dim 0" in text
    assert "recomputed" in text


def test_gradients_may_be_off_where_it_is_called() -> None:
    """It trains all the same, and the mode is the caller's again; under inference_mode nothing can train."""
    arguments: dict[str, Any] = {"target_batch": 8, "device": "cpu", "max_trials": 1}
    model = Wide()
    with torch.no_grad():
        assert autofit.tune(model, vector_batch(), **arguments).best.feasible
        assert not torch.is_grad_enabled()
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
        autofit.tune(model, vector_batch(), **arguments)
    with torch.inference_mode():
        model = Wide()
    with pytest.raises(ConfigError, match="inference_mode"):
        autofit.tune(model, vector_batch(), **arguments)


@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_tuned() -> None:
    """TorchScript, and parameters without a shape: refused by name, with what to do."""
    arguments: dict[str, Any] = {"target_batch": 8, "device": "cpu"}
    with pytest.raises(ConfigError, match="TorchScript"):
        autofit.tune(torch.jit.script(Wide()), vector_batch(), **arguments)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(ConfigError, match=r"0\.weight.*Run one forward"):
        autofit.tune(lazy, vector_batch(), **arguments)


def test_an_optimizer_callable_that_fails() -> None:
    """What it raised is the cause."""
    with pytest.raises(ConfigError, match="optimizer callable failed") as caught:
        autofit.tune(Wide(), vector_batch(), target_batch=8, optimizer=lambda params: 1 / 0, device="cpu")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
