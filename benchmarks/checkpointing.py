"""Checkpointing that is solved: are masks predicted right, is the cheapest one found, and what does it save?

    python -m benchmarks.checkpointing [--masks 200] [--part woven|solved|trained] [--quick] [--out FILE]

woven    peaks of random masks put together from one trace per mode, against a trace of each mask.
solved   the solver's cost against the cheapest mask by enumeration, 20 budgets each; how long it takes for 96 blocks.
trained  on this CPU under an enforced cap: memory and time of no, full and solved checkpointing, and the largest batch.

Errors and ratios are within one run; seconds are this machine's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, product
from typing import Any

import torch
import torchvision
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate, Checkpointing, CheckpointingMode
from autofit.memory import fit_threshold, meter_for, replay
from autofit.optimizers import optimizer_factory
from autofit.plan import Trial
from autofit.predict import Predictor
from autofit.predict.line import SizedTrace
from autofit.predict.masks import Mask, Masks
from autofit.predict.prediction import allocator_events
from autofit.predict.roofline import REFERENCES, operator_seconds
from autofit.predict.tracing import trace_step
from autofit.snapshot import restored
from autofit.step.blocks import discover_blocks
from autofit.trial import TrialSetup, run_trial
from autofit.units import format_bytes
from benchmarks.results import add_out, write

CPU = torch.device("cpu")
MODES: tuple[CheckpointingMode, ...] = ("none", "full", "selective")
BUDGETS = 20
ROUNDS = 3

Build = Callable[[], tuple[nn.Module, Any]]
Row = dict[str, Any]


class UNet(nn.Module):
    """Two levels down and up again, with skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._level(width, width) for _ in range(2))
        self.up = nn.ModuleList(self._level(2 * width, width) for _ in range(2))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _level(width: int, out: int) -> nn.Sequential:
        layers = nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One score per class and pixel."""
        x, skips = self.stem(x), []
        for level in self.down:
            skips.append(x := level(x))
            x = nn.functional.max_pool2d(x, 2)
        for level in self.up:
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)  # type: ignore[no-any-return]


def images(build: Callable[..., nn.Module], size: int) -> tuple[nn.Module, Any]:
    """A model of torchvision and two images."""
    return build(num_classes=10), (torch.randn(2, 3, size, size), torch.tensor([0, 1]))


def unet() -> tuple[nn.Module, Any]:
    """Pixels of two classes."""
    return UNet(), (torch.randn(2, 3, 32, 32), torch.zeros(2, 32, 32, dtype=torch.long))


def gpt2(layers: int, *, width: int = 64, tokens: int = 32) -> tuple[nn.Module, Any]:
    """A decoder from its configuration."""
    import transformers

    config = transformers.GPT2Config(vocab_size=512, n_positions=tokens, n_embd=width, n_layer=layers, n_head=4)
    config.bos_token_id = config.eos_token_id = 0
    ids = torch.randint(0, 512, (2, tokens))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def t5() -> tuple[nn.Module, Any]:
    """An encoder and a decoder from their configuration."""
    import transformers

    config = transformers.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4)
    config.decoder_start_token_id = 0
    ids = torch.randint(0, 512, (2, 32))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def stack() -> tuple[nn.Module, Any]:
    """Twenty Linear layers, as in `examples/linear_stack.py`."""
    from examples.linear_stack import make_batch, make_model

    return make_model(), make_batch(8, torch.Generator().manual_seed(0))


def cifar() -> tuple[nn.Module, Any]:
    """The convolutions of `examples/cifar_cnn.py`."""
    from examples.cifar_cnn import make_model

    return make_model(), (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))


WOVEN: dict[str, Build] = {
    "U-Net": unet,
    "GPT-2, 4 layers": partial(gpt2, 4),
    "T5, 3 + 3 layers": t5,
    "ResNet-50": partial(images, torchvision.models.resnet50, 64),
    "Swin-T": partial(images, torchvision.models.swin_t, 64),
}
SOLVED: dict[str, Build] = {
    "U-Net, 4 blocks": unet,
    "GPT-2, 4 blocks": partial(gpt2, 4),
    "T5, 6 blocks": t5,
    "ResNet-18, 8 blocks": partial(images, torchvision.models.resnet18, 64),
}
TRAINED: dict[str, tuple[Build, int]] = {
    "20 Linear layers": (stack, 4096),
    "CIFAR CNN": (cifar, 256),
    "ResNet-50, 64 px": (partial(images, torchvision.models.resnet50, 64), 16),
    "GPT-2, 12 layers": (partial(gpt2, 12, width=128, tokens=64), 16),
}


def followed(model: nn.Module, batch: Any, device: str) -> Predictor:
    """A predictor that knows the model's blocks."""
    predictor = Predictor(model, batch, device=device)
    predictor.follow(predictor.observed_blocks(discover_blocks(model)))
    return predictor


