"""Progress on stderr: plain lines in a pipe, a clock on a terminal, both honouring width and NO_COLOR."""

from __future__ import annotations

import io
import os
import pty
import re
import termios
from collections.abc import Iterator
from typing import Any

import pyte
import pytest
from rich.console import Console

from autofit.candidate import Candidate, Checkpointing
from autofit.cli.progress import TrialProgress, waiting
from autofit.plan import Trial
from autofit.progress import Progress

MIB = 2**20
CANDIDATE = Candidate(
    micro_batch_size=32,
    accumulation_steps=4,
    precision="bfloat16",
    checkpointing=Checkpointing(mode="full", blocks=tuple(map(str, range(12)))),
)


def trial(**values: Any) -> Trial:
    """A trial with a long reason."""
    candidate = {"micro_batch_size": 8, "accumulation_steps": 2}
    message = "Expected more than 1 value per channel when training, got input size"
    return Trial.model_validate(
        {"number": 0, "candidate": candidate, "outcome": "invalid", "message": message, **values}
    )


def printed(console: Console, *trials: Trial) -> str:
    """What two trials leave on the console."""
    with TrialProgress(console) as progress:
        for one in trials:
            progress.on_trial(one)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def console(*, terminal: bool, width: int = 60, **environment: str) -> Console:
    """A console that writes into a string."""
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, markup=False, _environ=environment
    )


def test_a_pipe_gets_one_plain_line_for_each_trial() -> None:
    """No wrapping, however narrow; no control codes."""
    text = printed(console(terminal=False, width=20), trial(), trial(number=1))
    assert [line.split()[0] for line in text.splitlines()] == ["0", "1"]
    assert "\x1b" not in text


def test_a_pipe_hears_what_takes_a_while_once() -> None:
    """A line when predicting begins, not one for each candidate."""
    target = console(terminal=False)
    with TrialProgress(target) as shown:
        for number in range(3):
            shown.on_progress(Progress("predicting memory", CANDIDATE))
            shown.on_progress(Progress("measuring time", CANDIDATE))
            shown.on_trial(trial(number=number))
    lines = target.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "autofit: predicting memory"
    assert len(lines) == 4


def test_a_narrow_terminal_is_not_overrun() -> None:
    """Lines wrap at the terminal's width."""
    text = printed(console(terminal=True, width=30, TERM="xterm"), trial())
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]", visible)) <= 30


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_is_honoured(no_color: bool) -> None:
    """The feasible ones are green, unless the user wants no colour."""
    environment = {"NO_COLOR": "1"} if no_color else {}
    text = printed(console(terminal=True, TERM="xterm", **environment), trial(outcome="feasible", message=""))
    assert ("\x1b[32m" in text) is not no_color


def test_the_clock_stops_when_tuning_fails() -> None:
    """An error or Ctrl-C leaves no live line behind."""
    target = console(terminal=True, TERM="xterm")
    with pytest.raises(KeyboardInterrupt), TrialProgress(target):
        raise KeyboardInterrupt
    assert isinstance(target.file, io.StringIO)
    assert "\x1b[?25h" in target.file.getvalue()  # the cursor is shown again


class Terminal:
    """A pseudo-terminal, and what an emulator shows of what is written to it."""

    def __init__(self, *, columns: int, lines: int = 12, **environment: str) -> None:
        self._reading, writing = pty.openpty()
        termios.tcsetwinsize(writing, (lines, columns))
        self.file = os.fdopen(writing, "w", encoding="utf-8", buffering=1)
        self.console = Console(
            file=self.file,
            width=columns,
            highlight=False,
            markup=False,
            _environ={"TERM": "xterm-256color", **environment},
        )
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        os.set_blocking(self._reading, False)

    def shown(self) -> list[str]:
        """The lines of the screen now, without what is empty."""
        self.file.flush()
        while True:
            try:
                some = os.read(self._reading, 65536)
            except BlockingIOError:
                break
            self.raw += some
            self._stream.feed(some)
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def close(self) -> None:
        """Gives both ends back."""
        self.file.close()
        os.close(self._reading)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """As wide as the test asks for, 80 columns by default; with NO_COLOR for the mark `"plain"`."""
    asked = getattr(request, "param", 80)
    made = Terminal(columns=80, NO_COLOR="1") if asked == "plain" else Terminal(columns=asked)
    yield made
    made.close()


def test_a_terminal_is_told_what_is_tried_now(terminal: Terminal) -> None:
    """The stage, the candidate, its memory against the budget, the best so far, and what is left."""
    feasible = trial(outcome="feasible", message="", peak_reserved_bytes=100 * MIB, samples_per_second=647.0, number=0)
    shown = TrialProgress(terminal.console, max_trials=9, timeout=600)
    with shown:
        shown.on_trial(feasible)
        shown.on_progress(Progress("measuring memory", CANDIDATE, 150 * MIB, predicted=True, cap_bytes=200 * MIB))
        shown.refresh()
        screen = "\n".join(terminal.shown())
        assert re.search(r"tuning +0:00:0\d, 1 tried, 8 left at most, 0:0[0-9]:\d\d left", screen)
        assert re.search(r"now +measuring memory", screen)
        assert re.search(r"trying +32 × 4 bfloat16 checkpointing full\(12\)", screen)
        assert re.search(r"memory +━+[╸╺━ ]* +~150.0 MiB of 200.0 MiB, 75%", screen)
        assert re.search(r"best +647 samples/s at 100.0 MiB: 8 × 2 float32", screen)
        shown.on_progress(Progress("measuring time", CANDIDATE, 152 * MIB, cap_bytes=200 * MIB))
        shown.refresh()
        assert re.search(r" 152.0 MiB of 200.0 MiB, 76%", "\n".join(terminal.shown()))
    assert len(terminal.shown()) == 1  # the trial's line; what was live is gone


@pytest.mark.parametrize("terminal", [20, 34, 48], indirect=True)
def test_nothing_is_wrapped_on_a_narrow_terminal(terminal: Terminal) -> None:
    """Each row of the live part stays one row; the bar gives way first."""
    shown = TrialProgress(terminal.console)
    with shown:
        shown.on_progress(Progress("measuring memory", CANDIDATE, 150 * MIB, predicted=True, cap_bytes=200 * MIB))
        shown.refresh()
        screen = terminal.shown()
    labels = [line.split()[0] for line in screen]
    assert labels == ["tuning", "now", "trying", "memory"]


@pytest.mark.parametrize("terminal", ["plain", 80], indirect=True)
def test_colours_are_left_out_where_the_user_wants_none(terminal: Terminal) -> None:
    """NO_COLOR leaves the lines and takes the colours."""
    shown = TrialProgress(terminal.console)
    with shown:
        shown.on_progress(Progress("measuring memory", CANDIDATE, 150 * MIB, cap_bytes=200 * MIB))
        shown.refresh()
        terminal.shown()
    coloured = re.search(rb"\x1b\[[0-9;]*3[0-7][0-9;]*m", terminal.raw) is not None
    assert coloured is not terminal.console.no_color


def test_waiting_is_over_when_it_is(terminal: Terminal) -> None:
    """A spinner while it lasts, nothing afterwards; a plain line in a pipe."""
    with waiting(terminal.console, "predicting x"):
        assert any("predicting x" in line for line in terminal.shown())
    assert terminal.shown() == []
    pipe = console(terminal=False)
    with waiting(pipe, "predicting x"):
        pass
    assert pipe.file.getvalue() == "autofit: predicting x\n"  # type: ignore[attr-defined]
