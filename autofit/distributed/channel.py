"""The channel on which ranks agree: a key-value store of their own, so that no collective of a step is in the way.

Rank 0 keeps the store. Every wait has a deadline and ends early when a rank is known to have ended, or has said that it
stopped, so a rank that does not answer becomes a `RankLostError` with its number on all others.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list of names

from autofit.distributed.group import new_group
from autofit.distributed.life import Lives, Place, this_place
from autofit.errors import RankLostError

# A wait looks up so often: whether a rank has ended is known no later than this.
LOOK_SECONDS = 0.05
_FIRST_PAUSE_SECONDS = 0.0002
# So long a rank that found its own step broken waits at least for what the others say of theirs.
GRACE_SECONDS = 5.0
_OPENING = timedelta(seconds=60)


class Channel:
    """Values by name between the ranks of the default process group; to be opened by all of them at the same time.

    `timeout` in seconds is how long a rank may take to answer.
    """

    def __init__(self, *, timeout: float) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._store, places = _open()
        self._lives = Lives(places, rank=self.rank)
        self._own: list[str] = []

    def put(self, name: str, value: bytes) -> None:
        """Writes a value once, for all ranks to see."""
        self._ask(lambda: self._set(name, value))

    def count(self, name: str) -> int:
        """Counts one up; the first to do so gets 1."""
        return int(self._ask(lambda: self._store.add(name, 1)))

    def is_there(self, name: str) -> bool:
        """Whether the name has a value or a count."""
        return bool(self._ask(lambda: self._store.check([name])))

    def take(self, name: str, *, source: int, what: str) -> bytes:
        """The value that rank `source` writes under the name, once it is there."""
        self._wait({name: source}, what=what)
        return bytes(self._ask(lambda: self._store.get(name)))

    def collect(
        self,
        name: str,
        value: bytes,
        *,
        what: str,
        since: float | None = None,
        stop: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Every rank's value under the name, in order of ranks.

        The wait may take as long as is left of the timeout `since` then, by the monotonic clock; `stop` may raise to
        end it.
        """
        names = {f"{name}/{rank}": rank for rank in range(self.size)}
        self.put(f"{name}/{self.rank}", value)
        self._wait(names, what=what, since=since, stop=stop)
        values = [bytes(v) for v in self._ask(lambda: self._store.multi_get(list(names)))]
        # Who writes under a later name has read all of the last but one, so that one is not needed any more.
        self._own.append(f"{name}/{self.rank}")
        if len(self._own) > 2:
            self._ask(lambda: self._store.delete_key(self._own.pop(0)))
        return values

    def leave(self, reason: str | None, *, lost: Collection[int] = ()) -> None:
        """Says that this rank is done, and with a `reason` that it stopped where others may wait for it.

        Rank 0 stays until all others but the `lost` have left, for the store ends with it.
        """
        try:
            if reason is not None:
                self._set(f"gone/{self.rank}", reason.encode())
            self._set(f"left/{self.rank}", b"")
            if self.rank == 0:
                self._see_off(set(lost))
        except RuntimeError:  # the store has ended already
            pass
        self._lives.close()
        del self._store

    def _set(self, name: str, value: bytes) -> None:
        self._store.set(name, value)  # type: ignore[arg-type]  # takes bytes as well as text

    def _see_off(self, lost: set[int]) -> None:
        limit = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < limit:
            ended = self._lives.ended()
            staying = [f"left/{rank}" for rank in range(1, self.size) if rank not in lost | set(ended)]
            if not staying or self._store.check(staying):
                return
            time.sleep(LOOK_SECONDS)

    def _wait(
        self,
        names: Mapping[str, int],
        *,
        what: str,
        since: float | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        """Until all names are there; the ranks they belong to are lost where that takes too long or cannot be."""
        now = look = time.monotonic()
        deadline = now + self.timeout if since is None else max(since + self.timeout, now + GRACE_SECONDS)
        pause = _FIRST_PAUSE_SECONDS
        # Asked again and again: the store's own waiting writes a line to stderr for each that ends without a result.
        while not self._ask(lambda: self._store.check(list(names))):
            time.sleep(pause)
            pause = min(pause * 1.5, LOOK_SECONDS)
            now = time.monotonic()
            if now < look:
                continue
            look = now + LOOK_SECONDS
            missing = {rank for name, rank in names.items() if not self.is_there(name)}
            self._look_for_the_lost(missing, what=what)
            if stop is not None:
                stop()
            if missing and now >= deadline:
                self._lose(missing, f"did not answer within {self.timeout:g} s ({what})")

    def _look_for_the_lost(self, missing: set[int], *, what: str) -> None:
        if self.is_there("lost"):  # another rank found them; all name the same
            numbers, message = json.loads(bytes(self._ask(lambda: self._store.get("lost"))))
            raise RankLostError(message, ranks=tuple(numbers))
        for rank in sorted(missing):
            if self.is_there(f"gone/{rank}"):
                reason = bytes(self._ask(lambda: self._store.get(f"gone/{rank}"))).decode()  # noqa: B023 -- at once
                self._lose({rank}, f"stopped: {reason}")
        ended = missing & set(self._lives.ended())
        if ended:
            self._lose(ended, f"ended while the others waited for it ({what})")

    def _lose(self, ranks: set[int], why: str) -> NoReturn:
        numbers = sorted(ranks)
        names = f"Rank {numbers[0]}" if len(numbers) == 1 else f"The ranks {', '.join(map(str, numbers))}"
        message = f"{names} of {self.size} {why}. Look at what it printed last, and start all ranks again."
        self.put("lost", json.dumps([numbers, message]).encode())
        raise RankLostError(message, ranks=tuple(numbers))

    def _store_lost(self, error: Exception) -> NoReturn:
        raise RankLostError(
            f"Rank 0 of {self.size}, which keeps what the ranks agree on, cannot be reached any more: it ended or its "
            f"host did ({error.__class__.__name__}). Look at what it printed last.",
            ranks=(0,),
        ) from error

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            self._store_lost(error)


def _open() -> tuple[TCPStore, list[Place]]:
    """The store, and where each rank is.

    Rank 0 opens the store on a free port and says where, over a group of hosts: whatever the default group is made of.
    """
    group = new_group(backend="gloo", seconds=_OPENING.total_seconds())
    try:
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (this_place(), socket.getfqdn()), group=group)
        places = [place for place, _ in answers]
        one_host = len({place[:2] for place in places}) == 1
        address: str = "127.0.0.1" if one_host else answers[0][1]
        store, port = None, [0]
        if dist.get_rank() == 0:
            host = address if one_host else "0.0.0.0"
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_OPENING)
            port = [store.port]
        dist.broadcast_object_list(port, src=0, group=group)
    finally:
        dist.destroy_process_group(group)
    return store or TCPStore(address, port[0], is_master=False, timeout=_OPENING), places
