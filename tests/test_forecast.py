"""`forecast()`: a plan of which nothing was measured, and which says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autofit
from autofit.candidate import Candidate, Checkpointing
from autofit.errors import ConfigError, InfeasibleError
from autofit.plan import Plan
from autofit.predict import UntraceableError
from autofit.predict.scratch import CUDA_CONTEXT_BYTES
from autofit.predict.step_predictor import StepPredictor
from autofit.step.blocks import discover_blocks
from tests.models import ConvNet, image_batch

SPACE = autofit.SearchSpace(precision=["float32", "bfloat16"], micro_batch_size=[2, 8, 16, 32])


def forecast(**changes: object) -> Plan:
    """The forecast of a small CNN."""
    arguments: dict[str, object] = {"target_batch": 32, "gpu": "RTX 3060", "space": SPACE, **changes}
    return autofit.forecast(ConvNet(), image_batch(), **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """One with room enough."""
    return forecast()


def test_the_plan_survives_json(plan: Plan) -> None:
    """And has a best trial, the first."""
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.best is plan.trials[0]
    assert [trial.number for trial in plan.trials] == list(range(len(plan.trials)))


def test_nothing_is_called_measured(plan: Plan) -> None:
    """Every trial is a prediction; what only a run can tell is None."""
    assert plan.environment.memory_source.startswith("predicted")
    assert plan.environment.device_name == "RTX 3060"
    assert any("Nothing was run" in note for note in plan.notes)
    for trial in plan.trials:
        assert trial.outcome == "predicted"
        assert trial.predicted_peak_bytes
        assert trial.samples_per_second
        assert trial.message.startswith("predicted: ")
        assert "not measured" in trial.message
        assert trial.peak_reserved_bytes is trial.step_seconds is trial.micro_step_seconds is None


def test_the_plan_says_what_the_memory_is_for(plan: Plan) -> None:
    """The memory of the best step, part by part, and other ways to run it, of the same prediction."""
    assert plan.insight is not None
    assert plan.insight.best is not None
    assert plan.insight.best.candidate == plan.candidate
    assert plan.insight.best.needed_bytes <= plan.cap_bytes
    needed = {other.technique: other.needed_bytes for other in plan.insight.alternatives}
    assert needed["smaller_micro_batch"] < plan.insight.best.needed_bytes


def test_every_candidate_is_there(plan: Plan) -> None:
    """All splits, precisions and modes, the blocks found without running."""
    assert len({trial.candidate for trial in plan.trials}) == 4 * 2 * 2
    assert {len(t.candidate.checkpointing.blocks) for t in plan.trials} == {0, 3}


def test_the_model_is_untouched() -> None:
    """Values, modes, gradients and hooks are those of before; the model may be in evaluation mode."""
    model = ConvNet().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    autofit.forecast(model, image_batch(), target_batch=8, gpu="T4")
    assert not model.training
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_a_model_on_meta_gives_the_same_plan(plan: Plan) -> None:
    """Nothing looks at values."""
    with torch.device("meta"):
        model = ConvNet()
    other = autofit.forecast(model, image_batch(), target_batch=32, gpu="RTX 3060", space=SPACE)
    assert other.trials == plan.trials


def test_a_smaller_budget_takes_smaller_micro_batches_or_recomputes(plan: Plan) -> None:
    """And says of each line what did not fit any more."""
    small = forecast(budget="458MiB")
    assert small.cap_bytes < (plan.best.predicted_peak_bytes or 0)
    assert (small.best.predicted_peak_bytes or 0) <= small.cap_bytes
    shrunk = small.candidate.micro_batch_size < plan.candidate.micro_batch_size
    assert shrunk or small.candidate.checkpointing.mode == "full"
    over = [trial for trial in small.trials if trial.outcome == "over_budget"]
    assert over
    for trial in over:
        assert (trial.predicted_peak_bytes or 0) > small.cap_bytes
        assert trial.message.startswith("predicted to need ")
        assert trial.samples_per_second is None


def test_activations_wait_on_the_host_where_nothing_else_fits() -> None:
    """Unless it is forbidden; where it is asked for it may be chosen in any case."""
    model, batch = ConvNet(width=64), image_batch(4, 64)
    needs = {}
    predictor = StepPredictor(model, batch, gpu="RTX 3060")
    predictor.follow(predictor.observed_blocks(discover_blocks(model)))
    for mode in ("full", "offload"):
        checkpointing = Checkpointing(mode=mode, blocks=("blocks.0", "blocks.1", "blocks.2"))
        candidate = Candidate(micro_batch_size=64, accumulation_steps=1, checkpointing=checkpointing)
        needs[mode] = predictor.needed_bytes(candidate, samples=64)
    assert needs["offload"] < needs["full"]
    options = {"target_batch": 64, "gpu": "RTX 3060"}
    options["budget"] = CUDA_CONTEXT_BYTES + (needs["offload"] + needs["full"]) // 2
    space = {"precision": "float32", "micro_batch_size": 64}
    plan = autofit.forecast(model, batch, space=autofit.SearchSpace(**space), **options)
    assert "offload" in plan.candidate.checkpointing.modes.values()
    assert autofit.forecast(model, batch, space=autofit.SearchSpace(offload=True, **space), **options).best
    with pytest.raises(InfeasibleError):
        autofit.forecast(model, batch, space=autofit.SearchSpace(offload=False, **space), **options)


def test_when_nothing_fits_the_least_need_is_named() -> None:
    """The plan comes along, with trials and without a best."""
    with pytest.raises(InfeasibleError, match="predicted to need") as caught:
        forecast(budget="428MiB")
    assert caught.value.plan is not None
    assert caught.value.plan.best_number is None
    assert caught.value.smallest_peak_bytes == min(t.predicted_peak_bytes or 0 for t in caught.value.plan.trials)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "RTX 4909"}, "RTX 4090"),
        ({"budget": "100MiB"}, "CUDA context alone"),
        ({"target_batch": 0}, "target_batch"),
        ({"gpu": "T4", "space": autofit.SearchSpace(precision="tf32")}, "tf32"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused(changes: dict[str, object], said: str) -> None:
    """With what is allowed."""
    with pytest.raises(ConfigError, match=said):
        forecast(**changes)


def test_a_step_that_needs_values_names_the_operator() -> None:
    """The typed error of a trace."""

    class Unique(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.unique().shape[0]

    with pytest.raises(UntraceableError, match="unique"):
        autofit.forecast(Unique(8, 4), (torch.randn(4, 8), torch.randn(4, 4)), target_batch=8, gpu="T4")


def test_a_line_that_cannot_be_traced_is_left_out_and_said() -> None:
    """Here it is bfloat16; float32 is forecast as ever."""

    class FloatOnly(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out if out.dtype == torch.float32 else out * out.unique().shape[0]

    space = autofit.SearchSpace(precision=["float32", "bfloat16"], checkpointing="none")
    batch = torch.randn(4, 8), torch.randn(4, 4)
    plan = autofit.forecast(FloatOnly(8, 4), batch, target_batch=8, gpu="RTX 3060", space=space)
    assert {trial.candidate.precision for trial in plan.trials} == {"float32"}
    assert any(note.startswith("Not predicted: bfloat16") and "unique" in note for note in plan.notes)
