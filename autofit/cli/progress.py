"""What a person sees while trials run, on stderr: a line for each trial, and on a terminal what is going on now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autofit.plan import Trial, best_trial
from autofit.progress import Progress, Stage
from autofit.report.text import percent, rate_in_words, trial_line
from autofit.units import format_bytes

# Once a second: redrawing takes time away from the steps that are being timed.
REFRESHES_PER_SECOND = 1
BAR_WIDTH = 24
LABEL_WIDTH = 8
# In a pipe these stages get a line when they begin first, for trials may be a while away.
SAID_IN_A_PIPE: tuple[Stage, ...] = ("checking the model", "predicting memory", "finals", "confirming the best")


class TrialProgress:
    """Prints every trial as it ends; pass `on_trial` and `on_progress` to `tune` and enter it around the call.

    `max_trials` and `timeout` (seconds) are the bounds that tune was given.
    """

    def __init__(self, console: Console, *, max_trials: int | None = None, timeout: float | None = None) -> None:
        self._console = console
        self._now = Now(max_trials=max_trials, timeout=timeout)
        self._live = Live(
            self._now, console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND, redirect_stdout=False
        )
        self._said: set[Stage] = set()

    def __enter__(self) -> TrialProgress:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def trials(self) -> list[Trial]:
        """The trials that ended."""
        return self._now.trials

    def on_trial(self, trial: Trial) -> None:
        """Prints the trial, and counts it."""
        self._now.trials.append(trial)
        say(self._console, trial_line(trial), style="green" if trial.feasible else None)

    def refresh(self) -> None:
        """Draws now what would be drawn within the second."""
        self._live.refresh()

    def on_progress(self, progress: Progress) -> None:
        """Shows what begins now: on a terminal until the next begins, in a pipe as a line where it takes a while."""
        self._now.progress = progress
        if not self._console.is_terminal and progress.stage in SAID_IN_A_PIPE and progress.stage not in self._said:
            self._said.add(progress.stage)
            say(self._console, f"autofit: {progress.stage}")


class Now:
    """A few lines: how far it is, the candidate, its memory against the budget, and the best so far."""

    def __init__(self, *, max_trials: int | None, timeout: float | None) -> None:
        self.trials: list[Trial] = []
        self.progress: Progress | None = None
        self._max_trials, self._timeout = max_trials, timeout
        self._began = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 1), expand=False)
        table.add_column(width=LABEL_WIDTH, no_wrap=True, style="dim")
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(options.max_width - LABEL_WIDTH - 2, 1))
        table.add_row("tuning", self._how_far())
        progress = self.progress
        if progress is not None:
            table.add_row("now", _line(progress.stage))
            if progress.candidate is not None:
                table.add_row("trying", _line(str(progress.candidate)))
            table.add_row("memory", self._memory(progress, options))
        best = best_trial(self.trials)
        if best is not None:
            peak = format_bytes(best.peak_reserved_bytes or 0)
            table.add_row(
                "best", _line(f"{rate_in_words(best)} samples/s at {peak}: {best.candidate}"), style="bold green"
            )
        yield table

    def _how_far(self) -> Text:
        elapsed = time.monotonic() - self._began
        parts = [_clock(elapsed), f"{len(self.trials)} tried"]
        if self._max_trials is not None:
            parts.append(f"{max(self._max_trials - len(self.trials), 0)} left at most")
        if self._timeout is not None:
            parts.append(f"{_clock(max(self._timeout - elapsed, 0))} left")
        return _line(", ".join(parts))

    def _memory(self, progress: Progress, options: ConsoleOptions) -> Table | Text:
        peak, cap = progress.peak_bytes, progress.cap_bytes
        if peak is None or not cap:
            return _line("not known yet")
        text = f"{'~' if progress.predicted else ''}{format_bytes(peak)} of {format_bytes(cap)}, {percent(peak / cap)}"
        room = options.max_width - LABEL_WIDTH - len(text) - 4
        if room < BAR_WIDTH // 2:
            return _line(text)
        row = Table.grid(padding=(0, 1))
        style = "red" if peak > cap else "cyan"
        row.add_row(
            ProgressBar(
                total=cap,
                completed=min(peak, cap),
                width=min(BAR_WIDTH, room),
                complete_style=style,
                finished_style=style,
            ),
            _line(text),
        )
        return row


def _line(text: str) -> Text:
    """Text that is cut and never wrapped."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Says what takes a while: on a terminal beside a spinner until it is over, in a pipe as a line."""
    if not console.is_terminal:
        say(console, f"autofit: {what}")
        yield
        return
    live = Live(Spinner("dots", text=what), console=console, transient=True, refresh_per_second=4)
    live.start(refresh=True)
    try:
        yield
    finally:
        live.stop()


def say(console: Console, line: str, *, style: str | None = None) -> None:
    """Prints one line; in a pipe it stays one, however long it is."""
    console.print(line, style=style, soft_wrap=not console.is_terminal)
