"""From what the user allows to what the allocator may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autofit.device import DeviceInfo, free_bytes, reserve_bytes, reserved_bytes
from autofit.distributed import Team
from autofit.errors import ConfigError
from autofit.memory import Meter
from autofit.units import format_bytes, parse_budget


@dataclass(frozen=True)
class Budget:
    """`budget_bytes` is for the whole process on the device; `cap_bytes` of it for the allocator, the rest is outside.

    `note` says in one sentence what was assumed.
    """

    budget_bytes: int
    cap_bytes: int
    outside_bytes: int
    note: str


def resolve_budget(budget: str | int | float | None, *, info: DeviceInfo, meter: Meter) -> Budget:
    """The budget that the user named, or else what is free now for this process less a small reserve.

    What the allocator of this process holds already counts as free. Raises ConfigError when the budget is above the
    device or leaves nothing for the allocator.
    """
    outside = meter.outside_bytes()
    if budget is not None:
        total = parse_budget(budget, total_bytes=info.total_bytes)
        note = f"The budget of {format_bytes(total)} is for this process on {info.name}"
    else:
        reserve = reserve_bytes(info.total_bytes)
        total = min(free_bytes(info.device) + reserved_bytes(info.device) + outside - reserve, info.total_bytes)
        note = (
            f"No budget was given: {format_bytes(total)} is what is free on {info.name}, less {format_bytes(reserve)}"
        )
    if outside:
        note += f"; {format_bytes(outside)} of it lie outside the allocator (context and libraries)"
    if info.device.type == "cpu":
        note += ". There is no VRAM to tune: tensors are counted as a CUDA device would hold them"
    cap = total - outside
    if cap <= 0:
        raise ConfigError(
            f"The budget of {format_bytes(total)} leaves nothing for tensors: the device context and libraries use "
            f"{format_bytes(outside)} outside the allocator. The device has {format_bytes(info.total_bytes)}."
        )
    return Budget(total, cap, outside, note + ".")


def smallest_budget(own: Budget, team: Team) -> Budget:
    """The budget of the rank whose allocator may hold least: it decides for all ranks of the team."""
    budgets = team.gather((own.cap_bytes, own.budget_bytes))
    cap, budget = min(budgets)
    rank = budgets.index((cap, budget))
    if max(budgets) == min(budgets):
        return replace(own, note=f"{own.note} The other {team.size - 1} ranks have as much.")
    note = (
        f"{own.note} Of the {team.size} ranks, rank {rank} has the least, {format_bytes(budget)}, and decides for all."
    )
    return Budget(budget, cap, own.outside_bytes, note)


def predicted_budget(budget: str | int | float | None, *, info: DeviceInfo, context_bytes: int) -> Budget:
    """The budget on a device that is not here, or else its total memory less a small reserve.

    `context_bytes` of it are taken to lie outside the allocator. Raises ConfigError as `resolve_budget` does.
    """
    if budget is not None:
        total = parse_budget(budget, total_bytes=info.total_bytes)
        note = f"The budget of {format_bytes(total)} is for one process on a {info.name}"
    else:
        reserve = reserve_bytes(info.total_bytes)
        total = info.total_bytes - reserve
        note = (
            f"No budget was given: {format_bytes(total)} is the memory of a {info.name} that nobody else uses, less "
            f"{format_bytes(reserve)}"
        )
    note += f"; {format_bytes(context_bytes)} of it are assumed to be the CUDA context, outside the allocator"
    cap = total - context_bytes
    if cap <= 0:
        raise ConfigError(
            f"The budget of {format_bytes(total)} leaves nothing for tensors: the CUDA context alone is assumed to "
            f"take {format_bytes(context_bytes)}. A {info.name} has {format_bytes(info.total_bytes)}."
        )
    return Budget(total, cap, context_bytes, note + ".")