def masks_of(predictor: Predictor) -> Masks:
    """The masks in float32."""
    masks = predictor.masks("float32")
    assert masks is not None, "the traces of this model cannot be put together"
    return masks


def woven(count: int, most: int | None) -> Iterator[Row]:
    """Largest relative errors of the peaks of random masks."""
    for name, build in islice(WOVEN.items(), most):
        predictor, chance = followed(*build(), "cuda"), random.Random(0)
        masks, errors = masks_of(predictor), []
        for _ in range(count):
            mask: Mask = {block: chance.choice(masks.modes) for block in masks.blocks}
            candidate = Candidate(micro_batch_size=32, accumulation_steps=2, checkpointing=Checkpointing.of(mask))
            trace = trace_step(predictor.subject, candidate, blocks=masks.blocks)
            truth = replay(allocator_events(SizedTrace(trace, trace.sizes)))
            ours = replay(allocator_events(masks.at(mask, (32, 32))))
            errors.append(abs(ours.peak_allocated_bytes / truth.peak_allocated_bytes - 1))
            errors.append(abs(ours.peak_reserved_bytes / truth.peak_reserved_bytes - 1))
        yield {"part": "woven", "model": name, "blocks": len(masks.blocks), "masks": count, "max_error": max(errors)}


def solved(most: int | None) -> Iterator[Row]:
    """The solver's cost over the cheapest mask's."""
    clock = partial(operator_seconds, gpu=REFERENCES["cuda"], precision="float32")
    for name, build in islice(SOLVED.items(), most):
        masks, sizes = masks_of(followed(*build(), "cuda")), (64, 64)
        seconds, gaps, waits = masks.seconds(64, clock), [], []
        choices = list(product(range(len(masks.modes)), repeat=len(masks.blocks)))
        needs = {choice: fit_threshold(allocator_events(masks.at(masks.mask(choice), sizes))) for choice in choices}
        costs = {choice: float(seconds[range(len(choice)), choice].sum()) for choice in choices}
        least, most = min(needs.values()), needs[choices[0]]
        for number in range(BUDGETS):
            cap = least + (most - least) * number // BUDGETS
            began = time.perf_counter()
            found = masks.solve(sizes, cap, clock, modes=MODES)
            waits.append(time.perf_counter() - began)
            cheapest = min(costs[choice] for choice in choices if needs[choice] <= cap)
            cost = masks.cost(found, 64, clock) if found is not None else float("inf")
            gaps.append(cost / cheapest - 1 if cheapest else 0.0)
        yield {"part": "solved", "model": name, "masks": len(choices), "max_gap": max(gaps), "max_seconds": max(waits)}
    if most is not None:
        return
    masks = masks_of(followed(*gpt2(96, width=32, tokens=16), "cuda"))
    plain, full = (
        fit_threshold(allocator_events(masks.at(dict.fromkeys(masks.blocks, mode), (64, 64)))) for mode in MODES[:2]
    )
    waits = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        began = time.perf_counter()
        assert masks.solve((64, 64), int(full + (plain - full) * share), clock, modes=MODES) is not None
        waits.append(time.perf_counter() - began)
    times = {"median_seconds": statistics.median(waits), "max_seconds": max(waits)}
    yield {"part": "solved", "model": "GPT-2, 96 blocks", **times}


@contextmanager
def trials(model: nn.Module, batch: Any, samples: int, cap_bytes: int) -> Iterator[Callable[[Candidate], Trial]]:
    """Tries candidates under a cap; the model is afterwards what it was."""
    with ExitStack() as entered:
        snapshot = entered.enter_context(restored(model, None, device=CPU))
        model.train()
        setup = TrialSetup(
            model=model,
            sample_batch=batch,
            layout=infer_layout(batch),
            samples=samples,
            device=CPU,
            meter=meter_for(CPU),
            cap_bytes=cap_bytes,
            outside_bytes=0,
            snapshot=snapshot,
            make_optimizer=optimizer_factory(None, model),
        )
        yield partial(run_trial, setup=setup)


