"""What TrainStep costs beside the same step written by hand, on a model whose step takes about 20 ms on a CPU.

    python -m benchmarks.overhead [--steps N] [--micro-batches N] [--width N] [--default-malloc]

Both loops run the same model, batch, micro-batches and optimizer on one thread, in turns of a few steps each, so that
what else the machine does meets both. Times are of this thread's CPU, and the figure is a ratio within the run. The
model has BatchNorm, so the buffers that a step must be able to put back are there, and a loss with an ignore_index, so
its targets are counted.

The C library's allocator is told to keep what is freed. By default glibc gives memory at the end of its heap back to
the system and takes it again with a page fault for every 4 KiB; whose block lies at the end is chance, and was seen to
cost one of two equal loops 16 % and the other nothing. `--default-malloc` leaves it as it is. A GPU's memory does not
come from there. The page faults of a step are printed beside the ratios.

How two equal loops differ still depends on where their tensors lie, by a percent or two. What the step itself does
beside the operators of the model does not depend on the size of its tensors: `bookkeeping` is that, measured on the
same layers a few elements wide, and `bookkeeping_percent` its share of a step of 20 ms.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import random
import resource
import statistics
import sys
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
NARROW = 4
STEP_SECONDS = 0.020
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h

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


def keep_freed_memory() -> None:
    """Has glibc keep freed memory in the process; elsewhere nothing is changed."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_MAX, 0)


def measure(steps: int, micro_batches: int, width: int) -> dict[str, float]:
    """CPU seconds of a step by hand and how many more of a TrainStep; ratios of a copy's loop and of it; page faults.

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
    faults: dict[str, list[float]] = {name: [] for name in loops}
    chance = random.Random(0)
    for number in range(-2, -(-steps // TURN)):
        for name in chance.sample(sorted(loops), len(loops)):
            loops[name](batch)  # brings its tensors back into the caches
            before, began = page_faults(), time.thread_time()
            for _ in range(TURN):
                loops[name](batch)
            if number >= 0:  # the first turns make the optimizer's state
                times[name].append((time.thread_time() - began) / TURN)
                faults[name].append((page_faults() - before) / TURN)
    hand = times.pop("by_hand")
    more = statistics.median(a - b for a, b in zip(times["autofit"], hand, strict=True))
    ratios = {name: statistics.median(a / b for a, b in zip(own, hand, strict=True)) for name, own in times.items()}
    counts = {f"page_faults_{name}": statistics.mean(faults[name]) for name in ("by_hand", "autofit")}
    return {"seconds_by_hand": statistics.median(hand), "seconds_more": more, **ratios, **counts}


def page_faults() -> int:
    """Page faults of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--width", type=int, default=480)
    parser.add_argument("--default-malloc", action="store_true", help="leave glibc's allocator as it is")
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.default_malloc:
        keep_freed_memory()
    narrow = measure(5 * options.steps, options.micro_batches, NARROW)["seconds_more"]
    figures = measure(options.steps, options.micro_batches, options.width) | {
        "bookkeeping_microseconds": narrow * 1e6,
        "bookkeeping_percent": 100 * narrow / STEP_SECONDS,
    }
    print(
        f"bookkeeping={figures['bookkeeping_microseconds']:.0f}us share={figures['bookkeeping_percent']:.2f}% "
        f"by_hand={figures['seconds_by_hand'] * 1e3:.2f}ms noise={figures['by_hand_again']:.4f} "
        f"ratio={figures['autofit']:.4f} micro_batches={options.micro_batches} steps={options.steps} "
        f"page_faults_by_hand={figures['page_faults_by_hand']:.0f} page_faults={figures['page_faults_autofit']:.0f}"
    )
    settings = {"micro_batches": options.micro_batches, "steps": options.steps}
    write(options.out, figures={name: round(value, 5) for name, value in figures.items()} | settings)


if __name__ == "__main__":
    main()
