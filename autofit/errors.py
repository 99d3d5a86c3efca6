"""What can go wrong, as types.

AutofitError
├── ConfigError (ValueError)          the call cannot be meant: what was passed, what is allowed
├── InfeasibleError                   nothing fits: the budget, the smallest peak seen, what would make it fit
├── StepError                         the user's model or loss failed for a reason that is not memory
├── DeviceLostError                   the device context is gone: stop; the best plan so far is attached
├── RankLostError                     a rank of the process group died, hangs or stopped: all ranks start again
├── StorageError                      the study's storage failed; the best plan so far is attached
├── PlanMismatchError (ValueError)    a saved plan meets another model, device or version
└── RestoreError                      state that could not be put back

Everything after the message is keyword-only and has a default, so that every error survives pickling between processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.plan import Plan


class AutofitError(Exception):
    """Base of every error that autofit raises on purpose."""


class ConfigError(AutofitError, ValueError):
    """The call cannot be meant; the message says what was passed, what is allowed and what to try."""


class InfeasibleError(AutofitError):
    """No candidate fits into the budget.

    `smallest_peak_bytes` is the lowest peak that any candidate needed, or had reached when it ran out (None if none got
    that far).
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int | None = None,
        smallest_peak_bytes: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        self.plan = plan


class StepError(AutofitError):
    """The user's model, loss or optimizer failed for a reason that is not memory; the original is `__cause__`."""

    def __init__(self, message: str, *, phase: str | None = None) -> None:
        super().__init__(message)
        self.phase = phase


class DeviceLostError(AutofitError):
    """The device context is gone (device-side assert, illegal access): nothing more can run in this process."""

    def __init__(self, message: str, *, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan


class RankLostError(AutofitError):
    """A rank of the process group died, does not answer, or stopped on an error of its own; `ranks` has its number."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StorageError(AutofitError):
    """The storage of the study failed while trials ran (a full disk, a lost database); the original is `__cause__`.

    `plan` holds what was found until then, the trial under way included.
    """

    def __init__(self, message: str, *, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan


class PlanMismatchError(AutofitError, ValueError):
    """A saved plan meets another model, device or version.

    `differences` names each, as `name: plan has …, here is …`.
    """

    def __init__(self, message: str, *, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class RestoreError(AutofitError):
    """State that could not be put back after tuning; `state` names it."""

    def __init__(self, message: str, *, state: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.state = state
