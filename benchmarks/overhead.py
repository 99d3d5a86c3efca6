"""What TrainStep costs beside the same step written by hand, on a model whose step takes about 20 ms on a CPU.

    python -m benchmarks.overhead [--steps N] [--micro-batches N] [--width N]

Both loops run the same model, batch, micro-batches and optimizer on one thread, in turns of a few steps each, so that
what else the machine does meets both. Times are of this thread's CPU, and the figure is a ratio within the run. The
model has BatchNorm, so the buffers that a step must be able to put back are there, and a loss with an ignore_index, so
its targets are counted.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autofit.candidate import Candidate
from autofit.step import TrainStep
from benchmarks.results import add_out, write

TURN = 5
LAYERS = 10
INPUTS, CLASSES, SAMPLES = 64, 10, 64

Step = Callable[[tuple[Tensor, Tensor]], object]


def make_model(width: int) -> nn.Module:
    """Linear layers with BatchNorm: as many parameters and buffers as a small ResNet."""
    sizes = [INPUTS, *[width] * LAYERS]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*blocks, nn.Linear(width, CLASSES))


def by_hand(model: nn.Module, micro_batches: int) -> Step:
    """The loop that people write."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        size = len(batch[0]) // micro_batches
        total = torch.zeros(())
        optimizer.zero_grad(set_to_none=True)
        for inputs, targets in zip(batch[0].split(size), batch[1].split(size), strict=True):
            loss = F.cross_entropy(model(inputs), targets) / micro_batches
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def by_autofit(model: nn.Module, micro_batches: int) -> Step:
    """The step of a plan."""
    candidate = Candidate(micro_batch_size=SAMPLES // micro_batches, accumulation_steps=micro_batches)
    return TrainStep(model, torch.optim.AdamW(model.parameters()), candidate, loss_fn=F.cross_entropy)


def measure(steps: int, micro_batches: int, width: int) -> dict[str, float]:
    """CPU seconds of a step by hand, and the ratios to it of the same loop over a copy, and of a TrainStep.

    The three take turns, each turn in another order, and a ratio is the median over the turns: what disturbs a thread
    for a while disturbs all three. That of the copy is 1 but for noise, so it says how far the other can be trusted.
    """
    torch.manual_seed(0)
    model = make_model(width)
    loops = {
        "by_hand": by_hand(model, micro_batches),
        "by_hand_again": by_hand(copy.deepcopy(model), micro_batches),
        "autofit": by_autofit(copy.deepcopy(model), micro_batches),
    }
    batch = (torch.randn(SAMPLES, INPUTS), torch.randint(CLASSES, (SAMPLES,)))
    times: dict[str, list[float]] = {name: [] for name in loops}
    chance = random.Random(0)
    for number in range(-2, -(-steps // TURN)):
        for name in chance.sample(sorted(loops), len(loops)):
            loops[name](batch)  # brings its tensors back into the caches
            began = time.thread_time()
            for _ in range(TURN):
                loops[name](batch)
            if number >= 0:  # the first turns make the optimizer's state
                times[name].append((time.thread_time() - began) / TURN)
    hand = times.pop("by_hand")
    ratios = {name: statistics.median(a / b for a, b in zip(own, hand, strict=True)) for name, own in times.items()}
    return {"seconds_by_hand": statistics.median(hand), **ratios}


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--width", type=int, default=480)
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options.steps, options.micro_batches, options.width)
    print(
        f"by_hand={figures['seconds_by_hand'] * 1e3:.2f}ms noise={figures['by_hand_again']:.4f} "
        f"ratio={figures['autofit']:.4f} micro_batches={options.micro_batches} steps={options.steps}"
    )
    settings = {"micro_batches": options.micro_batches, "steps": options.steps}
    write(options.out, figures={name: round(value, 5) for name, value in figures.items()} | settings)


if __name__ == "__main__":
    main()
