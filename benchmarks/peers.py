"""Peers run as themselves: what batch size they find under the same budget, and how fast that trains.

    python -m benchmarks.peers [--rounds 3] [--quick] [--out FILE]

Lightning's `Tuner.scale_batch_size` (both modes) and Accelerate's `find_executable_batch_size` search on the CPU, under
the allocator model: every training step of theirs runs out of memory where CUDA's allocator would have. The batch that
they find is then trained at the same effective batch as autofit's plan: accumulated over as many micro-batches as it
takes, split evenly, which is the kindest reading. Those steps and the plan's are measured in turn. Ratios are within
the run: above 1 the peer's choice is slower. `*` marks a choice that runs out of memory once it accumulates; its time
is left out of the means.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autofit
from autofit.candidate import Candidate
from autofit.finals import measure_in_turn
from autofit.memory import meter_for
from autofit.preparation import prepared
from autofit.stepping import resident_tensors
from autofit.trial import measure_need, meter_trial
from autofit.units import MiB, format_bytes
from benchmarks.results import add_out, write

CPU = torch.device("cpu")
SHARES = (0.3, 0.7)
STEPS = 3


@dataclass(frozen=True)
class Task:
    """A model, a batch of `target` samples, and a budget under which not all of them fit at once."""

    name: str
    model: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]
    budget_bytes: int

    @property
    def target(self) -> int:
        return len(self.batch[1])


@dataclass(frozen=True)
class Found:
    """What a method chose, how long that took, how often it ran out of memory, and how long its steps are.

    `fits`: also as a whole effective step. `ratio`: of its step to that of autofit's plan.
    """

    task: str
    budget: str
    method: str
    choice: str
    search_seconds: float
    out_of_memory: int
    fits: bool
    step_seconds: float
    ratio: float


class Repeated(Dataset[tuple[torch.Tensor, ...]]):
    """The samples of a batch over and over: a data set that is larger than any batch size that a peer may try."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index % len(tensor)] for tensor in self._batch)


