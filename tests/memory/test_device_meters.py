"""What single meters do beyond the common promises: NVML, shares of a device, Apple's allocator, and their choice."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import ConfigError
from autofit.memory import AllocatorConfig, meter_for
from autofit.memory import cuda as cuda_module
from autofit.memory.cuda import CudaMeter, process_bytes
from autofit.memory.mps import MpsMeter
from autofit.memory.statistics import StatisticsMeter
from autofit.memory.tracked import TrackedMeter
from autofit.units import GiB, MiB
from tests.memory.simulated import FOREIGN_BYTES, OUTSIDE_BYTES, TOTAL_BYTES, SimulatedDevice


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A simulated device, entered."""
    with SimulatedDevice() as entered:
        yield entered


@pytest.mark.parametrize(
    ("device_type", "kind"),
    [("cpu", TrackedMeter), ("cuda", CudaMeter), ("xpu", StatisticsMeter), ("mps", MpsMeter)],
)
def test_each_device_has_its_meter(device_type: str, kind: type) -> None:
    """The meter follows from the type of the device, and keeps the device."""
    meter = meter_for(torch.device(device_type))
    assert type(meter) is kind
    assert meter.device == torch.device(device_type)


def test_a_device_that_cannot_be_metered_is_refused() -> None:
    """The error names what was passed and what is allowed."""
    with pytest.raises(ConfigError, match=r"'meta'.*'cpu', 'cuda'"):
        meter_for(torch.device("meta"))


def test_the_tracked_meter_follows_the_allocator_options() -> None:
    """The model's options can be passed, such as a smaller segment for what is below 10 MiB."""
    meter = TrackedMeter(torch.device("cpu"), config=AllocatorConfig(large_segment_size=12 * MiB))
    with meter.metered(cap_bytes=None, resident=[]) as read:
        torch.empty(2 * MiB, dtype=torch.uint8)
    assert read().peak_reserved_bytes == 12 * MiB


def test_entering_raises_when_not_even_the_residents_fit() -> None:
    """What is there already has to find room too."""
    meter = meter_for(torch.device("cpu"))
    metered = meter.metered(cap_bytes=2 * MiB, resident=[torch.empty(MiB)])
    with pytest.raises(torch.OutOfMemoryError), metered:
        pytest.fail("never entered")


@given(cap=st.integers(2 * MiB, TOTAL_BYTES - 1), total=st.sampled_from([TOTAL_BYTES, 25_438_126_080, 150_109_880_320]))
def test_a_cap_arrives_to_the_byte(cap: int, total: int) -> None:
    """A share of the device, rounded down by the allocator, is the cap that was asked for."""
    shares = []
    runtime = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=total),
        memory=SimpleNamespace(
            get_per_process_memory_fraction=lambda device: 0.75,
            set_per_process_memory_fraction=lambda fraction, device: shares.append(fraction),
        ),
    )
    with StatisticsMeter(torch.device("cuda"), runtime=runtime).capped(cap):
        assert int(shares[-1] * total) == cap
    assert shares[-1] == 0.75


def test_a_cap_above_the_device_is_all_of_it(device: SimulatedDevice) -> None:
    """A share cannot be more than 1."""
    with CudaMeter(torch.device("cuda"), runtime=device).capped(100 * GiB):
        assert device.fraction == 1.0


