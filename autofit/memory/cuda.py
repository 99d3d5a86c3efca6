"""The meter of CUDA devices: what the allocator measures, and what NVML says of the rest of the process."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from autofit.memory.statistics import StatisticsMeter

_logger = logging.getLogger("autofit.memory")


class CudaMeter(StatisticsMeter):
    """Reads the caching allocator's statistics, and asks NVML what else the process uses on the device."""

    def __init__(self, device: torch.device, *, runtime: Any = None) -> None:
        super().__init__(device, runtime=runtime)
        self._told = False

    def outside_bytes(self) -> int:
        """What NVML counts for this process, less what the allocator reserves.

        Where NVML does not tell (`nvidia-ml-py` is not installed, or a container hides the processes): all that is in
        use on the device, less what the allocator reserves.
        """
        used = process_bytes(f"GPU-{self._runtime.get_device_properties(self.device).uuid}")
        if used is not None:
            return max(used - self._statistic("reserved_bytes.all.current"), 0)
        if not self._told:
            self._told = True
            _logger.warning(
                "NVML does not tell what this process uses on %s: everything in use there counts as its own. "
                "Where nvidia-ml-py is missing, `pip install torch-autofit[nvml]` helps.",
                self.device,
            )
        return super().outside_bytes()


def process_bytes(uuid: str) -> int | None:
    """What this process uses on the GPU with that UUID, as the driver counts it; None where NVML does not tell."""
    try:
        import pynvml  # an optional extra, and nothing else needs it

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