def trained(most: int | None) -> Iterator[Row]:
    """Real steps: under a cap that plain training does not fit, with the solved mask and with full checkpointing."""
    for name, (build, samples) in islice(TRAINED.items(), most):
        model, batch = build()
        predictor = followed(model, batch, "cpu")
        masks = masks_of(predictor)
        plain = Candidate(micro_batch_size=samples, accumulation_steps=1)
        everywhere = Checkpointing.of(dict.fromkeys(masks.blocks, "full"))
        full = plain.model_copy(update={"checkpointing": everywhere})
        need = predictor.predict(plain).fit_threshold_bytes
        least = predictor.predict(full).fit_threshold_bytes
        cap = (need + least) // 2
        best = predictor.solve(plain, samples=samples, cap_bytes=cap, modes=MODES)
        assert best is not None
        with trials(model, batch, samples, need) as attempt:
            free = attempt(plain)
        with trials(model, batch, samples, cap) as attempt:
            refused = attempt(plain)
            runs = [(attempt(best), attempt(full)) for _ in range(ROUNDS)]
        rates = [statistics.median(trial.samples_per_second or 0 for trial in of) for of in zip(*runs, strict=True)]
        yield {
            "part": "trained",
            "model": name,
            "samples": samples,
            "cap_bytes": cap,
            "plain": refused.outcome,
            "plain_peak_bytes": free.peak_reserved_bytes,
            "full_peak_bytes": runs[0][1].peak_reserved_bytes,
            "solved_peak_bytes": runs[0][0].peak_reserved_bytes,
            "solved": str(best.checkpointing),
            "solved_over_full_speed": rates[0] / rates[1],
            "solved_over_plain_speed": rates[0] / (free.samples_per_second or 1),
            "full_over_plain_speed": rates[1] / (free.samples_per_second or 1),
            "largest_plain": largest(predictor, plain, cap),
            "largest_full": largest(predictor, full, cap),
        }


def largest(predictor: Predictor, candidate: Candidate, cap_bytes: int) -> int:
    """The most samples in one micro-batch that are predicted to fit under the cap."""
    fits, fails = 1, 2**16
    while fails - fits > 1:
        middle = (fits + fails) // 2
        sized = candidate.model_copy(update={"micro_batch_size": middle})
        fits, fails = (middle, fails) if predictor.predict(sized).fit_threshold_bytes <= cap_bytes else (fits, middle)
    return fits


def show(row: Row) -> str:
    """One row for people."""
    facts = [f"{key}={shown(key, value)}" for key, value in row.items() if key not in ("part", "model")]
    return f"{row['part']:<8} {row['model']:<20} {'  '.join(facts)}"


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """The worst of each kind over the rows."""
    worst = {
        "woven_max_error": [row["max_error"] for row in rows if "max_error" in row],
        "solved_max_gap": [row["max_gap"] for row in rows if "max_gap" in row],
    }
    speeds = [row["solved_over_full_speed"] for row in rows if row.get("solved_over_full_speed")]
    figures = {name: round(max(values), 5) for name, values in worst.items() if values}
    return figures | ({"solved_over_full_speed_least": round(min(speeds), 3)} if speeds else {})


def shown(key: str, value: Any) -> str:
    """One figure for people."""
    if key.endswith("_bytes") and value:
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts asked for and prints their rows as they end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=int, default=200, help="random masks for each model")
    parser.add_argument("--part", choices=("woven", "solved", "trained"), action="append")
    parser.add_argument("--quick", action="store_true", help="a few masks of the first model of each part")
    add_out(parser)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    most = 1 if options.quick else None
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "woven": partial(woven, min(options.masks, 20) if options.quick else options.masks, most),
        "solved": partial(solved, most),
        "trained": partial(trained, most),
    }
    rows: list[Row] = []
    for part in options.part or parts:
        for row in parts[part]():
            rows.append(row)
            print(show(row), flush=True)
            write(options.out, figures=figures_of(rows), rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
