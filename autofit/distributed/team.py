"""The ranks as a team: rank 0 decides what is tried, all of them try it at once, and one that fails fails for all.

Rank 0 runs the tuning and asks for each piece of work with `Team.run`. The others `follow`: they do the same work on
their own model, batch and device until rank 0 has a result, which becomes theirs.
"""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from autofit.distributed.channel import LOOK_SECONDS, Channel
from autofit.distributed.group import is_grouped, new_group
from autofit.errors import AutofitError, RankLostError
from autofit.oom import Failure, describe_error, guarded, tracebacks_to_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[..., T]


@dataclass(frozen=True)
class Report(Generic[T]):
    """What one rank says of a piece of work; `order` is its place among those that failed, 0 where it did not."""

    value: T | None
    failure: Failure | None
    order: int


class _OthersFailedError(Exception):
    """Another rank failed, so this one need not go on."""


class Team:
    """One process on its own: what it asks for it does, and nobody has to be asked.

    `group` is the process group for the collectives of trials; None means the default one.
    """

    rank = 0
    size = 1
    group: dist.ProcessGroup | None = None

    def run(self, work: Work[T], subject: Any, *arguments: Any, recover: Callable[[], None]) -> list[Report[T]]:
        """`work(subject, *arguments)` on all ranks, and what each says of it; then `recover()` on each.

        On other ranks the subject is theirs. `work` is a function of a module, for it travels by name. What it returns
        must be picklable, unless it is wrapped in `Kept`, which only this rank gets.
        """
        value, failure = guarded(lambda: work(subject, *arguments))
        recover()
        return [Report(value, failure, int(failure is not None))]

    def guarded(self, run: Callable[[], T]) -> tuple[T, None] | tuple[None, Failure]:
        """As `autofit.oom.guarded`, inside of work: a failure stops the others, which may be waiting for this rank."""
        return guarded(run)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks, inside of work."""
        return list(values)

    def gather(self, value: T) -> list[T]:
        """A picklable value of every rank, outside of work and by all of them."""
        return [value]

    def lead(self, subject: Any, tuning: Callable[[], T], *, recover: Callable[[], None]) -> T:
        """The result of `tuning`, which only rank 0 runs; an error of it is raised on all ranks."""
        return tuning()


@dataclass(frozen=True)
class Kept(Generic[T]):
    """A value that stays with the rank that made it."""

    value: T

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (None,)


class _Together(Team):
    """The ranks of the default process group."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.size = channel.rank, channel.size
        self._timeout = channel.timeout
        self._number = 0  # of the piece of work
        self._began = 0.0
        self._order = 0
        self._agreements = 0
        self._gathered = 0
        self._lock = threading.Lock()
        self.group = self._new_group()

    def run(self, work: Work[T], subject: Any, *arguments: Any, recover: Callable[[], None]) -> list[Report[T]]:
        self._channel.put(f"work/{self._number + 1}", pickle.dumps((work, arguments)))
        return self._do(work, subject, arguments, recover)

    def lead(self, subject: Any, tuning: Callable[[], T], *, recover: Callable[[], None]) -> T:
        if self.rank != 0:
            return cast(T, self._follow(subject, recover))
        try:
            result = tuning()
        except RankLostError:
            raise
        except Exception as error:
            self._channel.put(f"work/{self._number + 1}", pickle.dumps(_portable(error)))
            raise
        self._channel.put(f"work/{self._number + 1}", pickle.dumps(_Result(result)))
        return result

    def _follow(self, subject: Any, recover: Callable[[], None]) -> Any:
        while True:
            name = f"work/{self._number + 1}"
            order = pickle.loads(self._channel.take(name, source=0, what="what to try next"))
            if isinstance(order, _Result):
                return order.value
            if isinstance(order, Exception):
                raise order
            work, arguments = order
            self._do(work, subject, arguments, recover)

    def _do(self, work: Work[T], subject: Any, arguments: Any, recover: Callable[[], None]) -> list[Report[T]]:
        """One piece of work, as every rank does it: work, recover, and hear of all others."""
        self._number += 1
        self._order, self._agreements, self._began = 0, 0, time.monotonic()
        with self._watched():
            value, failure = self.guarded(lambda: work(subject, *arguments))
        if self._order:  # closes the connections on which others may be waiting for this rank
            if failure is not None:
                tracebacks_to_text(failure.error)
            self._leave_group()
        recover()
        own = Report(value, failure, self._order)
        sent = pickle.dumps(replace(own, failure=_without_frames(failure)))
        answers = self._channel.collect(f"report/{self._number}", sent, what=_name(work), since=self._began)
        reports: list[Report[T]] = [pickle.loads(answer) for answer in answers]
        reports[self.rank] = own
        if any(report.order for report in reports):
            self._leave_group()
            self.group = self._new_group()
        return reports

    def guarded(self, run: Callable[[], T]) -> tuple[T, None] | tuple[None, Failure]:
        outcome = guarded(run)
        if outcome[1] is not None and not self._order:
            self._order = self._channel.count(f"failed/{self._number}")
        return outcome

    def slowest(self, values: Sequence[float]) -> list[float]:
        self._agreements += 1
        answers = self._channel.collect(
            f"slowest/{self._number}/{self._agreements}",
            pickle.dumps(list(values)),
            what="what a step took",
            since=self._began,
            stop=self._stop_where_others_failed,
        )
        return [max(column) for column in zip(*map(pickle.loads, answers), strict=True)]

    def gather(self, value: T) -> list[T]:
        self._gathered += 1
        answers = self._channel.collect(f"gather/{self._gathered}", pickle.dumps(value), what="to begin")
        return [pickle.loads(answer) for answer in answers]

    def close(self) -> None:
        """Closes the connections of trials."""
        self._leave_group()

    def _stop_where_others_failed(self) -> None:
        if self._channel.is_there(f"failed/{self._number}"):
            raise _OthersFailedError("another rank failed")

    def _new_group(self) -> dist.ProcessGroup:
        return new_group(seconds=self._timeout)

    def _leave_group(self) -> None:
        with self._lock:
            group, self.group = self.group, None
            if group is not None:
                dist.destroy_process_group(group)
        del group
        gc.collect()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Collectives of NCCL wait on the device for ranks that will not come; here they are broken off from outside.

        Those of gloo end by themselves when the other side closes its connections, or after the timeout.
        """
        if self.group is None or dist.get_backend(self.group) == "gloo":
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(target=self._break_off, args=(self.group, over), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _break_off(self, group: Any, over: threading.Event) -> None:
        failed = f"failed/{self._number}"
        while not over.wait(LOOK_SECONDS):
            if self._channel.is_there(failed) or time.monotonic() > self._began + self._timeout:
                logger.info("the collectives of work %d are broken off", self._number)
                group.abort()
                return


@dataclass(frozen=True)
class _Result:
    value: Any


def first_failure(reports: Sequence[Report[Any]]) -> Failure | None:
    """How the rank failed that failed first: what others failed of afterwards is that they missed it."""
    failed = [(report.order, rank, report.failure) for rank, report in enumerate(reports) if report.failure]
    if not failed:
        return None
    _, rank, failure = min(failed, key=lambda entry: entry[0])
    return replace(failure, message=f"rank {rank}: {failure.message}") if len(reports) > 1 else failure


def _without_frames(failure: Failure | None) -> Failure | None:
    return None if failure is None else replace(failure, error=_portable(failure.error))


def _portable(error: BaseException) -> BaseException:
    """The error, if it survives being sent; else one that says what it was."""
    if isinstance(error, AutofitError):
        return error
    return RankLostError(f"Another rank stopped: {describe_error(error)[:1000]}")


def _name(work: Callable[..., Any]) -> str:
    return work.__name__.strip("_").replace("_", " ")


@contextmanager
def team_of_all(*, timeout: float) -> Iterator[Team]:
    """The team of all ranks of the default process group, entered by all of them; one process where there is none.

    `timeout` in seconds is how long a rank may take for one piece of work before it counts as stuck; it is named no
    more than GRACE_SECONDS later. Raises
    RankLostError, on all other ranks, when one died, is stuck or left the block on an error of its own.
    """
    if not is_grouped() or dist.get_world_size() == 1:
        yield Team()
        return
    channel = Channel(timeout=timeout)
    reason: str | None = None
    lost: tuple[int, ...] = ()
    try:
        team = _Together(channel)
        try:
            yield team
        finally:
            team.close()
    except RankLostError as error:
        lost = error.ranks
        raise
    except BaseException as error:
        reason = describe_error(error)[:1000]
        raise
    finally:
        channel.leave(reason, lost=lost)
