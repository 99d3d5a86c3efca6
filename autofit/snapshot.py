"""Everything that a training step can change: captured, rewound between trials, and put back bit for bit.

Nothing is deep-copied. Bytes of tensors on the tuned device are copied to the host, storage by storage, so that ties
and views stay what they are; what else modules and the optimizer hold is remembered in place, see `attributes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.attributes import Attributes
from autofit.errors import DeviceLostError, RestoreError
from autofit.flags import Flags
from autofit.interrupts import uninterrupted
from autofit.oom import drain_backward, release_frames
from autofit.random_states import RandomStates

logger = logging.getLogger(__name__)

PutBack = Callable[[], list[str]]


@contextmanager
def restored(
    model: nn.Module, optimizer: Optimizer | None, *, device: torch.device, beside: Iterable[Any] = ()
) -> Iterator[Snapshot]:
    """Whatever happens inside, afterwards all of it is what it was: returned, raised or interrupted.

    `beside` may have further modules that take part, as a loss with a state of its own does; all else in it is let be.
    Raises RestoreError, from the error that was under way if there is one, when something cannot be put back.
    """
    snapshot = None
    under_way: BaseException | None = None
    try:
        with uninterrupted():
            snapshot = Snapshot(model, optimizer, device=device, beside=beside)
        yield snapshot
    except BaseException as error:
        under_way = error
        raise
    finally:
        if snapshot is not None:
            with uninterrupted():
                _restore(snapshot, under_way)
        del under_way  # a frame that holds its own exception is a cycle, and it holds tensors


def _restore(snapshot: Snapshot, under_way: BaseException | None) -> None:
    """Restores, and lets the error under way stand where that is a lost device, whose memory nothing can restore."""
    try:
        snapshot.restore()
    except RestoreError as error:
        if not isinstance(under_way, DeviceLostError):
            raise
        under_way.add_note(str(error))


class Snapshot:
    """The state of a model, its optimizer, the random generators and torch's switches at one moment.

    `host_bytes` is the host memory that the copies take.

    `rewind()` puts the values back so that every trial starts from the same state; gradients stay away. `restore()`
    puts back everything, gradients too. Both may be called at any time, `restore()` last.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device,
        beside: Iterable[Any] = (),
    ) -> None:
        flags = Flags()
        random_states = RandomStates(device)
        modules = [model, *filter(None, map(_module_of, beside))]
        attributes = Attributes([inner for module in modules for inner in module.modules()])
        if optimizer is not None:
            attributes.add(vars(optimizer), "optimizer")
        # A loss may lie elsewhere than the model that is tuned.
        devices = {device, *(tensor.device for module in modules[1:] for tensor in _own_tensors(module))}
        tensors = _Tensors(attributes.tensors, devices)
        self._gradients = _Gradients(attributes.tensors, device)
        self._parts: dict[str, PutBack] = {
            "attributes": attributes.put_back,
            "tensors": tensors.put_back,
            "random states": random_states.put_back,
            "switches": flags.put_back,
        }
        self.host_bytes = tensors.host_bytes + self._gradients.host_bytes

    def rewind(self) -> None:
        """Puts every value back to where it was and drops all gradients; raises RestoreError naming what it cannot."""
        self._gradients.drop()
        _put_back_all(self._parts)

    def restore(self) -> None:
        """Puts everything back, the gradients included; raises RestoreError naming what it cannot."""
        _put_back_all({**self._parts, "gradients": self._gradients.put_back})


def _module_of(function: Any) -> nn.Module | None:
    """The module that is called: itself, or the one that a method or a partial of it belongs to."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__self__", function)
    return found if isinstance(found, nn.Module) else None


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _put_back_all(parts: dict[str, PutBack]) -> None:
    """Every part is put back even if another cannot be; one that fails is tried once more, without what it held.

    An interrupt that comes between is raised when all is done.
    """
    drain_backward()
    failed: list[str] = []
    interrupt: BaseException | None = None
    for name, put_back in parts.items():
        for attempts_left in (1, 0):
            try:
                failed += put_back()
            except Exception as error:
                release_frames(error)
                if not attempts_left:
                    logger.exception("the %s could not be put back", name)
                    failed.append(f"{name} ({error})")
            except BaseException as error:
                release_frames(error)
                interrupt = error
                if not attempts_left:
                    failed.append(name)
            else:
                break
    if interrupt is not None and not failed:
        raise interrupt
    if failed:
        message = f"Not put back: {'; '.join(failed)}. Do not go on with this model: load it again."
        raise RestoreError(message, state=tuple(failed))


class _Tensors:
    """The bytes under all tensors of the devices, and which bytes each tensor looks at."""

    def __init__(self, tensors: dict[int, tuple[str, torch.Tensor]], devices: Collection[torch.device]) -> None:
        self._aliases = [(name, t, t.detach(), t.requires_grad) for name, t in tensors.values() if _is_plain(t)]
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        seen: set[int] = set()
        for _, tensor in tensors.values():
            for storage in storages_of(tensor):
                if storage.device in devices and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    self._copies.append((storage, host_copy(storage)))
        self.host_bytes = sum(saved.numel() for _, saved in self._copies)

    def put_back(self) -> list[str]:
        failed = []
        for storage, saved in self._copies:
            if storage.nbytes() != saved.numel():
                storage.resize_(saved.numel())
            as_bytes(storage).copy_(saved)
        for name, tensor, alias, requires_grad in self._aliases:
            if not _same_view(tensor, alias):
                tensor.data = alias
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            if not _same_view(tensor, alias):
                failed.append(name)
        return failed


class _Gradients:
    """The gradients that the user's parameters carry: moved to the host while tuning, so that they take no memory."""

    def __init__(self, tensors: dict[int, tuple[str, torch.Tensor]], device: torch.device) -> None:
        self._leaves = [tensor for _, tensor in tensors.values() if tensor.is_leaf]
        self._gradients = [tensor.grad for tensor in self._leaves]
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        seen: set[int] = set()
        for gradient in self._gradients:
            for storage in storages_of(gradient) if gradient is not None else ():
                if storage.device == device and storage._cdata not in seen and storage.resizable():
                    seen.add(storage._cdata)
                    self._offloaded.append((storage, host_copy(storage)))
        self.host_bytes = sum(saved.numel() for _, saved in self._offloaded)
        try:
            for storage, _ in self._offloaded:
                storage.resize_(0)
            self.drop()
        except BaseException:
            self.put_back()
            raise

    def drop(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def put_back(self) -> list[str]:
        for storage, saved in self._offloaded:
            storage.resize_(saved.numel())
            as_bytes(storage).copy_(saved)
        for leaf, gradient in zip(self._leaves, self._gradients, strict=True):
            leaf.grad = gradient
        return []


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages under a tensor: one for a plain tensor, several for a subclass that wraps others, none on `meta`."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A one-dimensional uint8 tensor that looks at the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_copy(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes, in host memory of their own."""
    return as_bytes(storage).to("cpu", copy=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def _same_view(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    return bool(
        tensor.dtype == alias.dtype
        and tensor.device == alias.device
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
    )
