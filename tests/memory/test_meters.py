"""What every meter promises, whatever the device: one suite for all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autofit.memory import Meter, Reading, meter_for
from autofit.memory.cuda import CudaMeter
from autofit.memory.mps import MpsMeter
from autofit.memory.statistics import StatisticsMeter
from autofit.memory.tracked import TrackedMeter
from autofit.units import MiB
from tests.memory.simulated import SimulatedDevice

METERS = [
    "tracked",
    pytest.param("cuda", marks=pytest.mark.gpu),
    "simulated cuda",
    "simulated xpu",
    "simulated mps",
]
SIMULATED = {"cuda": CudaMeter, "xpu": StatisticsMeter, "mps": MpsMeter}


@pytest.fixture(params=METERS)
def meter(request: pytest.FixtureRequest) -> Iterator[Meter]:
    """Each meter in turn, with nothing of its own on the device; `tensor` makes what it meters."""
    kind = request.param
    if kind.startswith("simulated"):
        device_type = kind.split()[1]
        with SimulatedDevice() as device:
            yield SIMULATED[device_type](torch.device(device_type), runtime=device)
    else:
        made = meter_for(torch.device("cuda:0" if kind == "cuda" else "cpu"))
        torch.zeros(1, device=made.device)  # the context
        made.release()
        yield made


def tensor(meter: Meter, mebibytes: int) -> Tensor:
    device = "cuda:0" if type(meter) is CudaMeter and torch.cuda.is_available() else "cpu"
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device=device)


def reserved_before(meter: Meter) -> int:
    """What is reserved when nothing runs: on a real device, of whatever ran before."""
    with meter.metered(cap_bytes=None, resident=[]) as read:
        return read().peak_reserved_bytes


def test_the_source_says_what_was_done(meter: Meter) -> None:
    """Either it was measured, or exactly what stands for tracked storages."""
    tracked = "tracked: storages of tensors, as the CUDA allocator would hold them"
    assert meter.source.startswith("measured: ") or meter.source == tracked


def test_peaks_outlast_what_caused_them(meter: Meter) -> None:
    """The reading is the highest since the start, not what is alive when it is taken."""
    base = reserved_before(meter)
    with meter.metered(cap_bytes=None, resident=[]) as read:
        start = read()
        held = tensor(meter, 30)
        del held
        after = read()
    assert after.peak_allocated_bytes - start.peak_allocated_bytes == 30 * MiB
    assert after.peak_reserved_bytes == base + 30 * MiB
    assert after.alloc_retries == 0


def test_a_reading_is_that_of_its_block(meter: Meter) -> None:
    """Once the block is over its reading stands still, and the next block starts afresh."""
    with meter.metered(cap_bytes=None, resident=[]) as first:
        held = tensor(meter, 50)
        inside = first()
    del held
    meter.release()
    with meter.metered(cap_bytes=None, resident=[]) as second:
        held = tensor(meter, 40)
        del held
    assert first() == inside
    assert second().peak_allocated_bytes == inside.peak_allocated_bytes - 10 * MiB


def test_what_is_resident_counts_from_the_start(meter: Meter) -> None:
    """Tensors that were there before are in the peak from the beginning."""
    kept = [tensor(meter, 20), tensor(meter, 10)]
    with meter.metered(cap_bytes=None, resident=iter(kept)) as read:
        assert read().peak_allocated_bytes >= 30 * MiB


def run_out(meter: Meter, *, cap_bytes: int) -> tuple[Reading, Reading]:
    """The readings right after running out inside of a block, and after the block."""
    with meter.metered(cap_bytes=cap_bytes, resident=[]) as read:
        held = tensor(meter, 40)
        with pytest.raises(torch.OutOfMemoryError):
            tensor(meter, 40)
        inside = read()
        del held
    return inside, read()


def test_running_out_leaves_a_reading(meter: Meter) -> None:
    """Above the cap the allocation raises, and the peaks up to then can still be read, at once and later."""
    base = reserved_before(meter)
    inside, after = run_out(meter, cap_bytes=base + 60 * MiB)
    assert inside == after
    assert base + 40 * MiB <= inside.peak_reserved_bytes <= base + 60 * MiB


def test_a_run_is_possible_after_running_out(meter: Meter) -> None:
    """The cap of a run ends with it, also when it ended with an error."""
    base = reserved_before(meter)

    def fail() -> None:
        with meter.metered(cap_bytes=base + 30 * MiB, resident=[]):
            tensor(meter, 40)

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    meter.release()
    with meter.metered(cap_bytes=None, resident=[]) as read:
        held = tensor(meter, 100)
    assert read().peak_allocated_bytes >= held.nbytes


def test_retries_are_those_of_the_run(meter: Meter) -> None:
    """An allocation that only fits after the cache was given back counts one retry, in this run and not the next."""
    if isinstance(meter, MpsMeter):
        pytest.skip("torch.mps does not count retries")
    base = reserved_before(meter)
    for _ in range(2):
        with meter.metered(cap_bytes=base + 70 * MiB, resident=[]) as read:
            held = tensor(meter, 40)
            del held
            held = tensor(meter, 50)
            del held
        assert read().alloc_retries == 1
        meter.release()


def test_a_cap_ends_where_it_was_set(meter: Meter) -> None:
    """Afterwards, and after an error too, the device gives what it gave before."""

    def fail() -> None:
        with meter.capped(reserved_before(meter) + 30 * MiB):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with meter.metered(cap_bytes=None, resident=[]) as read:
        held = tensor(meter, 100)
    assert read().peak_allocated_bytes >= held.nbytes


def test_a_device_with_an_allocator_of_its_own_keeps_the_cap(meter: Meter) -> None:
    """Outside of a metered run too; on the host, where nothing is capped, there is nothing to keep."""
    cap = reserved_before(meter) + 30 * MiB
    with meter.capped(cap):
        if isinstance(meter, TrackedMeter):
            tensor(meter, 40)
        else:
            with pytest.raises(torch.OutOfMemoryError):
                tensor(meter, 40)


def test_what_is_alive_can_be_compared(meter: Meter) -> None:
    """`allocated_bytes` rises with what is kept, and falls back to what it was when that is gone."""
    meter.release()
    before = meter.allocated_bytes()
    held = tensor(meter, 40)
    assert meter.allocated_bytes() - before == held.nbytes
    del held
    gc.collect()
    meter.release()
    assert meter.allocated_bytes() == before


def test_nothing_negative_lies_outside(meter: Meter) -> None:
    """What the process uses outside the allocator is a number of bytes, also when the allocator holds much."""
    held = tensor(meter, 100)
    assert meter.outside_bytes() >= 0
    del held
