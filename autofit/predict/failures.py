"""What stops a trace."""

from __future__ import annotations

from autofit.errors import AutofitError


class UntraceableError(AutofitError):
    """The step cannot run on tensors without values: something needs the values or the device.

    `operator` is the last one that was called, `module` the last submodule that was entered. The step itself may be
    sound: measure it instead. The original error is `__cause__`.
    """

    def __init__(self, message: str, *, operator: str | None = None, module: str | None = None) -> None:
        super().__init__(message)
        self.operator = operator
        self.module = module
