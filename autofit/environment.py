"""Where and for what trials were measured, as a plan keeps it."""

from __future__ import annotations

import platform

import torch

from autofit._version import __version__
from autofit.device import DeviceInfo
from autofit.plan import Environment
from autofit.trial import TrialSetup


def describe_environment(setup: TrialSetup, info: DeviceInfo, *, seed: int) -> Environment:
    """The environment of one tuning."""
    model = setup.model
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
        memory_source=setup.meter.source,
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        optimizer=type(setup.make_optimizer()).__name__,
        seed=seed,
    )
