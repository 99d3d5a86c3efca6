"""A stretch of work that Ctrl-C may not tear apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back until the end of the block, then delivers the first of them.

    Python runs handlers in the main thread only; in another thread, or where handlers cannot be set, nothing is held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = [number for number, handler in previous.items() if callable(handler)]
    for number in held:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, previous[number])
        if pending:
            signal.raise_signal(pending[0])
