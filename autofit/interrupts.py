"""A stretch of work that no signal may tear apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back every signal that Python handles until the end of the block, then delivers the first of them.

    Ctrl-C is one, and so is what a scheduler sends before it ends a job, or an alarm that raises. Python runs handlers
    in the main thread only; in another thread there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    handlers = {number: signal.getsignal(number) for number in _signals()}
    held = [(number, handler) for number, handler in handlers.items() if callable(handler)]
    try:
        for number, _ in held:
            signal.signal(number, remember)
        yield
    finally:
        _put_back(held)
        if pending:
            signal.raise_signal(pending[0])


def _signals() -> list[int]:
    """Ctrl-C first, so that it is held from the start to the very end."""
    return sorted(signal.valid_signals(), key=lambda number: number != signal.SIGINT)


def _put_back(held: list[tuple[int, Any]]) -> None:
    """The handlers, last held first; a signal whose handler raises in between leaves none of the others behind."""
    if held:
        try:
            _put_back(held[1:])
        finally:
            signal.signal(*held[0])
