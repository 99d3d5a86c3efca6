"""What tune() is doing at the moment, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autofit.candidate import Candidate

Stage = Literal[
    "checking the model",
    "predicting memory",
    "measuring memory",
    "measuring time",
    "finals",
    "confirming the best",
    "comparing with float32",
    "predicting for the report",
]


@dataclass(frozen=True)
class Progress:
    """The stage that begins now and the candidate that it is about.

    `peak_bytes` is the candidate's peak as far as it is known, measured or only `predicted`; `cap_bytes` what it has to
    fit into.
    """

    stage: Stage
    candidate: Candidate | None = None
    peak_bytes: int | None = None
    predicted: bool = False
    cap_bytes: int | None = None


Tell = Callable[[Progress], None]


def tell_nobody(progress: Progress) -> None:
    """For when nobody is watching."""
