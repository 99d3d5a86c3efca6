"""A device made of two functions, for searches that take milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from autofit.candidate import Candidate, Checkpointing, Precision, SearchSpace
from autofit.plan import Trial
from autofit.units import GiB, MiB

BATCH = 512


def space(
    *, batch: int = BATCH, precisions: Sequence[Precision] = ("float32", "bfloat16"), modes: Iterable[str] = ("none",)
) -> list[Candidate]:
    """Every split of `batch` in every precision and checkpointing mode."""
    return [
        Candidate(
            micro_batch_size=size,
            accumulation_steps=steps,
            precision=precision,
            checkpointing=Checkpointing.model_validate({"mode": mode}),
        )
        for precision in precisions
        for mode in modes
        for size, steps in SearchSpace().splits(batch)
    ]


def affine_bytes(candidate: Candidate) -> int:
    """2 GiB and 100 MiB per sample; half of that in 16 bits, a quarter when recomputing."""
    per_sample = 100 * MiB
    if candidate.precision in ("bfloat16", "float16"):
        per_sample //= 2
    if candidate.checkpointing.mode == "full":
        per_sample //= 4
    return 2 * GiB + per_sample * candidate.micro_batch_size


def affine_seconds(candidate: Candidate) -> float:
    """10 ms overhead per micro-step, 3 ms per sample; faster in 16 bits, a third slower when recomputing."""
    per_sample = 0.001 if candidate.precision in ("bfloat16", "float16") else 0.003
    if candidate.checkpointing.mode == "full":
        per_sample *= 4 / 3
    return candidate.accumulation_steps * (0.010 + per_sample * candidate.micro_batch_size) + 0.010


@dataclass
class Device:
    """`evaluate` runs out of memory where `bytes_of` passes `cap_bytes`; `calls` are the candidates it was given."""

    cap_bytes: int = 1000 * GiB
    bytes_of: Callable[[Candidate], int] = affine_bytes
    seconds_of: Callable[[Candidate], float] = affine_seconds
    calls: list[Candidate] = field(default_factory=list)

    def evaluate(self, candidate: Candidate) -> Trial:
        """One trial; its number is nonsense on purpose."""
        self.calls.append(candidate)
        if self.bytes_of(candidate) > self.cap_bytes:
            return ran_out(candidate, reached=self.cap_bytes)
        return fitted(candidate, seconds=self.seconds_of(candidate), peak=self.bytes_of(candidate))

    def fastest(self, candidates: Iterable[Candidate]) -> Candidate:
        """The exhaustive optimum."""
        return min((c for c in candidates if self.bytes_of(c) <= self.cap_bytes), key=self.seconds_of)


def fitted(candidate: Candidate, *, seconds: float, peak: int | None = GiB, samples: int = BATCH) -> Trial:
    """A feasible trial."""
    return Trial(
        number=-1,
        candidate=candidate,
        outcome="feasible",
        peak_reserved_bytes=peak,
        samples_per_second=samples / seconds,
    )


def ran_out(candidate: Candidate, *, reached: int | None = None) -> Trial:
    """A trial that ran out of memory."""
    return Trial(number=-1, candidate=candidate, outcome="out_of_memory", peak_reserved_bytes=reached)