class Words(nn.Module):
    """A small GPT-2 as a function of tokens, so that every peer can be handed the same (inputs, targets)."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config: Any = transformers.GPT2Config(
            n_layer=3, n_embd=128, n_head=4, vocab_size=512, use_cache=False, bos_token_id=0, eos_token_id=0
        )
        self.language_model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.language_model(input_ids=tokens).logits
        return logits.mean(1)


def tasks() -> Iterator[Task]:
    """Three kinds of models under two budgets each."""
    torch.manual_seed(0)
    images = torch.randn(48, 3, 64, 64), torch.randint(10, (48,))
    tokens = torch.randint(512, (48, 64)), torch.randint(512, (48,))
    models: list[tuple[str, nn.Module, tuple[torch.Tensor, torch.Tensor]]] = [
        ("resnet18", torchvision.models.resnet18(num_classes=10), images),
        ("vision transformer", torchvision.models.VisionTransformer(64, 8, 3, 4, 128, 256, num_classes=10), images),
        ("gpt2", Words(), tokens),
    ]
    for name, model, batch in models:
        for share in SHARES:
            yield Task(name, model, batch, _budget(model, batch, share))


def _budget(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], share: float) -> int:
    """Between what micro-batches of one sample need (0) and what the whole batch at once does (1)."""
    target = len(batch[1])
    needs = []
    with _ready(model, batch, None) as ready:
        for size in (1, target):
            candidate = Candidate(micro_batch_size=size, accumulation_steps=target // size)
            need = measure_need(candidate, ready.setup, available_bytes=1 << 40)
            assert need is not None
            needs.append(need.peak_reserved_bytes)
    return int(needs[0] + (needs[1] - needs[0]) * share) // (2 * MiB) * 2 * MiB


def _ready(model: nn.Module, batch: Any, budget_bytes: int | None) -> Any:
    return prepared(
        model,
        batch,
        samples=len(batch[1]),
        optimizer=None,
        device="cpu",
        budget=budget_bytes,
        loss_options={"loss_fn": F.cross_entropy},
    )


class Limit:
    """The budget, as the peers meet it: their steps run out of memory like on CUDA, in CUDA's words."""

    def __init__(self, cap_bytes: int) -> None:
        self.out_of_memory = 0
        self._cap_bytes = cap_bytes

    @contextmanager
    def enforced(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around one training step of a peer; parameters, optimizer state and gradients are there already."""
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        there = chain(resident_tensors(model, optimizer), gradients)  # no list: it would keep the gradients alive
        message = None
        try:
            with meter_for(CPU).metered(cap_bytes=self._cap_bytes, resident=there):
                yield
        except torch.OutOfMemoryError as error:
            message = str(error).replace("CPU out of memory", "CUDA out of memory")
        if message is not None:
            self.out_of_memory += 1
            raise torch.OutOfMemoryError(message)


def lightning_finder(mode: str) -> Callable[[Task, Limit], int]:
    """`Tuner.scale_batch_size` on a `LightningModule`, a `Trainer` and a `DataLoader` as its manual has them."""

    def find(task: Task, limit: Limit) -> int:
        import lightning.pytorch as pl
        from lightning.pytorch.tuner.tuning import Tuner

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # importing it sets another level

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = copy.deepcopy(task.model)
                self.batch_size = 2

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                inputs, targets = (tensor.clone() for tensor in batch)  # the transfer to the device
                return F.cross_entropy(self.net(inputs), targets)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

            def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
                with limit.enforced(self, optimizer.optimizer):
                    super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

            def train_dataloader(self) -> Any:
                return DataLoader(Repeated(task.batch), batch_size=self.batch_size)

        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                accelerator="cpu",
                max_epochs=1000,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            size = Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS, init_val=2)
        assert size is not None
        return int(size)

    return find


def accelerate_finder(task: Task, limit: Limit) -> int:
    """`find_executable_batch_size` around a training function, as in its manual: it starts from all that is wanted."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=task.target)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        net = copy.deepcopy(task.model)
        loader = DataLoader(Repeated(task.batch), batch_size=batch_size)
        net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
        for _ in range(STEPS):
            batch = next(iter(loader))
            with limit.enforced(net, optimizer.optimizer):
                inputs, targets = (tensor.clone() for tensor in batch)
                loss = F.cross_entropy(net(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return batch_size

    return int(train())


PEERS: dict[str, Callable[[Task, Limit], int]] = {
    "Lightning, power": lightning_finder("power"),
    "Lightning, binsearch": lightning_finder("binsearch"),
    "Accelerate": accelerate_finder,
}


def compare(task: Task, *, rounds: int) -> list[Found]:
    """All methods on one task, autofit first."""
    began = time.monotonic()
    plan = autofit.tune(
        task.model,
        task.batch,
        target_batch=task.target,
        loss_fn=F.cross_entropy,
        budget=task.budget_bytes,
        device="cpu",
    )
    ran_out = sum(trial.outcome == "out_of_memory" for trial in plan.trials)
    chosen = [("autofit", plan.candidate, time.monotonic() - began, ran_out)]
    for name, find in PEERS.items():
        began, limit = time.monotonic(), Limit(task.budget_bytes)
        size = min(find(task, limit), task.target)
        chosen.append((name, _split(size, task.target), time.monotonic() - began, limit.out_of_memory))
    candidates = [candidate for _, candidate, _, _ in chosen]
    with _ready(task.model, task.batch, task.budget_bytes) as ready:
        fits = [meter_trial(candidate, ready.setup, whole=True).feasible for candidate in candidates]
        times = _times(candidates, ready.setup, rounds)
    return [
        Found(
            task=task.name,
            budget=format_bytes(task.budget_bytes),
            method=name,
            choice=str(candidate),
            search_seconds=seconds,
            out_of_memory=ran_out,
            fits=fit,
            step_seconds=times[candidate],
            ratio=times[candidate] / times[candidates[0]],
        )
        for (name, candidate, seconds, ran_out), fit in zip(chosen, fits, strict=True)
    ]


def _split(size: int, target: int) -> Candidate:
    """The target in micro-batches of at most `size`, without any of autofit's knobs."""
    steps = -(-target // size)
    return Candidate(micro_batch_size=-(-target // steps), accumulation_steps=steps)


def _times(candidates: Sequence[Candidate], setup: Any, rounds: int) -> dict[Candidate, float]:
    """Median seconds of a step of each different candidate, measured in turn."""
    distinct = list(dict.fromkeys(candidates))
    samples: dict[Candidate, list[float]] = {candidate: [] for candidate in distinct}
    for _ in range(rounds):
        for candidate, seconds in zip(distinct, measure_in_turn(setup, distinct), strict=True):
            samples[candidate] += seconds
        setup.recover()
    return {candidate: statistics.median(seconds) for candidate, seconds in samples.items()}


def table(found: Sequence[Found]) -> str:
    """A method a line; `*` marks a choice that does not fit as a whole effective step."""
    lines = [f"{'task':20}{'budget':>10}  {'method':22}{'choice':42}{'search':>8}{'OOM':>5}{'step':>10}{'ratio':>8}"]
    lines += [
        f"{f.task:20}{f.budget:>10}  {f.method:22}{f.choice:42}{f.search_seconds:6.1f} s{f.out_of_memory:5d}"
        f"{f.step_seconds * 1e3:7.0f} ms{f.ratio:7.2f}{' ' if f.fits else '*'}"
        for f in found
    ]
    return "\n".join(lines)


def summary(found: Sequence[Found]) -> str:
    """The geometric mean of the peers' steps to autofit's, over the choices that fit; the least; what does not fit."""
    lines = []
    for method in PEERS:
        own = [f for f in found if f.method == method]
        ratios = [f.ratio for f in own if f.fits]
        mean = f"{_mean(ratios):.3f}, least {min(ratios):.3f}" if ratios else "none"
        lines.append(f"{method:22} geometric mean {mean}; {len(own) - len(ratios)} of {len(own)} do not fit")
    ratios = [f.ratio for f in found if f.fits and f.method in PEERS]
    lines.append(f"{'all peers':22} geometric mean {_mean(ratios):.3f}, least {min(ratios):.3f}")
    return "\n".join(lines)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> None:
    """Runs every method on every task, prints the table and the ratios."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3, help="how often the steps are measured in turn")
    parser.add_argument("--quick", action="store_true", help="only the first model, under one budget")
    add_out(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found: list[Found] = []
    for task in islice(tasks(), 1) if arguments.quick else tasks():
        new = compare(task, rounds=arguments.rounds)
        found += new
        print(table(new), flush=True)
    print(summary(found))
    ratios = [f.ratio for f in found if f.fits and f.method in PEERS]
    unfit = sum(not f.fits for f in found if f.method in PEERS)
    figures = {"peer_over_autofit_mean": round(_mean(ratios), 3), "least": round(min(ratios), 3), "do_not_fit": unfit}
    write(arguments.out, figures=figures | {"choices": len(ratios) + unfit}, rows=[asdict(f) for f in found])


if __name__ == "__main__":
    main()
