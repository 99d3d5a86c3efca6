"""Lightning: a callback that tunes before fit, and trains as the plan says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from autofit.candidate import Candidate, Precision, SearchSpace
from autofit.errors import ConfigError
from autofit.flags import float32_arithmetic
from autofit.integrations.even import even_split
from autofit.integrations.loaders import first_batch, with_batch_size
from autofit.plan import Plan
from autofit.step.checkpointing import CheckpointPlan
from autofit.tuner import tune

try:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision
except ImportError as error:
    raise ImportError(f"The callback needs lightning: pip install 'torch-autofit[lightning]' ({error})") from error

logger = logging.getLogger(__name__)

_OURS: dict[str, Precision | None] = {"32-true": None, "bf16-mixed": "bfloat16", "16-mixed": "float16"}
_THEIRS: dict[Precision, Any] = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}


class TuneBeforeFit(pl.Callback):
    """Tunes when `fit` begins, on the module's own `training_step` and optimizer, and trains with the plan.

    `Trainer(callbacks=[TuneBeforeFit(budget="8GiB")])`. What was the loader's batch size times
    `accumulate_grad_batches` is the target, unless `target_batch` says otherwise; the number of optimizer steps, and so
    a schedule of the learning rate, stays what it was. The plan sets the loader's batch size, accumulation, precision
    and checkpointing. A `precision` given to the Trainer is kept. Further options are those of `autofit.tune`; a `plan`
    is used as it is, without tuning. Afterwards `plan` holds it.

    Raises ConfigError for manual optimization, several optimizers or loaders, and several devices.
    """

    def __init__(
        self,
        *,
        target_batch: int | None = None,
        space: SearchSpace | None = None,
        plan: Plan | None = None,
        **tune_options: Any,
    ) -> None:
        self.plan = plan
        self._target_batch = target_batch
        self._space = space or SearchSpace()
        self._tune_options = tune_options
        self._in_force = ExitStack()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model and optimizer are on their device now, and no batch has been loaded."""
        self._in_force.close()
        loader = _loader(trainer)
        if self.plan is None:
            self.plan = self._tune(trainer, pl_module, loader)
        size, steps = even_split(self.plan, "Lightning")
        logger.info("training with %s", self.plan.candidate)
        trainer.accumulate_grad_batches = steps
        source = trainer.fit_loop._data_source
        self._in_force.callback(setattr, source, "instance", source.instance)
        source.instance = with_batch_size(loader, size)
        trainer.fit_loop._combined_loader = None  # a schedule that asked for the number of steps has loaded it already
        self._set_precision(trainer, self.plan.candidate)
        self._in_force.enter_context(CheckpointPlan(pl_module, self.plan.candidate.checkpointing).active())

    def _tune(self, trainer: pl.Trainer, module: pl.LightningModule, loader: DataLoader[Any]) -> Plan:
        if not module.automatic_optimization:
            raise ConfigError("A module with manual optimization steps by itself; tune it with autofit.tune instead.")
        if trainer.world_size > 1 or len(trainer.optimizers) != 1:
            raise ConfigError(
                f"TuneBeforeFit works on one device with one optimizer; this Trainer has {trainer.world_size} ranks "
                f"and {len(trainer.optimizers)} optimizers. Tune before, and pass plan=."
            )
        device = trainer.strategy.root_device
        target = self._target_batch or (loader.batch_size or 1) * trainer.accumulate_grad_batches
        space = self._space.model_copy(update={"even_split": True, **_fixed_precision(trainer, self._space)})
        with _silent(module):
            return tune(
                module,
                first_batch(loader, device),
                target_batch=target,
                compute_loss=_training_step,
                optimizer=trainer.optimizers[0],
                device=device,
                space=space,
                **self._tune_options,
            )

    def _set_precision(self, trainer: pl.Trainer, candidate: Candidate) -> None:
        device = trainer.strategy.root_device
        theirs = _THEIRS.get(candidate.precision)
        if theirs is None and device.type == "cuda":
            self._in_force.enter_context(float32_arithmetic("tf32" if candidate.precision == "tf32" else "ieee"))
        elif theirs is not None and trainer.precision != theirs:
            connector = trainer._accelerator_connector
            before = connector.precision_plugin
            plugin = MixedPrecision(theirs, device.type)
            for owner in (connector, trainer.strategy):
                self._in_force.callback(setattr, owner, "precision_plugin", before)
                owner.precision_plugin = plugin

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Model, loader and precision are again what they were."""
        self._in_force.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """After an exception too."""
        self._in_force.close()


def _loader(trainer: pl.Trainer) -> DataLoader[Any]:
    """The only training loader."""
    loader = trainer.fit_loop._data_source.dataloader()
    if isinstance(loader, DataLoader):
        return loader
    raise ConfigError(f"TuneBeforeFit needs one torch DataLoader to train from, got {type(loader).__name__}.")


def _fixed_precision(trainer: pl.Trainer, space: SearchSpace) -> dict[str, Any]:
    """A precision that the Trainer was given is kept."""
    given = str(trainer.precision)
    if given not in _OURS:
        raise ConfigError(f"Precision {given!r} is not known here. Allowed: {', '.join(map(repr, _OURS))}.")
    fixed = _OURS[given]
    return {} if fixed is None else {"precision": (fixed,)}


def _training_step(module: Any, batch: Any) -> torch.Tensor:
    """The loss of the module's own training step."""
    result = module.training_step(batch, 0)
    loss = result["loss"] if isinstance(result, dict) else result
    if loss is None:
        raise ConfigError(f"{type(module).__name__}.training_step returned no loss, so there is nothing to tune.")
    return cast(torch.Tensor, loss)


@contextmanager
def _silent(module: pl.LightningModule) -> Iterator[None]:
    """`self.log` does nothing inside: no loop is running that could take what is logged."""
    names = ("log", "log_dict")
    for name in names:
        vars(module)[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]
