"""Input that nobody thought of: batches, budgets, spaces, plans and command lines. Typed errors only, and no hang."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autofit
from autofit.batch import infer_layout
from autofit.candidate import SearchSpace
from autofit.errors import AutofitError, ConfigError
from autofit.plan import Plan
from autofit.units import parse_budget
from tests.faults import tally

GOLDEN = sorted((Path(__file__).parents[1] / "report" / "golden").glob("*.json"))
FEW, MANY = 60, 3000
NO_DEADLINE = {"deadline": None, "suppress_health_check": list(HealthCheck)}

texts = st.text(max_size=12)
numbers = st.one_of(st.integers(), st.floats(), st.booleans())
scalars = st.one_of(st.none(), numbers, texts, st.binary(max_size=4))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4), st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of few elements, of any layout that people pass."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]))
    tensor = torch.zeros(shape, dtype=dtype)
    kind = draw(st.sampled_from(["plain", "sparse", "meta", "expanded", "transposed", "gradient"]))
    if kind == "sparse":
        return tensor.to_sparse() if shape else tensor
    if kind == "meta":
        return tensor.to("meta")
    if kind == "expanded" and shape:
        return tensor[:1].expand(3, *shape[1:]) if shape[0] else tensor
    if kind == "gradient" and dtype.is_floating_point:
        return tensor.requires_grad_()
    return tensor.transpose(0, -1) if kind == "transposed" and shape else tensor


batches = st.recursive(
    st.one_of(tensors(), scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@contextmanager
def typed_errors(kind: str) -> Iterator[None]:
    """Counts an input; anything but an error of autofit's own fails the test."""
    tally.FUZZED[kind] += 1
    try:
        yield
    except AutofitError as refusal:
        said = str(refusal)
    else:
        return
    assert said.strip()


def batch_is_split_or_refused(batch: Any, batch_dims: Any) -> None:
    with typed_errors("batches"):
        layout = infer_layout(batch, batch_dims=batch_dims)
        assert layout.samples >= 1
        for samples in (1, 3):
            assert infer_layout(batch, batch_dims=batch_dims).samples_in(layout.resize(batch, samples)) == samples


def budget_is_bytes_or_refused(budget: Any) -> None:
    with typed_errors("budgets"):
        assert 0 < parse_budget(budget, total_bytes=2**34) <= 2**34


def space_is_valid_or_refused(values: dict[str, Any], samples: int) -> None:
    with typed_errors("spaces"):
        space = SearchSpace(**values)
        assert all(size * steps >= samples for size, steps in space.splits(samples))
        assert sorted(space.splits(samples)) == sorted(_splits_one_by_one(space, samples))


