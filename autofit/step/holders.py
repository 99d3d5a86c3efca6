"""Which tensors outlive the step that made them: where they were made, and who holds them."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.units import format_bytes

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_DEPTH = 3


@dataclass(frozen=True)
class Survivors:
    """Tensors made in one step at `place` (file and line) and alive after it; `holder` names who holds the last one."""

    place: str | None
    count: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    holder: str | None

    def describe(self) -> str:
        """In one sentence, for people."""
        if self.place is None:
            return "No tensor of the step itself is held; look at what is kept between steps, such as a sum of losses"
        what = f"{self.count} tensor{'s' if self.count > 1 else ''} ({format_bytes(self.bytes)} a step"
        example = f"such as {self.dtype} {list(self.shape)})"
        held = (
            f"held by {self.holder}" if self.holder else "held by an autograd graph or by code that Python cannot see"
        )
        return f"{what}, {example} made at {self.place} outlive their step, {held}"


class Birthplaces(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hook untyped
    """Follows one step: writes down for every tensor that an operator returns which line of the user's code ran it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.followed = False
        self._born: list[tuple[ref[Tensor], str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        place = None
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                place = place or _users_line(sys._getframe(1))
                self._born.append((ref(tensor), place))
        return result

    def follow(self) -> None:
        """A step begins."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """The step has ended."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.followed = True

    def survivors(self) -> Survivors:
        """Those of the line that most bytes are left of; parameters, gradients and the like are none."""
        alive = [(tensor, place) for reference, place in self._born if (tensor := reference()) is not None]
        kept = _kept_anyway()
        alive = [(tensor, place) for tensor, place in alive if tensor.untyped_storage()._cdata not in kept]
        by_place: Counter[str] = Counter()
        storages: dict[int, tuple[Tensor, str]] = {t.untyped_storage()._cdata: (t, place) for t, place in alive}
        for tensor, place in storages.values():
            by_place[place] += tensor.untyped_storage().nbytes()
        if not by_place:
            return Survivors(None, 0, 0, (), "", None)
        (place, size), *_ = by_place.most_common(1)
        theirs = [tensor for tensor, other in storages.values() if other == place]
        example = max(theirs, key=lambda tensor: tensor.untyped_storage().nbytes())
        dtype = str(example.dtype).removeprefix("torch.")
        holder = holder_of(example, ignored=(alive, storages, theirs))
        return Survivors(place, len(theirs), size, tuple(example.shape), dtype, holder)


def _users_line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor autofit's."""
    while frame is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _kept_anyway() -> set[int]:
    """Storages of parameters, their gradients and buffers of all modules, and of optimizer states."""
    found: list[Any] = []
    for item in gc.get_objects():
        if issubclass(type(item), nn.Module):
            found += [*item._parameters.values(), *item._buffers.values()]
        elif issubclass(type(item), torch.optim.Optimizer):
            found += [value for state in item.state.values() if isinstance(state, dict) for value in state.values()]
    tensors = [tensor for tensor in found if isinstance(tensor, Tensor) and tensor.layout is torch.strided]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_meta}


def holder_of(tensor: Tensor, *, ignored: tuple[Any, ...]) -> str | None:
    """Who holds a tensor, as `outputs` of Net or `losses` in train(): up through containers to what has a name."""
    skipped = {id(item) for item in ignored}
    level: list[Any] = [tensor]
    for _ in range(_DEPTH):
        for item in level:
            name = _local_name(item)
            if name is not None:
                return name
        above: list[Any] = []
        for item in level:
            for referrer in gc.get_referrers(item):
                if id(referrer) in skipped or referrer is level or isinstance(referrer, FrameType):
                    continue
                name = _attribute_name(referrer, item)
                if name is not None:
                    return name
                if isinstance(referrer, (list, tuple, dict, set)):
                    above.append(referrer)
        skipped |= {id(above), id(level)}
        level = above
    return None


def _local_name(item: Any) -> str | None:
    """The variable of a function that is running now."""
    for frame in _frames():
        for name, value in frame.f_locals.items():
            if value is item:
                function = frame.f_code.co_name
                return f"`{name}` in {'the module' if function == '<module>' else f'{function}()'}"
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            yield frame
        frame = frame.f_back


def _attribute_name(referrer: Any, item: Any) -> str | None:
    """The attribute of an object or module under which `referrer`, or the object that it is the dict of, has `item`."""
    owner = referrer
    if isinstance(referrer, dict):
        owner = next((o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer), None)
    if owner is None or isinstance(owner, (list, tuple, set, type, Tensor)) or not hasattr(owner, "__dict__"):
        return None
    name = next((key for key, value in vars(owner).items() if value is item), None)
    if name is None:
        return None
    return f"`{name}` of {owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__}"
