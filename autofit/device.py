"""The device that trains: its name, its bytes, what it can do, and how to wait for it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autofit.candidate import Precision
from autofit.errors import ConfigError
from autofit.units import MiB

# Kept free when no budget is given: other processes and the driver need a little too.
RESERVE_SHARE = 0.03
RESERVE_MIN_BYTES = 256 * MiB


@dataclass(frozen=True)
class DeviceInfo:
    """What is known of a device before anything runs on it."""

    device: torch.device
    name: str
    total_bytes: int
    compute_capability: tuple[int, int] | None = None

    @property
    def capability_text(self) -> str | None:
        """`'9.0'`, or None where the device has no compute capability."""
        return ".".join(map(str, self.compute_capability)) if self.compute_capability else None


def resolve_device(device: str | torch.device | None, model: nn.Module) -> torch.device:
    """The device to tune on, with its index: the one named, else the model's accelerator, else the best there is.

    Raises ConfigError for a device that is not there, and for a model spread over several devices.
    """
    held = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    if len({d for d in held if d.type != "cpu"}) > 1:
        names = sorted(map(str, held))
        raise ConfigError(f"The model lies on several devices, {names}. Move it to one with model.to(device).")
    if device is None:
        accelerated = next((d for d in held if d.type != "cpu"), None)
        best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        wanted = accelerated or best or torch.device("cpu")
    else:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"{device!r} is not a device. Allowed: 'cpu', 'cuda', 'cuda:0', 'mps', 'xpu'.") from error
    return _existing(wanted)


def _existing(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        there = f"'{accelerator.type}' and 'cpu'" if accelerator else "'cpu'"
        raise ConfigError(f"The device '{device}' is not available here; there is {there}.")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise ConfigError(
            f"The device '{device}' is not available here; '{device.type}' has the indices 0 to {count - 1}."
        )
    return torch.device(device.type, index)


def device_info(device: torch.device) -> DeviceInfo:
    """Name, total bytes and compute capability of an existing device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return DeviceInfo(device, properties.name, properties.total_memory, capability)
    if device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        return DeviceInfo(device, xpu.name, xpu.total_memory)
    if device.type == "mps":
        return DeviceInfo(device, "Apple GPU", torch.mps.recommended_max_memory())
    return DeviceInfo(device, _cpu_name(), host_total_bytes())


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that nobody uses now: neither this process nor another one."""
    if device.type in ("cuda", "xpu"):
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return host_free_bytes()


def reserved_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator of this process holds on the device, in use or cached; 0 on the host."""
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_reserved(device))


def reserve_bytes(total_bytes: int) -> int:
    """What stays free when no budget is given: 3 % of the device, at least 256 MiB."""
    return max(int(total_bytes * RESERVE_SHARE), RESERVE_MIN_BYTES)


def synchronize(device: torch.device) -> None:
    """Waits until everything that was started on the device has ended."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def default_precisions(info: DeviceInfo) -> tuple[Precision, ...]:
    """The precisions worth trying: those that the device computes natively, and float32.

    Tensor cores take float16 from compute capability 7.0, TF32 and bfloat16 from 8.0. CPUs have bfloat16 with AMX or
    AVX512_BF16.
    """
    if info.device.type == "cuda":
        if torch.version.hip is not None:
            return ("float32", "bfloat16")
        capability = info.compute_capability or (0, 0)
        if capability >= (8, 0):
            return ("float32", "tf32", "bfloat16")
        return ("float32", "float16") if capability >= (7, 0) else ("float32",)
    if info.device.type == "cpu":
        return ("float32", "bfloat16") if _cpu_has_bfloat16() else ("float32",)
    return ("float32", "bfloat16") if info.device.type == "xpu" else ("float32", "float16")


def half_precision(info: DeviceInfo) -> Precision:
    """The precision of 16 bits that the device is made for: float16 where it has no bfloat16."""
    if info.device.type == "cuda" and torch.version.hip is None and (info.compute_capability or (8, 0)) < (8, 0):
        return "float16"
    return "float16" if info.device.type == "mps" else "bfloat16"


def check_precision(precision: Precision, info: DeviceInfo) -> None:
    """Raises ConfigError when the device cannot compute in this precision at all."""
    capability = info.compute_capability
    if precision == "tf32" and (info.device.type != "cuda" or (capability is not None and capability < (8, 0))):
        raise ConfigError(
            f"precision 'tf32' needs a CUDA device of compute capability 8.0 or later; '{info.device}' is {info.name}. "
            f"Allowed here: {', '.join(repr(p) for p in ('float32', 'bfloat16', 'float16'))}."
        )


def host_total_bytes() -> int:
    """Memory of this host, or of the container that this process runs in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, _cgroup_bytes("memory.max") or physical)


def host_free_bytes() -> int:
    """Memory that a new allocation could take now without swapping, in this container if there is one."""
    available = host_total_bytes()
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return min(available, limit - used) if limit is not None and used is not None else available


def _cgroup_bytes(name: str) -> int | None:
    """A figure of the control group (version 2) that a container sees as its root; None where there is none."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