def _splits_one_by_one(space: SearchSpace, samples: int) -> set[tuple[int, int]]:
    """The same by trying every size: each allowed one takes the fewest steps that it can."""
    sizes = space.micro_batch_size or range(1, samples + 1)
    counts = set(space.accumulation_steps or ())
    if not counts:
        even = [n for n in range(1, samples + 1) if samples % n == 0 or not space.even_split]
        counts = {next(n for n in even if n * size >= samples) for size in sizes}
    found = {(-(-samples // count), count) for count in counts if count <= samples}
    if space.even_split:
        found = {(size, count) for size, count in found if samples % count == 0}
    bounds = min(space.micro_batch_size or (1,)), max(space.micro_batch_size or (samples,))
    return {s for s in found if not space.accumulation_steps or bounds[0] <= s[0] <= bounds[1]}


def plan_is_read_or_refused(text: str | bytes) -> None:
    with typed_errors("plans"):
        plan = Plan.from_json(text)
        assert Plan.from_json(plan.to_json()) == plan


def call_is_refused(arguments: dict[str, Any]) -> None:
    with typed_errors("calls"):
        autofit.tune(**{"model": torch.nn.Linear(2, 2), "sample_batch": (torch.zeros(2, 2),), **arguments})


spaces = st.dictionaries(
    st.sampled_from([*SearchSpace.model_fields, "unknown"]),
    st.one_of(
        anything,
        st.lists(st.sampled_from(["float32", "bfloat16", "tf32", "none", "full", "selective"]), max_size=3),
        st.lists(st.integers(-2, 20), max_size=4),
        st.tuples(st.integers(-2, 20), st.integers(-2, 20)),
    ),
    max_size=4,
)
# What comes to tune() and can only be refused: none of it gets as far as a trial.
calls = st.one_of(
    st.fixed_dictionaries({"model": anything, "target_batch": st.just(2)}),
    st.fixed_dictionaries({"target_batch": st.one_of(st.none(), st.floats(), texts, st.integers(max_value=0))}),
    st.fixed_dictionaries({"target_batch": st.just(2), "device": st.one_of(texts.filter(bool), st.integers(1, 9))}),
    st.fixed_dictionaries({"target_batch": st.just(2), "max_trials": st.one_of(texts, st.floats(), st.just(0))}),
    st.fixed_dictionaries({"target_batch": st.just(2), "timeout": st.one_of(texts, st.floats(max_value=0))}),
    st.fixed_dictionaries({"target_batch": st.just(2), "space": st.one_of(texts, st.integers())}),
    st.fixed_dictionaries({"target_batch": st.just(2), "budget": st.one_of(texts, st.floats(max_value=0))}),
)


@st.composite
def spoilt_plans(draw: st.DrawFn) -> str | bytes:
    """A plan of which some values were replaced, removed, renamed, or the text cut."""
    document = json.loads(draw(st.sampled_from(GOLDEN)).read_bytes())
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while isinstance(place, (dict, list)) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or draw(st.booleans()):
                _spoil(draw, place, key)
                break
            place = inner
    text = json.dumps(document)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def _spoil(draw: st.DrawFn, place: Any, key: Any) -> None:
    what = draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "remove":
        del place[key]
    elif what == "add" and isinstance(place, dict):
        place[draw(texts)] = draw(scalars.filter(lambda value: not isinstance(value, bytes)))
    else:
        place[key] = draw(st.one_of(st.none(), numbers, texts, st.lists(st.integers(), max_size=2), st.just({})))


OPTIONS = (
    "--model", "--target-batch", "--budget", "--device", "--precision", "--checkpointing", "--optimizer", "--json",
    "--max-trials", "--timeout", "--seed", "--out", "--image-size", "--micro-batch-size", "--study-name", "-x", "--",
)  # fmt: skip
COMMANDS = ("tune", "predict", "check", "report")
values = st.one_of(texts, st.integers().map(str), st.sampled_from(["8GiB", "cpu", "float32", "none", "nan", "inf", ""]))
# Without a model that exists, so that nothing is tuned.
command_lines = st.lists(st.one_of(st.sampled_from([*OPTIONS, *COMMANDS]), values), max_size=6)


def command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from autofit.cli.app import main

    tally.FUZZED["command lines"] += 1
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code in (0, 1, 2, 3)
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    assert caught.value.code == 0 or output.err.strip()


FUZZED: dict[str, tuple[Any, Any, int]] = {
    "batches": (st.tuples(batches, st.one_of(st.none(), st.none(), anything)), batch_is_split_or_refused, 3),
    "budgets": (
        st.tuples(st.one_of(anything, st.from_regex(r"\A-?[0-9]{0,40}\.?[0-9]{1,3} ?[KMGTkmgt]?i?[Bb]?%?\Z"))),
        budget_is_bytes_or_refused,
        5,
    ),
    "spaces": (st.tuples(spaces, st.integers(1, 40)), space_is_valid_or_refused, 3),
    "plans": (
        st.tuples(st.one_of(spoilt_plans(), texts, st.binary(max_size=20), anything.map(repr))),
        plan_is_read_or_refused,
        3,
    ),
    "calls": (st.tuples(calls), call_is_refused, 1),
}


def fuzz(kind: str, examples: int) -> None:
    """Runs the check of this kind on so many inputs."""
    strategy, check, _ = FUZZED[kind]

    @settings(max_examples=examples, database=None, **NO_DEADLINE)
    @given(strategy)
    def run(arguments: tuple[Any, ...]) -> None:
        check(*arguments)

    run()


@pytest.mark.parametrize("kind", FUZZED)
def test_typed_errors_only(kind: str) -> None:
    """Understood as what it says, or refused."""
    fuzz(kind, FEW * FUZZED[kind][2])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", FUZZED)
def test_typed_errors_only_and_long(kind: str) -> None:
    """The same on many more inputs."""
    fuzz(kind, MANY)


def test_command_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message and an exit status, never a traceback."""
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=FEW, database=None, **NO_DEADLINE)
    @given(command_lines)
    def run(arguments: list[str]) -> None:
        command_line_is_refused(arguments, capsys)

    run()


@pytest.mark.parametrize("values", [itertools.count(1), range(1, 10**12), [1] * 10**6], ids=["endless", "huge", "many"])
def test_endless_collections_end(values: Any) -> None:
    """What has no end is refused before it takes the memory."""
    with pytest.raises(ConfigError, match="more than 65536 values"):
        SearchSpace(micro_batch_size=values)


def test_huge_targets_end() -> None:
    """Splits of many samples are enumerated at once; of more than anybody means, refused."""
    assert len(SearchSpace().splits(2**24)) < 2**14
    assert SearchSpace(even_split=True).splits(2**24)[-1] == (2**24, 1)
    with pytest.raises(ConfigError, match="at most 16777216"):
        SearchSpace().splits(10**15)


def test_what_is_refused_is_a_config_error() -> None:
    """The check of the checks: what these tests let pass is not everything."""
    with pytest.raises(ConfigError):
        parse_budget("many", total_bytes=1)
    with pytest.raises(AssertionError), typed_errors("budgets"):
        raise AssertionError
