"""What goes wrong slowly: memory that grows from step to step, an allocator that thrashes, a loader that is too slow.

Watching costs next to nothing: clocks are read at two steps in `EVERY`, memory at one, and less often where reading
takes long. Each finding is logged once, as a warning.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import deque
from itertools import pairwise
from typing import Any, Protocol

import torch

from autofit.step.holders import Birthplaces, Survivors
from autofit.units import format_bytes

logger = logging.getLogger(__name__)

EVERY = 10
# Samples that a finding needs: growth at every one of so many readings, or the median of so many shares.
SAMPLES = 8
# Reading memory may take this share of the time of training.
READING_SHARE = 0.002
# Less growth per step than this would take millions of steps to fill a device.
NEGLIGIBLE_BYTES = 1024
# More of the time spent between steps than in them: whatever fills the gap is slower than the step.
SLOW_SHARE = 0.5


class Watch:
    """Counters of one training: what was seen so far, and what was said.

    `waiting_share` is the share of the time that goes by between steps, where the loader works, as the median of the
    last samples. `alloc_retries` counts how often the allocator had to give back what it cached and try again since
    watching began. `growth_bytes` is how much live memory grows per step, where it grows without end; `held` are the
    tensors that this comes from. `enabled` switches it off.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = True
        self.waiting_share: float | None = None
        self.alloc_retries = 0
        self.growth_bytes: int | None = None
        self.held: Survivors | None = None
        self._clock: Clock = _HostClock() if device.type != "cuda" else _DeviceClock(device)
        self._memory = _Memory(device)
        self._steps = 0
        self._moments: list[Any] = []
        self._shares: deque[float] = deque(maxlen=SAMPLES)
        self._live: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        self._retries: deque[int] = deque(maxlen=SAMPLES)
        self._birthplaces: Birthplaces | None = None
        self._said: set[str] = set()

    def begin(self) -> None:
        """A step begins: nothing of it is alive yet, and what is left of the one before will stay."""
        if not self.enabled:
            return
        phase = self._steps % EVERY
        if self._birthplaces is not None:
            self._name_holders(self._birthplaces)
        if phase >= EVERY - 2:
            self._moments.append(self._clock.now())
        elif phase == 0 and self._steps and self._memory.due():  # before the first step not all is there that stays
            self._read_memory()
        elif phase == 1 and self._moments:
            self._read_clock()
        if self._birthplaces is not None:
            self._birthplaces.follow()

    def end(self) -> None:
        """The step has ended, well or not."""
        if not self.enabled:
            return
        if self._birthplaces is not None:
            self._birthplaces.stop()
        if self._steps % EVERY == EVERY - 2:
            self._moments.append(self._clock.now())
        self._steps += 1

    def interrupted(self) -> None:
        """Something else than loading runs between two steps, such as an evaluation: that gap says nothing."""
        self._moments.clear()

    def _read_clock(self) -> None:
        """The start and end of one step and the start of the next, read when the device has passed them."""
        moments, self._moments = self._moments, []
        if len(moments) != 3 or not self._clock.passed(moments[2]):
            return
        step, gap = (self._clock.seconds(a, b) for a, b in pairwise(moments))
        self._shares.append(gap / (step + gap) if step + gap > 0 else 0.0)
        self.waiting_share = statistics.median(self._shares)
        if len(self._shares) == SAMPLES and self.waiting_share > SLOW_SHARE:
            self._say(
                "waiting",
                f"{self.waiting_share:.0%} of the time goes by between steps, where the data loader works: it is "
                "slower than the step. Give it more workers (num_workers), pin_memory=True, or less to do per sample",
            )

    def _read_memory(self) -> None:
        live, retries = self._memory.read()
        self._live.append((self._steps, live))
        self._retries.append(retries)
        self.alloc_retries = retries - self._memory.retries_before
        if len(self._live) < SAMPLES:
            return
        self._judge_growth()
        grew = sum(b > a for a, b in pairwise(self._retries))
        if grew >= SAMPLES // 2:
            self._say(
                "thrashing",
                f"the allocator had to give back what it cached and try again {self.alloc_retries} times: memory is "
                "nearly full, and each time costs milliseconds. Use a smaller micro-batch or a larger budget",
            )

    def _judge_growth(self) -> None:
        (first_step, first), *_, (last_step, last) = self._live
        sizes = [live for _, live in self._live]
        per_step = (last - first) // (last_step - first_step)
        grows = per_step >= NEGLIGIBLE_BYTES and all(b > a for a, b in pairwise(sizes))
        self.growth_bytes = per_step if grows else None
        if grows and self._birthplaces is None and "growth" not in self._said:
            self._birthplaces = Birthplaces()

    def _name_holders(self, birthplaces: Birthplaces) -> None:
        """One step was followed; what it made and is still alive is what grows."""
        if not birthplaces.followed:
            return
        self._birthplaces = None
        self.held = birthplaces.survivors()
        if self.growth_bytes is not None:
            self._say(
                "growth",
                f"memory in use grows by {format_bytes(self.growth_bytes)} a step and was never given back over "
                f"{self._live[-1][0] - self._live[0][0]} steps. {self.held.describe()}",
            )

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("after %d steps %s.", self._steps, text)


class _Memory:
    """Live bytes of a device and the allocator's retries, and how often they may be read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0.0
        self.retries_before = self._retries()

    def due(self) -> bool:
        """Whether reading is affordable again."""
        return time.perf_counter() >= self._next

    def read(self) -> tuple[int, int]:
        """Live bytes and retries, now."""
        began = time.perf_counter()
        live, retries = self._live_bytes(), self._retries()
        ended = time.perf_counter()
        self._next = ended + (ended - began) / READING_SHARE
        return live, retries

    def _live_bytes(self) -> int:
        if self._device.type in ("cuda", "xpu"):
            return int(torch.accelerator.memory_allocated(self._device))
        if self._device.type == "mps":
            return int(torch.mps.current_allocated_memory())
        return host_tensor_bytes()

    def _retries(self) -> int:
        if self._device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def host_tensor_bytes() -> int:
    """Bytes of the plain tensors of the host that Python knows of, each storage once."""
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor and item.layout is torch.strided and item.is_cpu:
            storage = item.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class Clock(Protocol):
    """Moments of a step, on the clock that counts."""

    def now(self) -> Any:
        """This moment."""

    def passed(self, moment: Any) -> bool:
        """Whether the device has come to it, so that it can be read without waiting."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to a later one."""


class _HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def passed(self, moment: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _DeviceClock:
    """The device's own time: the host runs ahead of it, so a gap counts only if the device has nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def passed(self, moment: torch.Event) -> bool:
        return moment.query()

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        return start.elapsed_time(end) / 1000
