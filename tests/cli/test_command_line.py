"""The command line's contract: streams, exit codes, options."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from autofit.candidate import Precision, RecomputingMode, SearchSpace
from autofit.cli.defaults import CheckpointingName, OptimizerName, PrecisionName
from autofit.errors import AutofitError, ConfigError, DeviceLostError, InfeasibleError, StepError
from autofit.plan import Plan

PLANS = Path(__file__).parents[1] / "report" / "golden"
TINY = ("--model", "squeezenet1_1", "--image-size", "32")


def test_the_plan_goes_to_stdout_and_progress_to_stderr(run: Callable[..., Any], fake: Any) -> None:
    """A pipe behind the command sees the report only."""
    finished = run(*TINY, "--target-batch", "32")
    assert finished.code == 0, finished.err
    assert "* 1  16 × 2" in finished.out
    assert not any(line.endswith(" ") for line in finished.out.splitlines())
    assert "Its peak is 80.0 MiB, 20% of the budget of 400.0 MiB." in finished.out
    lines = finished.err.splitlines()
    assert lines[0] == (
        "autofit: squeezenet1_1 (3 × 32 × 32 images, 1000 classes) on cpu, 32 samples per optimizer step"
    )
    assert lines[1:3] == ["autofit: checking the model", "autofit: predicting memory"]
    assert [line.split()[0] for line in lines[3:]] == ["0", "1", "2"]
    assert lines[4] == "   1  16 × 2     float32   none       80.0 MiB     647 samples/s  feasible"


def test_json_is_one_document_even_when_the_model_prints(run: Callable[..., Any], fake: Any) -> None:
    """What user code prints while it is tuned goes to stderr."""
    fake.during = lambda: print("a print of the model")
    finished = run(*TINY, "--json")
    assert Plan.from_json(finished.out).best_number == 1
    assert json.loads(finished.out)["schema_version"] == 1
    assert "a print of the model" in finished.err


@pytest.mark.parametrize("command", [(), ("tune",)])
def test_tune_is_the_default_command(run: Callable[..., Any], fake: Any, command: tuple[str, ...]) -> None:
    """`tune` may be written or left out."""
    assert run(*command, *TINY).code == 0
    assert len(fake.calls) == 1


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_default_target_batch_is_stated(run: Callable[..., Any], fake: Any, device: str | None) -> None:
    """Left out, it is 32 on the CPU, and the report and the JSON say so."""
    if torch.accelerator.is_available():
        pytest.skip("the default device here is an accelerator")
    chosen = () if device is None else ("--device", device)
    note = "--target-batch was left out: 32, the default on the CPU."
    assert note in run(*TINY, *chosen).out
    assert fake.call["target_batch"] == 32
    assert note in json.loads(run(*TINY, *chosen, "--json").out)["notes"]


def test_a_given_target_batch_needs_no_note(run: Callable[..., Any], fake: Any) -> None:
    """Nothing was assumed, so nothing is said."""
    assert "left out" not in run(*TINY, "--target-batch", "7").out
    assert fake.call["target_batch"] == 7


def test_options_reach_tune(run: Callable[..., Any], fake: Any) -> None:
    """Every option arrives under tune's own name; the repeatable ones become the search space."""
    finished = run(
        *TINY, "--target-batch", "12", "--budget", "2GiB", "--device", "cpu", "--precision", "float32",
        "--precision", "BFLOAT16", "--checkpointing", "none", "--micro-batch-size", "4", "--micro-batch-size", "2",
        "--max-trials", "3", "--timeout", "9.5", "--seed", "5", "--storage", "sqlite:///s.db", "--study-name", "mine",
        "--cache", "plans",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    expected = {"target_batch": 12, "budget": "2GiB", "device": torch.device("cpu"), "max_trials": 3, "timeout": 9.5}
    expected |= {"seed": 5, "storage": "sqlite:///s.db", "study_name": "mine", "optimizer": None}
    expected |= {"cache": Path("plans")}
    assert expected.items() <= fake.call.items()
    assert fake.call["space"] == SearchSpace(
        precision=["float32", "bfloat16"], checkpointing=["none"], micro_batch_size=[2, 4]
    )


def test_left_out_options_are_left_to_tune(run: Callable[..., Any], fake: Any) -> None:
    """The command line adds no defaults of its own besides the batch, the device and the seed."""
    run(*TINY)
    absent = ("budget", "space", "optimizer", "max_trials", "timeout", "storage", "study_name", "cache", "loss_fn")
    assert {name: fake.call[name] for name in absent} == dict.fromkeys(absent)
    assert fake.call["seed"] == 0


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_named_optimizer_can_be_made_and_steps(run: Callable[..., Any], fake: Any, name: OptimizerName) -> None:
    """The names are classes of torch.optim that work with an ordinary parameter."""
    assert run(*TINY, "--optimizer", name.upper()).code == 0
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    made = fake.call["optimizer"]([parameter])
    made.step()
    assert type(made).__name__.lower() == name
    assert bool((parameter != 1).any())


def test_sgd_has_momentum(run: Callable[..., Any], fake: Any) -> None:
    """Its state costs memory, so the plan is made with it."""
    run(*TINY, "--optimizer", "sgd")
    assert fake.call["optimizer"]([torch.nn.Parameter(torch.ones(1))]).defaults["momentum"] == 0.9


def test_the_option_names_are_those_of_the_library() -> None:
    """The parser's own lists do not lag behind the types."""
    assert tuple(PrecisionName) == get_args(Precision)
    assert tuple(CheckpointingName) == get_args(RecomputingMode)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing option '--model'"),
        (("--model",), "requires an argument"),
        ((*TINY, "--targetbatch", "3"), "No such option"),
        ((*TINY, "--target-batch", "0"), "--target-batch"),
        ((*TINY, "--target-batch", "many"), "--target-batch"),
        ((*TINY, "--precision", "int8"), "bfloat16"),
        ((*TINY, "--checkpointing", "some"), "none"),
        ((*TINY, "--optimizer", "lion"), "adamw"),
        ((*TINY, "--budget", "8 apples"), "not a size in bytes"),
        ((*TINY, "--budget", "0"), "must be positive"),
        ((*TINY, "--out", "no/such/folder/plan.json"), "existing folder"),
        ((*TINY, "--out", "."), "existing folder"),
        (("tunes", *TINY), "No such command"),
    ],
)
def test_wrong_usage_exits_2_and_helps(
    run: Callable[..., Any], fake: Any, arguments: tuple[str, ...], said: str
) -> None:
    """A helpful line on stderr, nothing on stdout, nothing run."""
    finished = run(*arguments)
    assert finished.code == 2
    assert said in " ".join(finished.err.replace("│", " ").split())
    assert finished.out == ""
    assert fake.calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("the batch has no samples"), 1),
        (StepError("the loss failed"), 1),
        (DeviceLostError("the context is gone"), 1),
        (AutofitError("anything else"), 1),
        (InfeasibleError("nothing fits into 64 MiB"), 3),
    ],
)
def test_errors_are_one_message_without_a_traceback(
    run: Callable[..., Any], fake: Any, error: AutofitError, code: int
) -> None:
    """Exit 1, or 3 when nothing fits; the message stands on stderr once."""
    fake.answer = error
    finished = run(*TINY)
    assert finished.code == code
    assert finished.err.splitlines()[-1] == f"autofit: {error}"
    assert "Traceback" not in finished.err
    assert finished.out == ""


