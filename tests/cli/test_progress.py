"""Progress on stderr: plain lines in a pipe, a clock on a terminal, both honouring width and NO_COLOR."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from autofit.cli.progress import TrialProgress
from autofit.plan import Trial


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


def test_a_terminal_shows_that_something_is_running() -> None:
    """A live line with the elapsed time, gone at the end."""
    text = printed(console(terminal=True, TERM="xterm"), trial(outcome="feasible", message=""))
    assert "tuning: first trial" in text
    assert re.search(r"\d:\d\d:\d\d", text)
    assert "feasible" in text


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
