"""From what the user allows to what the allocator may hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from autofit import budget as module
from autofit.budget import resolve_budget
from autofit.device import DeviceInfo, reserve_bytes
from autofit.errors import ConfigError
from autofit.units import GiB, MiB

GPU = DeviceInfo(torch.device("cuda", 0), "a GPU", 16 * GiB, (8, 0))


@dataclass
class FixedMeter:
    """A device with so much in use outside the allocator."""

    outside: int

    def outside_bytes(self) -> int:
        return self.outside


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which other processes hold 6 GiB and this one's allocator 1 GiB."""
    monkeypatch.setattr(module, "free_bytes", lambda _: 16 * GiB - 6 * GiB - GiB - 500 * MiB)
    monkeypatch.setattr(module, "reserved_bytes", lambda _: GiB)


def test_a_budget_is_for_the_whole_process() -> None:
    """G1: the context and libraries count, so the allocator gets the rest."""
    found = resolve_budget("8GiB", info=GPU, meter=FixedMeter(500 * MiB))  # type: ignore[arg-type]
    assert found.budget_bytes == 8 * GiB
    assert found.cap_bytes == 8 * GiB - 500 * MiB
    assert "500.0 MiB" in found.note


def test_without_a_budget_only_what_is_free_counts() -> None:
    """G4: memory of other processes is not ours; what this process holds already is; a reserve stays."""
    found = resolve_budget(None, info=GPU, meter=FixedMeter(500 * MiB))  # type: ignore[arg-type]
    assert found.cap_bytes == 16 * GiB - 6 * GiB - 500 * MiB - reserve_bytes(16 * GiB)
    assert "No budget was given" in found.note


def test_a_budget_that_the_context_eats() -> None:
    """Nothing would be left for tensors: said at once, with what is used."""
    with pytest.raises(ConfigError, match=r"leaves nothing for tensors.*500.0 MiB"):
        resolve_budget("400MiB", info=GPU, meter=FixedMeter(500 * MiB))  # type: ignore[arg-type]
