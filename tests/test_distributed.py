"""Process groups: what tune() does in one."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch
from torch import distributed
import autofit
from autofit.errors import ConfigError

distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:%(port)d", rank=int(sys.argv[1]), world_size=2)
model = torch.nn.Linear(2, 2)
batch = (torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
for target, words in ((1, "smaller than the 2 ranks"), (8, "one of 2 ranks")):
    try:
        autofit.tune(model, batch, target_batch=target, device="cpu")
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")
distributed.destroy_process_group()
print("refused")
"""


@pytest.mark.distributed
def test_several_ranks_are_refused_clearly() -> None:
    """H5: in a process group of two ranks tune() says what to do instead, on every rank, and nobody hangs."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT % {"port": port}]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
            assert "refused" in output
    finally:
        for rank in ranks:
            rank.kill()
