"""Lightning with a callback that tunes before fit: its own loop, its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autofit
from autofit.errors import ConfigError
from tests.integrations.conftest import watch_sizes
from tests.states import FullState

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from autofit.integrations.lightning import TuneBeforeFit  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated.*"),
]


class Images(pl.LightningModule):
    """A small CNN; what training_step logs and returns is up to it."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(288, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader(samples: int = 64, batch_size: int = 16, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (samples,), generator=generator)
    images = torch.randn(samples, 3, 8, 8, generator=generator) + labels[:, None, None, None]
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, **options)


def trainer_with(callback: Any, folder: Path, **options: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 3),
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def space(**values: Any) -> autofit.SearchSpace:
    return autofit.SearchSpace(**{"accumulation_steps": [4], "precision": "float32", "checkpointing": "none", **values})


@pytest.mark.parametrize("mode", ["none", "full"])
def test_it_tunes_before_fit_and_trains_as_the_plan_says(tmp_path: Path, mode: str) -> None:
    """The loader's batch of 16 becomes 4 micro-batches of 4: as many optimizer steps as before, and the loss falls."""
    torch.manual_seed(0)
    model, train = Images(), loader()
    callback = TuneBeforeFit(space=space(checkpointing=mode), max_trials=1)
    trainer = trainer_with(callback, tmp_path)
    trainer.fit(model, train)
    assert callback.plan.target_batch == 16
    assert callback.plan.candidate.micro_batch_size == 4
    assert callback.plan.candidate.checkpointing.mode == mode
    assert trainer.global_step == 12
    assert len(model.losses) == 48
    assert sum(model.losses[-8:]) < sum(model.losses[:8])
    assert train.batch_size == 16
    assert not any("forward" in vars(module) for module in model.modules())
    assert "log" not in vars(model)


def test_the_plan_is_the_module_s_own_step(tmp_path: Path) -> None:
    """Blocks are recomputed while training, and sizes are the plan's; tuning itself changed nothing."""
    torch.manual_seed(0)
    model = Images()
    inside = watch_sizes(model.net[1][0][0])
    plans: list[Any] = []

    class Look(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            plans.append(FullState(model, trainer.optimizers[0]).differences(model, trainer.optimizers[0]))
            inside.clear()

    callback = TuneBeforeFit(space=space(checkpointing="full"), max_trials=1)
    trainer = trainer_with(callback, tmp_path, max_epochs=1)
    trainer.callbacks.append(Look())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before_training: dict[str, Tensor] = {}
    model.on_train_start = lambda: before_training.update({n: v.clone() for n, v in model.state_dict().items()})
    trainer.fit(model, loader())
    assert all(torch.equal(start[name], before_training[name]) for name in start)
    assert inside == [4] * 32


def test_random_order_and_precision_stay_the_users(tmp_path: Path) -> None:
    """A shuffled loader gives the same order as without the callback; a precision of the Trainer's is kept."""
    orders = []
    for callback in (pl.Callback(), TuneBeforeFit(space=space(accumulation_steps=[1], precision=None), max_trials=1)):
        torch.manual_seed(0)
        model = Images()
        seen: list[Tensor] = []
        model.on_train_batch_start = lambda batch, index, seen=seen: seen.append(batch[1])
        shuffled = loader(shuffle=True, generator=torch.Generator().manual_seed(5))
        trainer = trainer_with(callback, tmp_path, max_epochs=1, precision="bf16-mixed")
        trainer.fit(model, shuffled)
        orders.append(torch.cat(seen))
    assert torch.equal(*orders)
    assert callback.plan.candidate.precision == "bfloat16"


def test_a_precision_of_the_plan_is_set_and_put_back(tmp_path: Path) -> None:
    """bfloat16 autocast while it trains, also with a plan that was made before."""
    torch.manual_seed(0)
    callback = TuneBeforeFit(space=space(precision="bfloat16"), max_trials=1)
    trainer_with(callback, tmp_path, max_epochs=1).fit(Images(), loader())
    model = Images()
    dtypes: set[torch.dtype] = set()
    model.net[3].register_forward_hook(lambda *a: dtypes.add(a[2].dtype))
    trainer = trainer_with(TuneBeforeFit(plan=callback.plan), tmp_path, max_epochs=1)
    trainer.fit(model, loader())
    assert dtypes == {torch.bfloat16}
    assert str(trainer.precision) == "32-true"


def test_the_model_is_put_back_after_an_exception(tmp_path: Path) -> None:
    """Also when training fails in the middle."""
    model = Images()
    callback = TuneBeforeFit(space=space(checkpointing="full"), max_trials=1)

    def fail(*_: Any) -> None:
        assert any("forward" in vars(module) for module in model.modules())
        raise KeyError("a fault of the user's")

    model.on_train_batch_end = fail
    with pytest.raises(KeyError, match="a fault"):
        trainer_with(callback, tmp_path).fit(model, loader())
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_it_cannot_tune(tmp_path: Path) -> None:
    """Manual optimization, several loaders, a batch sampler: each with what to do instead."""
    model = Images()
    model.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual optimization"):
        trainer_with(TuneBeforeFit(), tmp_path).fit(model, loader())
    with pytest.raises(ConfigError, match="one torch DataLoader"):
        trainer_with(TuneBeforeFit(), tmp_path).fit(Images(), [loader(), loader()])
    batches = torch.utils.data.BatchSampler(range(8), batch_size=4, drop_last=False)
    own = DataLoader(loader().dataset, batch_sampler=batches)
    with pytest.raises(ConfigError, match="batch_sampler"):
        trainer_with(TuneBeforeFit(), tmp_path).fit(Images(), own)
