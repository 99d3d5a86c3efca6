"""Where and for what trials were measured or predicted, as a plan keeps it."""

from __future__ import annotations

import platform

import torch
from torch import nn

from autofit._version import __version__
from autofit.device import DeviceInfo
from autofit.plan import Environment


def describe_environment(
    model: nn.Module, info: DeviceInfo, *, memory_source: str, optimizer: str, seed: int
) -> Environment:
    """The environment of one tuning, or of one forecast for a device that is not here."""
    return Environment(
        autofit_version=__version__,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=platform.platform(),
        device=str(info.device),
        device_name=info.name,
        device_total_bytes=info.total_bytes,
        compute_capability=info.capability_text,
        cuda_version=torch.version.cuda if info.device.type == "cuda" else None,
        threads=torch.get_num_threads() if info.device.type == "cpu" else None,
        memory_source=memory_source,
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        optimizer=optimizer,
        seed=seed,
    )
