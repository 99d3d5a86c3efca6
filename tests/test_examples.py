"""Every example runs as a script and shows what it says it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.units import parse_bytes

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    """What the example prints; it must end well."""
    # One thread: waiting threads of several test processes take each other's cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def losses(output: str) -> list[float]:
    """The losses of the training steps, in order."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", output, flags=re.MULTILINE)]


def sizes(text: str) -> list[int]:
    """The sizes in a text, in bytes."""
    return [parse_bytes(size) for size in re.findall(r"[\d.]+ [KMG]iB", text)]


def test_cifar_cnn_trains_in_half_the_memory() -> None:
    """The plan's peak is inside the budget, which is half of the plain step's, and the loss falls.

    Recomputing takes less memory than the plain step, and lets more samples into it.
    """
    output = run("cifar_cnn.py", "--target-batch", "64", "--steps", "8")
    lines = {line.split()[0]: line for line in output.splitlines() if line}
    before, after, budget = (sizes(lines[name])[0] for name in ("before", "after", "allowed"))
    plain, full = (sizes(lines[mode])[0] for mode in ("none", "full"))
    assert full < plain == before
    most = {mode: int(re.findall(r"up to (\d+) samples", lines[mode])[0]) for mode in ("none", "full")}
    assert most["full"] > most["none"]
    assert after <= budget <= before / 2 * 1.01
    assert losses(output)[-1] < losses(output)[0]


def test_linear_stack_trains_in_a_third_of_the_memory() -> None:
    """Checkpointing or accumulation fits the same batch, and the loss falls."""
    output = run("linear_stack.py", "--target-batch", "2048", "--steps", "6")
    (summary,) = [line for line in output.splitlines() if " before, " in line]
    before, after = sizes(summary)
    assert after <= before / 3
    assert losses(output)[-1] < losses(output)[0]


def test_bert_classifier_trains_within_its_budget() -> None:
    """Dict batches, the model's own loss, an optimizer that exists."""
    pytest.importorskip("transformers")
    output = run("bert_classifier.py", "--target-batch", "16", "--steps", "8", "--budget", "16MiB")
    peak, budget = sizes(output.splitlines()[0])
    assert peak <= budget
    assert losses(output)[-1] < losses(output)[0]


def test_preflight_tunes_once_and_reuses_the_plan(tmp_path: Path) -> None:
    """The second run finds that the file of the first one holds, and trains alike; what differs is said."""
    path = tmp_path / "plan.json"
    first = run("preflight.py", "--plan", str(path), "--steps", "4")
    written = path.read_bytes()
    second = run("preflight.py", "--plan", str(path), "--steps", "4")
    assert first.startswith("tuned")
    assert second.startswith("reusing")
    assert path.read_bytes() == written
    assert Plan.load(path).target_batch == 256
    assert losses(first) == losses(second)
    assert losses(first)[-1] < losses(first)[0]
    third = run("preflight.py", "--plan", str(path), "--steps", "1", "--budget", "16MiB")
    assert re.search(r"budget: plan has .*, here is 16.0 MiB", third)
    assert "reusing" in third


@pytest.mark.skipif(find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_hf_trainer_trains_within_its_budget() -> None:
    """The Trainer's own loop and loss, with the plan's arguments."""
    output = run("hf_trainer.py", "--target-batch", "16", "--steps", "10", "--budget", "16MiB")
    peak, budget = sizes(output.splitlines()[0])
    assert peak <= budget
    assert len(losses(output)) == 10
    assert losses(output)[-1] < losses(output)[0]


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_images_trains_within_its_budget() -> None:
    """A callback is all that is added; as many optimizer steps as the loader has batches."""
    output = run("lightning_images.py", "--budget", "8MiB")
    peak, budget = sizes(output.splitlines()[-1])
    assert peak <= budget
    assert "step 12: loss" in output
    assert losses(output)[-1] < losses(output)[0]


def test_longer_batch_trains_on() -> None:
    """Every long batch is trained in smaller micro-batches, the short ones in the plan's, and no step is lost."""
    output = run("longer_batch.py")
    steps = re.findall(r"length (\d+), micro-batches \(([\d, ]+)\)", output)
    split = [(int(length), [int(size) for size in parts.split(",") if size.strip()]) for length, parts in steps]
    assert [length for length, _ in split] == [64, 64, 128, 64] * 3
    assert all(sum(parts) == 16 for _, parts in split)
    assert {max(parts) for length, parts in split if length == 64} == {16}
    assert all(max(parts) < 16 for length, parts in split if length == 128)
    assert re.search(r"ran out of memory [1-9]\d* times, lost no step", output)
    assert losses(output)[-1] < losses(output)[0]


def test_every_example_is_run_here() -> None:
    """A new example comes with its test."""
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
