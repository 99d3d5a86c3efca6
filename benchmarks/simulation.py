"""Plain analytic models of training steps on GPUs: enough of the real shapes to compare searches without one.

Memory: weights, gradients and Adam's state, activations per sample, a cast copy of the weights under autocast, scratch
that jumps with the micro-batch. Time: kernel launches against arithmetic and bandwidth (whichever is longer, with a
soft corner), an optimizer step, penalties for odd sizes in half precision and for thrashing near the limit. On the CPU
samples get slower once a micro-batch outgrows the caches. All figures are rounded from public data sheets and papers;
nothing is fitted to any search.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autofit.candidate import Candidate, Checkpointing, Precision, SearchSpace
from autofit.plan import Seconds, Trial
from autofit.units import GiB, MiB


@dataclass(frozen=True)
class Model:
    """What a step of a network takes: `flops` forward and float32 `activation_bytes`, both per sample."""

    name: str
    target_batch: int
    parameters: float
    flops: float
    activation_bytes: float
    kernels: int


@dataclass(frozen=True)
class Device:
    """Sustained flops per second by precision, bytes per second, seconds per kernel launch.

    Two kinds of noise, as standard deviations: what all samples of a trial share, and what each has of its own.
    """

    name: str
    total_bytes: int
    flops: dict[Precision, float]
    bandwidth: float
    launch_seconds: float
    trial_noise: float = 0.01
    sample_noise: float = 0.01
    cache_bytes: float | None = None


MODELS = (
    Model("resnet18", 512, 11.7e6, 1.8e9, 60e6, 190),
    Model("resnet50", 512, 25.6e6, 4.1e9, 180e6, 480),
    Model("mobilenet_v3", 1024, 5.5e6, 0.22e9, 60e6, 560),
    Model("efficientnet_b0", 512, 5.3e6, 0.4e9, 120e6, 760),
    Model("convnext_tiny", 512, 28.6e6, 4.5e9, 210e6, 520),
    Model("vit_b16", 512, 86e6, 17.6e9, 270e6, 600),
    Model("unet", 64, 31e6, 200e9, 2.2e9, 250),
    Model("bert_base", 256, 110e6, 22e9, 190e6, 700),
    Model("t5_small", 256, 60e6, 15e9, 260e6, 950),
    Model("gpt2", 128, 124e6, 290e9, 2.6e9, 800),
    Model("gpt2_medium", 96, 355e6, 820e9, 6.0e9, 1500),
    Model("llama_1b", 32, 0.7e9, 3.0e12, 9.0e9, 1300),
)

GPUS = (
    Device("T4", 15 * GiB, {"float32": 4e12, "float16": 22e12, "bfloat16": 2.2e12}, 260e9, 7e-6),
    Device("RTX 4090", 24 * GiB, {"float32": 40e12, "tf32": 60e12, "bfloat16": 120e12}, 900e9, 4e-6),
    Device("A100 40GB", 40 * GiB, {"float32": 14e12, "tf32": 80e12, "bfloat16": 170e12}, 1400e9, 6e-6),
    Device("H100 80GB", 80 * GiB, {"float32": 40e12, "tf32": 220e12, "bfloat16": 420e12}, 2900e9, 4e-6),
)
CPU = Device(
    "CPU",
    32 * GiB,
    {"float32": 0.8e12, "bfloat16": 0.25e12},
    60e9,
    30e-6,
    trial_noise=0.02,
    sample_noise=0.05,
    cache_bytes=64e6,
)
BUDGETS = (0.25, 0.5, 0.75, 0.95)

# Steps of each finalist: three turns of some.
IN_TURN = 12
# Predictions are off by this share (one standard deviation) on each line, and by more where scratch jumps.
PREDICTION_ERROR = 0.02


class Scenario:
    """One model on one device under one budget; `evaluate` and `predict` are what a search is given."""

    def __init__(self, model: Model, device: Device, *, budget: float, seed: int) -> None:
        self.name = f"{model.name}, {device.name}, {budget:.0%}"
        self.cap_bytes = int(device.total_bytes * budget) // (2 * MiB) * (2 * MiB)
        self._model = model
        self._device = device
        self._random = random.Random(f"{seed} {self.name}")
        self._thrash = self._random.choice((0.0, 0.0, 0.2))

    @cached_property
    def space(self) -> list[Candidate]:
        """Every split of the batch, in every precision of the device, with and without checkpointing."""
        splits = SearchSpace().splits(self._model.target_batch)
        return [
            Candidate(
                micro_batch_size=size,
                accumulation_steps=steps,
                precision=precision,
                checkpointing=Checkpointing(mode=mode),
            )
            for precision in self._device.flops
            for mode in ("none", "full")
            for size, steps in splits
        ]

    def needs(self, candidate: Candidate) -> int:
        """Bytes that the candidate really needs."""
        scratch = 0.12 * self._texture("scratch", candidate.micro_batch_size.bit_length(), candidate.precision)
        need = self._plain_bytes(candidate, scratch=scratch)
        return -(-int(need) // (2 * MiB)) * 2 * MiB

    def seconds(self, candidate: Candidate) -> float:
        """Noiseless seconds of one optimizer step."""
        size, steps = candidate.micro_batch_size, candidate.accumulation_steps
        optimizer = 28 * self._model.parameters / self._device.bandwidth + 20 * self._device.launch_seconds
        crowding = max(0.0, self.needs(candidate) / self.cap_bytes - 0.97) / 0.03
        return (steps * self._micro_step(candidate, size) + optimizer) * (1 + self._thrash * crowding)

    def evaluate(self, candidate: Candidate) -> Trial:
        """A trial as a device would answer, noise included."""
        need = self.needs(candidate)
        if need > self.cap_bytes:
            reached = self.cap_bytes - self._random.randrange(64) * MiB
            return Trial(number=0, candidate=candidate, outcome="out_of_memory", peak_reserved_bytes=reached)
        seconds = self.seconds(candidate) * self._random.gauss(1, self._device.trial_noise)
        samples = [seconds * self._random.gauss(1, self._device.sample_noise) for _ in range(7)]
        return Trial(
            number=0,
            candidate=candidate,
            outcome="feasible",
            peak_reserved_bytes=need,
            step_seconds=Seconds.of(samples),
            samples_per_second=self._model.target_batch / seconds,
        )

    def in_turn(self, trial: Trial) -> Trial:
        """The trial measured again in turn with others: what all samples of a trial share falls out."""
        seconds = self.seconds(trial.candidate)
        times = Seconds.of(seconds * self._random.gauss(1, self._device.sample_noise) for _ in range(IN_TURN))
        rate = self._model.target_batch / times.median
        return trial.model_copy(update={"step_seconds": times, "samples_per_second": rate})

    def predict(self, candidate: Candidate) -> int:
        """Bytes as a predictor would say: the right shape, off by a few per cent, blind to jumps of scratch."""
        line = random.Random(f"{self.name} {candidate.precision} {candidate.checkpointing.mode}")
        return int(self._plain_bytes(candidate, scratch=0.06) * line.gauss(1, PREDICTION_ERROR))

    @cached_property
    def best_seconds(self) -> float | None:
        """The exhaustive optimum: noiseless seconds of the fastest candidate that fits; None when none does."""
        return min((self.seconds(c) for c in self.space if self.needs(c) <= self.cap_bytes), default=None)

    def _plain_bytes(self, candidate: Candidate, *, scratch: float) -> float:
        half = candidate.precision in ("bfloat16", "float16")
        base = self._model.parameters * (18 if half else 16) + 80 * MiB
        per_sample = self._model.activation_bytes * (0.6 if half else 1.0)
        if candidate.checkpointing.mode == "full":
            per_sample *= 0.22
        return base + per_sample * candidate.micro_batch_size * (1 + scratch)

    def _micro_step(self, candidate: Candidate, size: int) -> float:
        model, device = self._model, self._device
        half = candidate.precision in ("bfloat16", "float16")
        rate = device.flops[candidate.precision]
        recompute = 4 / 3 if candidate.checkpointing.mode == "full" else 1.0
        # Work that fills the device once: below it more samples are nearly free.
        filling = rate * 60 * device.launch_seconds
        arithmetic = 3 * (model.flops * size + filling) / rate
        traffic = 3 * model.activation_bytes * (0.6 if half else 1.0) * size / device.bandwidth
        busy = (arithmetic + traffic) * recompute * self._odd_size(half, size) * self._cache_misses(candidate, size)
        launches = 3 * model.kernels * device.launch_seconds * recompute * (1.25 if half else 1.0)
        return float((busy**4 + launches**4) ** 0.25)

    def _odd_size(self, half: bool, size: int) -> float:
        penalty = 0.03 if half and size % 8 and size > 8 else 0.0
        return 1 + penalty + 0.01 * self._texture("size", size)

    def _cache_misses(self, candidate: Candidate, size: int) -> float:
        if self._device.cache_bytes is None:
            return 1.0
        share = self._model.activation_bytes / 20 * size / self._device.cache_bytes
        return 1 + 0.35 * share / (1 + share)

    def _texture(self, *what: object) -> float:
        """A fixed number in [0, 1) for each thing of this model on this device."""
        return random.Random(f"{self._model.name} {self._device.name} {what}").random()


def scenarios(*, seed: int, devices: tuple[Device, ...] = GPUS) -> Iterator[Scenario]:
    """Every model on every device under every budget in which anything fits."""
    for model in MODELS:
        for device in devices:
            for budget in BUDGETS:
                scenario = Scenario(model, device, budget=budget, seed=seed)
                if scenario.best_seconds is not None:
                    yield scenario
