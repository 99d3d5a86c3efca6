"""What a person sees while trials run, on stderr: a line for each trial, and on a terminal a clock."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autofit.plan import Trial
from autofit.report.text import trial_line


class TrialProgress:
    """Prints every trial as it ends; pass `on_trial` to `tune` and enter it around the call."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Once a second: redrawing takes time away from the steps that are being timed.
        self._clock = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=1,
            disable=not console.is_terminal,
        )
        self._task = self._clock.add_task("tuning: first trial")
        self._ended = 0

    def __enter__(self) -> TrialProgress:
        self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.stop()

    def on_trial(self, trial: Trial) -> None:
        """Prints the trial and moves the clock's text on."""
        self._ended += 1
        say(self._console, trial_line(trial), style="green" if trial.feasible else None)
        self._clock.update(self._task, description=f"tuning: {self._ended} tried")


def say(console: Console, line: str, *, style: str | None = None) -> None:
    """Prints one line; in a pipe it stays one, however long it is."""
    console.print(line, style=style, soft_wrap=not console.is_terminal)
