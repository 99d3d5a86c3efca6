"""Plans for the tests of reports: hand-made, with an insight that adds up."""

from __future__ import annotations

from pathlib import Path

from autofit.candidate import Candidate, Checkpointing
from autofit.insight import Alternative, BlockEffect, Insight, MemoryParts, PhaseStart, StepMemory
from autofit.plan import Plan

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
MIB = 2**20


def load(name: str) -> Plan:
    """One of the hand-made plans beside the golden texts."""
    return Plan.load(GOLDEN / f"{name}.json")


def tied(plan: Plan) -> Plan:
    """The plan with a first trial that is faster than the best by less than the noise, and larger."""
    (first, *others) = plan.trials
    rate, peak = plan.best.samples_per_second or 0, plan.best.peak_reserved_bytes or 0
    faster = first.model_copy(update={"samples_per_second": rate * 1.008, "peak_reserved_bytes": peak + 1})
    return plan.model_copy(update={"trials": (faster, *others)})


def step(candidate: Candidate, *, activations_bytes: int) -> StepMemory:
    """A step whose activations rise to a peak and fall again, over weights of 4 MiB and states of 8 MiB."""
    rising = tuple(activations_bytes * share // 4 for share in (0, 2, 4, 3, 1, 0))
    steady = (1,) * 6
    parts = MemoryParts(
        weights=tuple(4 * MIB * one for one in steady),
        optimizer_states=tuple(8 * MIB * one for one in steady),
        gradients=(0, 0, 0, 2 * MIB, 4 * MIB, 4 * MIB),
        inputs=(MIB, MIB, MIB, MIB, MIB, 0),
        activations=rising,
        temporary=(0, 0, 0, MIB, 0, MIB),
    )
    starts = [
        PhaseStart(at=0, phase="forward"),
        PhaseStart(at=3, phase="backward"),
        PhaseStart(at=5, phase="optimizer"),
    ]
    peak = max(parts.totals())
    return StepMemory(candidate=candidate, needed_bytes=peak + 3 * MIB, phases=tuple(starts), parts=parts)


def seen(name: str = "cpu") -> Plan:
    """A plan with predictions of its best step, of the naive one, of two blocks and of other ways to run it."""
    plan = load(name)
    best = plan.candidate
    naive = Candidate(micro_batch_size=plan.target_batch, accumulation_steps=1)
    every = Checkpointing(mode="full", blocks=("layers.0", "layers.1"))
    insight = Insight(
        best=step(best, activations_bytes=40 * MIB),
        naive=step(naive, activations_bytes=900 * MIB),
        blocks=(
            BlockEffect(name="layers.0", mode="none", saves_bytes=9 * MIB, costs_share=0.1),
            BlockEffect(name="layers.1", mode="none", saves_bytes=-1024, costs_share=0.125),
        ),
        alternatives=(
            Alternative(technique="larger_micro_batch", candidate=naive, needed_bytes=916 * MIB),
            Alternative(
                technique="full_checkpointing",
                candidate=best.model_copy(update={"checkpointing": every}),
                needed_bytes=30 * MIB,
            ),
            Alternative(
                technique="bfloat16", candidate=best.model_copy(update={"precision": "bfloat16"}), needed_bytes=40 * MIB
            ),
        ),
    )
    return plan.model_copy(update={"insight": insight})
