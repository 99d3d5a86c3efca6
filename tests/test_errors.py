"""Errors carry facts and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from autofit import errors

EXAMPLES = [
    errors.AutofitError("a"),
    errors.ConfigError("b"),
    errors.InfeasibleError("c", budget_bytes=1, smallest_peak_bytes=2),
    errors.StepError("d", phase="forward"),
    errors.DeviceLostError("e"),
    errors.StorageError("s"),
    errors.PlanMismatchError("f", differences=("device",)),
    errors.RestoreError("g", state=("weights",)),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling(error: errors.AutofitError) -> None:
    """Type, message and facts arrive in another process."""
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_the_tree() -> None:
    """Everything is an AutofitError; what a caller got wrong is a ValueError too."""
    assert all(isinstance(error, errors.AutofitError) for error in EXAMPLES)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.PlanMismatchError, ValueError)
