"""A hash of what a plan depends on: the model's structure and code, the batch, the optimizer, and the request.

Values of weights and of the batch do not count. Code counts as compiled, with the functions that it is made of but not
those that it calls.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.batch.nest import leaves


def fingerprint(parts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits; `parts` are JSON values."""
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_model(model: nn.Module) -> list[Any]:
    """Modules with their settings and code; parameters and buffers with shape, type and ties."""
    modules = [
        [name, _kind(module), module.training, module.extra_repr(), describe_function(module.forward)]
        for name, module in model.named_modules()
    ]
    first: dict[int, str] = {}
    tensors = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad, first.setdefault(id(tensor), name)]
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]
    return [modules, tensors]


def describe_batch(batch: Any) -> list[Any]:
    """The leaves with shape, type and kind of device; numbers by value."""
    return [[str(path), _leaf(leaf)] for path, leaf in leaves(batch)]


def describe_optimizer(optimizer: Optimizer) -> list[Any]:
    """Its class, and the settings of every parameter group."""
    groups = [
        [len(group["params"]), {name: repr(value) for name, value in group.items() if name != "params"}]
        for group in optimizer.param_groups
    ]
    return [_kind(optimizer), groups]


def describe_function(function: Any) -> Any:
    """A callable by name and code; a loss that is a module by its structure; a partial by what it binds."""
    if function is None or isinstance(function, str):
        return function
    if isinstance(function, nn.Module):
        return describe_model(function)
    if isinstance(function, functools.partial):
        bound = [repr(function.args), repr(sorted(function.keywords.items()))]
        return [describe_function(function.func), *bound]
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:  # an object that is called, or what is no Python
        code = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004 -- it is callable
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', _kind(function))}"
    digest = code and hashlib.sha256(b"\0".join(_code_bytes(code))).hexdigest()
    return [name, digest, repr(getattr(function, "__defaults__", None)), list(_captured(function))]


def _captured(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield _plain(cell.cell_contents)
        except ValueError:  # not assigned yet
            yield None


def _code_bytes(code: CodeType) -> Iterator[bytes]:
    """What the code does, without where it stands."""
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_bytes(constant)
        else:
            # The order within a frozenset is another one in each process.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()


def _leaf(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [list(leaf.shape), str(leaf.dtype), leaf.device.type]
    return [_kind(leaf), _plain(leaf)]


def _plain(value: Any) -> Any:
    """A number or a text as it is; of anything else, what it is."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else _kind(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
