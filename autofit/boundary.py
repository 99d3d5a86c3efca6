"""Where errors leave autofit: as its own types, whatever ran out or broke on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from autofit.errors import AutofitError, DeviceLostError, InfeasibleError, StepError
from autofit.oom import chain, classify, headline, release_frames

T = TypeVar("T")


class Boundary:
    """Turns what fails outside of any trial into the type that says what it means.

    Memory that runs out becomes InfeasibleError, a lost device DeviceLostError, any other error of PyTorch, a device or
    the system StepError, each with its cause. Other errors are bugs and stay what they are, as do interrupts and what
    callbacks raise that were made `callers`.
    """

    def __init__(self) -> None:
        self._theirs: BaseException | None = None

    def callers(self, callback: Callable[[T], Any]) -> Callable[[T], None]:
        """`callback`, whose errors pass through as they are."""

        def call(value: T) -> None:
            try:
                callback(value)
            except Exception as error:
                self._theirs = error
                raise

        return call

    @contextmanager
    def typed(self) -> Iterator[None]:
        """Around everything that is done."""
        try:
            yield
        except AutofitError:
            raise
        except (RuntimeError, MemoryError, OSError) as error:
            if error is self._theirs:
                raise
            meant = _meaning(error)
            release_frames(error)
            raise meant from error


def _meaning(error: Exception) -> AutofitError:
    """The error to raise in its place; of a lost device, the one that cleaning up has hidden, which has the plan."""
    for link in chain(error):
        if isinstance(link, DeviceLostError):
            return DeviceLostError(str(link), plan=link.plan)
    kind = classify(error)
    if kind == "device_lost":
        return DeviceLostError(f"The device context is lost: {headline(error)}. Start a new process.")
    if kind in ("memory", "maybe_memory"):
        return InfeasibleError(
            f"Memory ran out outside of any trial, on the device or the host: {headline(error)}. Everything was put "
            "back. Free memory, or use a smaller model or sample batch."
        )
    return StepError(
        f"PyTorch or the system failed outside of any trial: {headline(error)}. Everything was put back; calling again "
        "may succeed if the fault was a passing one."
    )