def test_caps_nest(device: SimulatedDevice) -> None:
    """A run's own cap gives way to the one around it."""
    meter = CudaMeter(torch.device("cuda"), runtime=device)
    with meter.capped(GiB):
        outer = device.fraction
        with meter.metered(cap_bytes=GiB // 2, resident=[]):
            assert device.allocator.limit_bytes == GiB // 2
        assert device.fraction == outer
    assert device.fraction == 1.0


def test_releasing_waits_and_empties(device: SimulatedDevice) -> None:
    """Cached memory goes back only after the device has ended what uses it."""
    meter = CudaMeter(torch.device("cuda"), runtime=device)
    torch.empty(40 * MiB, dtype=torch.uint8)
    assert device.allocator.reserved_bytes == 40 * MiB
    meter.release()
    assert (device.allocator.reserved_bytes, device.synchronized) == (0, 1)


class FakeNvml(SimpleNamespace):
    """`pynvml` with one process list, or with an error at one of its functions."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: dict[int, int | None], *, failing: str = "") -> None:
        super().__init__(open=0, asked=[])
        self.processes, self.failing = processes, failing

    def _call(self, name: str) -> None:
        if self.failing == name:
            raise self.NVMLError

    def nvmlInit(self) -> None:  # noqa: N802  # the names are NVML's
        self._call("init")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._call("handle")
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        self._call("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (FakeNvml({1: 5 * GiB, os.getpid(): 3 * GiB}), 3 * GiB),
        (FakeNvml({1: 5 * GiB}), None),  # a container hides this process
        (FakeNvml({os.getpid(): None}), None),  # the driver does not tell
        (FakeNvml({os.getpid(): GiB}, failing="init"), None),
        (FakeNvml({os.getpid(): GiB}, failing="handle"), None),
        (FakeNvml({os.getpid(): GiB}, failing="processes"), None),
        (None, None),  # not installed
    ],
)
def test_nvml_is_asked_for_this_process(
    nvml: FakeNvml | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the figure of this process counts; where there is none, None, and NVML is closed again."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert process_bytes("GPU-4d2f") == expected
    assert nvml is None or nvml.open == 0


def test_outside_is_what_nvml_counts_less_what_is_reserved(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes on the GPU do not count, and neither does what the allocator holds."""
    nvml = FakeNvml({os.getpid(): OUTSIDE_BYTES + 40 * MiB, 1: FOREIGN_BYTES})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    held = torch.empty(40 * MiB, dtype=torch.uint8)
    assert CudaMeter(torch.device("cuda"), runtime=device).outside_bytes() == OUTSIDE_BYTES
    assert nvml.asked == ["GPU-4d2f"]
    del held


def test_without_nvml_everything_else_in_use_counts_as_outside(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The figure is too high rather than too low, and a warning says so once."""
    monkeypatch.setattr(cuda_module, "process_bytes", lambda uuid: None)
    meter = CudaMeter(torch.device("cuda"), runtime=device)
    held = torch.empty(40 * MiB, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="autofit.memory"):
        assert {meter.outside_bytes() for _ in range(2)} == {OUTSIDE_BYTES + FOREIGN_BYTES}
    assert len(caplog.records) == 1
    assert "nvidia-ml-py" in caplog.text
    del held


def test_statistics_may_be_missing(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first use of a device it has none, and XPU does not count retries: that is 0."""
    monkeypatch.setattr(device, "memory_stats", lambda device: {})
    meter = StatisticsMeter(torch.device("xpu"), runtime=device)
    with meter.metered(cap_bytes=None, resident=[]) as read:
        pass
    assert (meter.allocated_bytes(), read().alloc_retries) == (0, 0)


@pytest.mark.parametrize(("environment", "expected"), [(None, 1.7), ("1.2", 1.2)])
def test_the_mps_share_goes_back_to_what_torch_starts_with(
    environment: str | None, expected: float, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.mps does not tell the share that is set, so it becomes the one from the environment, or torch's own."""
    if environment is not None:
        monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", environment)
    with MpsMeter(torch.device("mps"), runtime=device).capped(100 * GiB):
        assert device.fraction == 2.0  # more is refused
    assert device.fraction == expected


def test_the_tracked_meter_counts_shared_storages_once() -> None:
    """Views and parameters of one storage are one storage; sparse tensors count by their parts."""
    meter = meter_for(torch.device("cpu"))
    before = meter.allocated_bytes()
    base = torch.ones(1000)
    views = [base[:10], torch.nn.Parameter(base), base.to_sparse()]
    parts = views[2]._indices().nbytes + views[2]._values().nbytes
    assert meter.allocated_bytes() - before == base.nbytes + parts


@pytest.mark.gpu
def test_nvml_and_the_driver_agree_about_this_gpu() -> None:
    """What lies outside the allocator is at least a context, and at most what is in use on the device."""
    device = torch.device("cuda:0")
    held = torch.zeros(40 * MiB, dtype=torch.uint8, device=device)
    outside = meter_for(device).outside_bytes()
    free, total = torch.cuda.mem_get_info(device)
    assert 50 * MiB <= outside <= total - free - held.nbytes
