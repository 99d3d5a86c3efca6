"""Which processes of this machine have ended: the kernel says so at once, whatever they died of."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

Place = tuple[str, str, int]


def this_place() -> Place:
    """Host, namespace of process ids, process id: two processes with the first two alike can watch each other."""
    try:
        namespace = os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        namespace = ""
    return socket.gethostname(), namespace, os.getpid()


class Lives:
    """The lives of the ranks on this machine; of ranks elsewhere, and without Linux's pidfd, nothing is known."""

    def __init__(self, places: Sequence[Place], *, rank: int) -> None:
        here = places[rank]
        self._handles: dict[int, int] = {}
        for other, place in enumerate(places):
            if other != rank and here[1] and place[:2] == here[:2] and hasattr(os, "pidfd_open"):
                try:
                    self._handles[other] = os.pidfd_open(place[2])
                except OSError:  # too old a kernel; what is dead already is found by the deadline
                    continue

    def ended(self) -> tuple[int, ...]:
        """The ranks that are known to have ended."""
        ranks: Mapping[int, int] = {handle: other for other, handle in self._handles.items()}
        if not ranks:
            return ()
        poll = select.poll()
        for handle in ranks:
            poll.register(handle, select.POLLIN)
        return tuple(sorted(ranks[handle] for handle, _ in poll.poll(0)))

    def close(self) -> None:
        """Stops watching."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
