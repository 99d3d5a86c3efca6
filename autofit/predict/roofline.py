"""Seconds of a step on a GPU of the catalogue, from the work that its trace counts: to order candidates by, no more.

An operator takes as long as its arithmetic or its memory traffic, whichever is slower (Williams, Waterman and Patterson
2009, "Roofline"), and its launch. Nothing here is a measurement.
"""

from __future__ import annotations

import numpy as np
import torch

from autofit.candidate import Precision
from autofit.gpus import Gpu, find_gpu
from autofit.predict.solver import Floats
from autofit.predict.work import Tally, Work
from autofit.timing import Round

# Of the vendor's dense rate; torch's own roofline takes the same share (`torch.utils._runtime_estimation`).
MATRIX_SHARE = 0.75
# Of the vendor's bandwidth: what plain copies of large tensors reach; kernels that reduce reach less.
BANDWIDTH_SHARE = 0.8
# Bytes per second between a device and pinned host memory: PCIe 4.0 with 16 lanes has 31.5 GB/s before its protocol.
HOST_BANDWIDTH = 24e9
# An operator without work: to launch a kernel takes a few microseconds, and eager PyTorch hides them only in part.
LAUNCH_SECONDS = 5e-6


# Where no GPU is named only ratios count, of arithmetic to traffic: a GPU of today, and a host of a few cores.
REFERENCES = {
    "cuda": find_gpu("A100 40GB"),
    "cpu": Gpu(
        name="host",
        total_bytes=0,
        capability=(0, 0),
        bandwidth=20e9,
        float32=200e9,
        tf32=None,
        bfloat16=None,
        float16=None,
    ),
}


def operator_seconds(tally: Tally, gpu: Gpu, *, precision: Precision) -> Floats:
    """Seconds of each operator on `gpu`; `precision` says whether float32 products may run in TF32."""
    rates = np.empty(len(tally))
    for dtype, places in tally.places.items():
        rates[places] = _rate(dtype, gpu, precision)
    compute = tally.operations / (rates * MATRIX_SHARE)
    memory = tally.moved_bytes / (gpu.bandwidth * BANDWIDTH_SHARE)
    host = tally.host_bytes / HOST_BANDWIDTH
    seconds: Floats = np.maximum(np.maximum(compute, memory), host) + LAUNCH_SECONDS
    return seconds


def step_seconds(work: Work, gpu: Gpu, *, precision: Precision, accumulation_steps: int) -> float:
    """Seconds of a whole optimizer step: accumulation_steps × micro-step + optimizer step, as trials are composed."""

    def total(tally: Tally) -> float:
        return float(operator_seconds(tally, gpu, precision=precision).sum())

    once = Round(1, total(work.micro_step), total(work.optimizer_step))
    return once.step_seconds(accumulation_steps)


def _rate(dtype: torch.dtype | None, gpu: Gpu, precision: Precision) -> float:
    """Operations per second; a dtype that the GPU has no units for runs, if at all, at the rate of float32."""
    rates = {torch.bfloat16: gpu.bfloat16, torch.float16: gpu.float16}
    if precision == "tf32":
        rates[torch.float32] = gpu.tf32
    return (rates.get(dtype) if dtype is not None else None) or gpu.float32
