"""The traces of one subject, each made once: what shares a trace gets the same one."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cached_property

from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.predict.calibration import learn_scratch
from autofit.predict.line import SIZES
from autofit.predict.recorder import Trace
from autofit.predict.scratch import Learned, OperatorKey
from autofit.predict.tracing import Subject, trace_step
from autofit.predict.work import Work, WorkLog
from autofit.step.checkpointing import fills_cache

logger = logging.getLogger(__name__)


def shared_precision(precision: Precision) -> Precision:
    """The precision whose traces this one shares: TF32 keeps what float32 keeps."""
    return "float32" if precision == "tf32" else precision


_Key = tuple[Precision, Checkpointing, int, bool]


@dataclass(frozen=True)
class Traced:
    """A step that accumulates over two micro-batches: what it does to memory, and its operators."""

    trace: Trace
    log: WorkLog

    @cached_property
    def work(self) -> Work:
        """The operators of what all micro-steps and optimizer steps but the first are like."""
        return self.log.work(self.trace)


class Traces:
    """Traces by precision, checkpointing and micro-batch size. `blocks` may be followed.

    With `calibrate` two small micro-steps of each precision and checkpointing run for real before the first trace.
    `seconds` is how long the slowest trace so far took.
    """

    def __init__(self, subject: Subject, *, calibrate: bool = False) -> None:
        self.subject = subject
        self._calibrate = calibrate
        self._learned: dict[OperatorKey, int] = {}
        self._calibrated: set[tuple[Precision, Checkpointing]] = set()
        self.blocks: tuple[str, ...] = ()
        self._made: dict[_Key, Traced] = {}
        self.seconds = 0.0

    def step(
        self, precision: Precision, checkpointing: Checkpointing, samples: int, *, followed: bool = False
    ) -> Traced:
        """A step with micro-batches of `samples`; `followed`, its trace says which of `blocks` runs when."""
        precision = shared_precision(precision)
        followed = self._is_followed(checkpointing, asked=followed)
        key = precision, checkpointing, samples, followed
        if key not in self._made:
            candidate = Candidate(
                micro_batch_size=samples, accumulation_steps=2, precision=precision, checkpointing=checkpointing
            )
            logger.info("tracing %s without values, with %d samples", candidate, samples)
            log, began = WorkLog(self.subject.device), time.perf_counter()
            trace = trace_step(
                self.subject,
                candidate,
                watch=log,
                blocks=self.blocks if followed else (),
                learned=self._learn(candidate),
            )
            self._made[key] = Traced(trace, log)
            self.seconds = max(self.seconds, time.perf_counter() - began)
        return self._made[key]

    def _learn(self, candidate: Candidate) -> Learned | None:
        """What operators take inside, with the sizes that lines are traced at."""
        if not self._calibrate:
            return None
        if (kind := (candidate.precision, candidate.checkpointing)) not in self._calibrated:
            self._learned.update(learn_scratch(self.subject, candidate, SIZES))
            self._calibrated.add(kind)
        return self._learned

    def made(self, precision: Precision, checkpointing: Checkpointing) -> dict[int, Traced]:
        """The traces there are already, by micro-batch size."""
        wanted = shared_precision(precision), checkpointing
        return {samples: traced for (*kind, samples, _), traced in self._made.items() if tuple(kind) == wanted}

    def _is_followed(self, checkpointing: Checkpointing, *, asked: bool) -> bool:
        """To follow the blocks changes nothing, except that a model which fills a cache in training no longer does."""
        modes = checkpointing.modes
        if not self.blocks or not set(modes) <= set(self.blocks):
            return False
        return asked or bool(modes) or not fills_cache(self.subject.model)
