"""Which blocks to recompute, and how: the cheapest choice of a mode per block under which the step fits.

The profile of a choice, the bytes in use at most in each stretch of the step, is nearly the sum of what each block's
mode changes about it. That model proposes, cheapest first; the exact profile, and then a replay under the cap, decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Choice = tuple[int, ...]  # the number of each block's mode
Floats = NDArray[np.float64]

# Up to so many choices, all are looked at.
ENUMERABLE = 60_000
# How far the model may overrate a choice that is looked at all the same.
SLACK = 0.02
# Replays that fail by fragmentation before more room is left for it; by how much more, of the cap; how often.
PATIENCE, MARGIN, ROUNDS = 8, 0.005, 6
# Passes of exchanges between blocks.
EXCHANGES = 3


@dataclass(frozen=True)
class Problem:
    """`seconds[b, m]` is what block b costs in mode m; mode 0 costs nothing.

    `profile` gives the bytes in use at most in each stretch of the step. `fits` replays the step under the cap; it
    never holds where the profile exceeds `cap_bytes`. It takes longest: once something fits, at most `replays` more
    are spent on making it cheaper.
    """

    seconds: Floats
    profile: Callable[[Choice], Floats]
    fits: Callable[[Choice], bool]
    cap_bytes: int
    replays: int = 24

    @property
    def blocks(self) -> range:
        """The numbers of the blocks."""
        return range(self.seconds.shape[0])

    @property
    def modes(self) -> range:
        """The numbers of the modes."""
        return range(self.seconds.shape[1])

    def cost(self, choice: Choice) -> float:
        """Seconds that the choice takes beyond a step that recomputes nothing."""
        return float(self.seconds[self.blocks, choice].sum())

    def holds(self, choice: Choice) -> bool:
        """Whether the choice really fits; the replay is asked last, for it takes longest."""
        return bool(self.profile(choice).max() <= self.cap_bytes) and self.fits(choice)


def solve(problem: Problem) -> Choice | None:
    """The cheapest choice that fits, None when none was found.

    With few blocks it is the cheapest of all, up to what the model overrates; with many a local optimum.
    """
    nothing = (0,) * len(problem.blocks)
    if problem.holds(nothing):
        return nothing
    model = Model(problem, nothing)
    if len(problem.modes) ** len(problem.blocks) <= ENUMERABLE:
        return _cheapest(problem, model) or _plainest(problem)
    found = _descend(problem, model) or _plainest(problem)
    return None if found is None else _trimmed(problem, found)


class Model:
    """Profiles as a sum: that of one choice, and what changing the mode of each block changes about it."""

    def __init__(self, problem: Problem, around: Choice) -> None:
        self.base = problem.profile(around)
        self.effects = np.zeros((len(problem.blocks), len(problem.modes), len(self.base)))
        for block, mode in product(problem.blocks, problem.modes):
            if mode != around[block] and np.isfinite(problem.seconds[block, mode]):
                changed = (*around[:block], mode, *around[block + 1 :])
                self.effects[block, mode] = problem.profile(changed) - self.base

    def profile(self, choice: Choice) -> Floats:
        """The profile of `choice` by the model."""
        total: Floats = self.base + self.effects[range(len(choice)), choice].sum(axis=0)
        return total

    def correct(self, choice: Choice, profile: Floats) -> None:
        """Makes the model exact at `choice`."""
        self.base = self.base + (profile - self.profile(choice))

    def peaks(self, choices: NDArray[np.int64]) -> Floats:
        """The peaks of many choices, one per row."""
        peaks = np.empty(len(choices))
        for start in range(0, len(choices), 4096):
            rows = choices[start : start + 4096]
            profiles = np.tile(self.base, (len(rows), 1))
            for block in range(rows.shape[1]):
                profiles += self.effects[block, rows[:, block]]
            peaks[start : start + 4096] = profiles.max(axis=1)
        return peaks


def _cheapest(problem: Problem, model: Model) -> Choice | None:
    choices = np.array(list(product(problem.modes, repeat=len(problem.blocks))))
    seconds = problem.seconds[problem.blocks, choices].sum(axis=1)
    possible = np.isfinite(seconds)
    choices, seconds = choices[possible], seconds[possible]
    peaks = model.peaks(choices)
    order = np.lexsort((peaks, seconds))
    room, failures = problem.cap_bytes, 0
    for row in order[peaks[order] <= problem.cap_bytes * (1 + SLACK)]:
        choice = tuple(choices[row].tolist())
        if problem.profile(choice).max() > room:
            continue
        if problem.fits(choice):
            return choice
        failures += 1
        if failures % PATIENCE == 0:
            room -= int(problem.cap_bytes * MARGIN)
    return None


def _plainest(problem: Problem) -> Choice | None:
    """The cheapest choice that fits of those with all blocks in one mode, as far as they can be."""
    allowed = np.isfinite(problem.seconds)
    uniform = {tuple(np.where(allowed[:, mode], mode, 0).tolist()) for mode in problem.modes}
    return next((choice for choice in sorted(uniform, key=problem.cost) if problem.holds(choice)), None)


def _descend(problem: Problem, model: Model) -> Choice | None:
    """A choice that fits, proposed by the model, which is corrected by each that does not."""
    room = float(problem.cap_bytes)
    for attempt in range(ROUNDS):
        choice = _proposed(problem, model, room)
        if choice is None:
            return None
        profile = problem.profile(choice)
        if profile.max() <= problem.cap_bytes:
            if problem.fits(choice):
                return choice
            room = min(room, float(profile.max())) - problem.cap_bytes * MARGIN * 2**attempt
        model.correct(choice, profile)
    return None


def _proposed(problem: Problem, model: Model, room: float) -> Choice | None:
    """From nothing recomputed, by the change that buys most bytes per second; then cheaper by exchanges."""
    choice = [0] * len(problem.blocks)
    profile = model.profile(tuple(choice))
    while (excess := float(np.maximum(profile - room, 0).sum())) > 0:
        changes = model.effects - model.effects[problem.blocks, choice][:, None, :]
        left = np.maximum(profile + changes - room, 0).sum(axis=2)
        costs = problem.seconds - problem.seconds[problem.blocks, choice][:, None]
        rates = np.where(left < excess, (excess - left) / np.maximum(costs, 1e-12), 0)
        block, mode = divmod(int(rates.argmax()), len(problem.modes))
        if rates[block, mode] <= 0:
            return None
        profile = profile + changes[block, mode]
        choice[block] = mode
    for _ in range(EXCHANGES):
        exchanged = [_exchange(problem, model, choice, block, room) for block in _dearest(problem, choice)]
        if not any(exchanged):
            break
    return tuple(choice)


def _dearest(problem: Problem, choice: list[int]) -> list[int]:
    costs = problem.seconds[problem.blocks, choice]
    return [int(block) for block in np.argsort(-costs) if costs[block] > 0]


def _exchange(problem: Problem, model: Model, choice: list[int], block: int, room: float) -> bool:
    """Gives `block` a cheaper mode, at the cost of one other block at most, where that is cheaper still.

    Returns whether it could.
    """
    present = choice[block]
    profile = model.profile(tuple(choice))
    for mode in _cheaper(problem, block, present):
        freed = profile + model.effects[block, mode] - model.effects[block, present]
        if freed.max() <= room:
            choice[block] = mode
            return True
        saved = problem.seconds[block, present] - problem.seconds[block, mode]
        costs = problem.seconds - problem.seconds[problem.blocks, choice][:, None]
        costs[block] = np.inf
        worth = np.argwhere(costs < saved * (1 - 1e-9))
        others = model.effects[worth[:, 0], worth[:, 1]] - model.effects[problem.blocks, choice][worth[:, 0]]
        possible = worth[(freed + others).max(axis=1) <= room] if len(worth) else worth
        if len(possible):
            other, its_mode = min(possible.tolist(), key=lambda pair: costs[pair[0], pair[1]])
            choice[block], choice[other] = mode, its_mode
            return True
    return False


def _cheaper(problem: Problem, block: int, present: int) -> Iterator[int]:
    """The modes of a block that cost less than its present one, cheapest first."""
    costs = problem.seconds[block]
    yield from (int(mode) for mode in np.argsort(costs) if costs[mode] < costs[present])


def _trimmed(problem: Problem, choice: Choice) -> Choice:
    """Gives single blocks cheaper modes as long as the step really fits, the dearest first."""
    present, replays = list(choice), problem.replays
    for block in _dearest(problem, present):
        for mode in _cheaper(problem, block, present[block]):
            trial = (*present[:block], mode, *present[block + 1 :])
            if problem.profile(trial).max() > problem.cap_bytes:
                continue
            if replays == 0:
                return tuple(present)
            replays -= 1
            if problem.fits(trial):
                present[block] = mode
                break
    return tuple(present)
