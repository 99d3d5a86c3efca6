"""The optimizer of a trial: of the user's kind, and the user's own untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.errors import ConfigError
from autofit.optimizers import optimizer_factory, twin
from autofit.snapshot import restored
from tests.states import FullState


def trained(kind: str, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


KINDS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("AdamW", {"lr": 0.1}),
    ("Adam", {"lr": torch.tensor(0.1)}),
    ("Adagrad", {}),
    ("RMSprop", {}),
    ("RAdam", {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_twin_steps_as_the_original_would(kind: str, options: dict[str, object]) -> None:
    """Kind, arguments and state are honoured: the same step from the same state."""
    model, optimizer = trained(kind, **options)
    expected_model, expected_optimizer = nn.Linear(3, 2), None
    expected_model.load_state_dict(model.state_dict())
    expected_optimizer = getattr(torch.optim, kind)(expected_model.parameters(), **options)
    expected_optimizer.load_state_dict(
        {
            "state": {
                k: {n: v.clone() if torch.is_tensor(v) else v for n, v in s.items()}
                for k, s in optimizer.state_dict()["state"].items()
            },
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
    for network, stepped in ((model, twin(optimizer)), (expected_model, expected_optimizer)):
        network(torch.full((1, 3), 2.0)).sum().backward()
        stepped.step()
    assert torch.equal(model.weight, expected_model.weight)


def test_the_original_is_untouched_even_under_a_scheduler() -> None:
    """A scheduler wraps step() of the original; the twin's step neither counts there nor runs the user's hooks."""
    model, optimizer = trained("SGD", lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fired: list[int] = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    before = FullState(model, optimizer)
    with restored(model, optimizer, device=torch.device("cpu")):
        other = twin(optimizer)
        other.param_groups[0]["lr"] = 3.0
        model(torch.ones(1, 3)).sum().backward()
        weights = model.weight.detach().clone()
        other.step()
        assert not torch.equal(model.weight, weights)
    assert fired == []
    assert scheduler.get_last_lr() == [0.1]
    assert before.differences(model, optimizer) == []


def test_nothing_given_means_adamw_over_what_trains() -> None:
    """Frozen parameters take no optimizer state."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = optimizer_factory(None, model)()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model[1].parameters()]


def test_a_callable_makes_a_new_one_each_time() -> None:
    """No state goes from one trial to the next."""
    model = nn.Linear(2, 2)
    make = optimizer_factory(lambda parameters: torch.optim.SGD(parameters, lr=0.3), model)
    first, second = make(), make()
    assert first is not second
    assert first.param_groups[0]["lr"] == 0.3


def test_what_cannot_be_used_says_so() -> None:
    """A closure, a stranger's parameters, a wrong type, a callable that returns no optimizer."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="closure"):
        optimizer_factory(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        optimizer_factory(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), model)
    with pytest.raises(ConfigError, match="got str"):
        optimizer_factory("adamw", model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got int"):
        optimizer_factory(lambda _: 3, model)  # type: ignore[arg-type,return-value]
