"""Who runs a trial, so that one left behind by a dead process can be told from one that runs elsewhere."""

from __future__ import annotations

import os
import socket
import threading
from datetime import datetime, timedelta
from typing import Any

# On a machine that cannot be asked whether a process lives, a trial that runs for longer than this is given up.
GIVE_UP_AFTER = timedelta(hours=1)


def describe_worker() -> dict[str, str | int]:
    """This thread, as it is written beside a running trial."""
    return {"host": socket.gethostname(), "process": os.getpid(), "thread": threading.get_ident()}


def is_alive(worker: dict[str, Any], *, started: datetime) -> bool:
    """Whether another `worker` may still be running the trial that it `started`.

    The calling thread itself is not: it would not ask while it runs a trial.
    """
    here = describe_worker()
    if worker.get("host") == here["host"] and worker.get("process") == here["process"]:
        others = {thread.ident for thread in threading.enumerate()} - {here["thread"]}
        return worker.get("thread") in others
    if worker.get("host") == here["host"] and os.name == "posix":
        return _process_lives(int(worker["process"]))
    return datetime.now() - started < GIVE_UP_AFTER


def _process_lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