def test_bugs_keep_their_traceback(fake: Any) -> None:
    """An error that is not autofit's is not dressed up as one."""
    from autofit.cli.app import main

    fake.answer = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(TINY)


def test_ctrl_c_exits_130_with_what_was_found(run: Callable[..., Any], fake: Any) -> None:
    """The progress so far, and the best of it, are on stderr; nothing is on stdout."""
    fake.answer = KeyboardInterrupt()
    finished = run(*TINY)
    assert finished.code == 130
    assert finished.out == ""
    assert "Traceback" not in finished.err
    assert "interrupted after" in finished.err.splitlines()[-1]
    assert "the fastest so far: " in finished.err.splitlines()[-1]


@pytest.mark.parametrize("as_json", [False, True])
def test_when_nothing_fits_the_trials_are_shown_and_nothing_is_saved(
    run: Callable[..., Any], fake: Any, tmp_path: Path, as_json: bool
) -> None:
    """Exit 3, the table or the JSON of what was tried on stdout, the reason on stderr, no plan file."""
    plan = Plan.load(PLANS / "nothing_fits.json")
    fake.answer = InfeasibleError("nothing fits", plan=plan)
    out = tmp_path / "plan.json"
    finished = run(*TINY, "--out", str(out), *(["--json"] if as_json else []))
    assert finished.code == 3
    assert (Plan.from_json(finished.out) == plan) if as_json else ("out of memory" in finished.out)
    assert "nothing fits" in finished.err
    assert not out.exists()


def test_a_lost_device_still_gives_the_best_plan_so_far(run: Callable[..., Any], fake: Any, tmp_path: Path) -> None:
    """Exit 1, but what was found is printed and saved."""
    fake.answer = DeviceLostError("gone", plan=Plan.load(PLANS / "cpu.json"))
    out = tmp_path / "plan.json"
    finished = run(*TINY, "--out", str(out))
    assert finished.code == 1
    assert "* 1  16 × 2" in finished.out
    assert Plan.load(out).best_number == 1


def test_out_saves_the_plan_that_was_printed(run: Callable[..., Any], fake: Any, tmp_path: Path) -> None:
    """The file and the JSON on stdout are one document; the report's snippet loads the file."""
    out = tmp_path / "plan.json"
    printed = run(*TINY, "--json", "--out", str(out)).out
    assert out.read_text(encoding="utf-8") == printed
    report = run(*TINY, "--out", str(out)).out
    assert "plan.json" in report.replace("\n", "")
    assert "saved with" not in report


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_a_plan_that_cannot_be_saved_is_still_printed(
    run: Callable[..., Any], fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of trials are not lost to a full disk."""

    def full(self: Plan, path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Plan, "save", full)
    finished = run(*TINY, "--out", str(tmp_path / "plan.json"))
    assert finished.code == 1
    assert "* 1  16 × 2" in finished.out
    assert "cannot be written to" in finished.err
    assert "No space left on device" in finished.err


def test_a_device_that_is_not_there_is_an_error(run: Callable[..., Any], fake: Any) -> None:
    """Exit 1 before anything runs, naming what is there."""
    finished = run(*TINY, "--device", "hpu:7")
    assert finished.code == 1
    assert "'cpu'" in finished.err
    assert fake.calls == []


def test_the_seed_decides_weights_and_batch(run: Callable[..., Any], fake: Any) -> None:
    """The same seed gives the same model and batch, another seed another one."""
    for seed in ("3", "3", "4"):
        run(*TINY, "--seed", seed)
    first, second, third = fake.calls
    assert torch.equal(first["sample_batch"][0], second["sample_batch"][0])
    assert not torch.equal(first["sample_batch"][0], third["sample_batch"][0])
    weights = [next(call["model"].parameters()) for call in fake.calls]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_optimizer_argument_survives_pickling(run: Callable[..., Any], fake: Any) -> None:
    """A worker process can be sent it."""
    run(*TINY, "--optimizer", "adam")
    assert isinstance(pickle.loads(pickle.dumps(fake.call["optimizer"])), partial)
