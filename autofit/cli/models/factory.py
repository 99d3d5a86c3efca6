"""Models of the user's own: `package.module:factory` or `file.py:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import autofit
from autofit.cli.models.workload import Workload, near_misses, refuse_option
from autofit.errors import AutofitError, ConfigError


def load(name: str, *, image_size: int | None, sequence_length: int | None) -> Workload:
    """Imports the module, calls the factory and takes its dict of `tune`'s arguments apart.

    Raises ConfigError, with the cause, when the module cannot be imported, the factory fails, or what it returns is not
    a dict with a model and a sample batch.
    """
    because = "its factory makes the batch"
    refuse_option("--image-size", image_size, of=name, because=because)
    refuse_option("--sequence-length", sequence_length, of=name, because=because)
    where, _, attribute = name.rpartition(":")
    module = _import_file(where) if where.endswith(".py") else _import_module(where)
    made = _call(_attribute(module, attribute, name), name)
    return _workload(made, name)


def _import_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"There is no file {path!r} (looked at {file}).")
    sys.path.insert(0, str(file.parent))  # its neighbours are importable, as under `python file.py`
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be imported: {_cause(error)}") from error
    return module


def _import_module(where: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # so that the `autofit` script finds what `python -m autofit` finds
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        hint = " Models by name are timm:NAME and hf:NAME." if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"The module {where!r} cannot be imported: {_cause(error)}.{hint}") from error


def _attribute(module: ModuleType, attribute: str, name: str) -> Callable[[], Any]:
    factory = getattr(module, attribute, None)
    own = [
        key for key, value in vars(module).items() if inspect.isroutine(value) and value.__module__ == module.__name__
    ]
    if factory is None:
        listed = f" Functions there: {', '.join(own)}." if own else ""
        raise ConfigError(f"{module.__name__!r} has no {attribute!r}.{near_misses(attribute, own)}{listed}")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(f"{name} is a {type(factory).__name__}, not a factory: {_EXPECTED}.")
    return factory  # type: ignore[no-any-return]  # callable() does not narrow Any


def _call(factory: Callable[[], Any], name: str) -> Any:
    try:
        return factory()
    except AutofitError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"The factory {name} failed: {_cause(error)}") from error


_EXPECTED = (
    "a factory takes no arguments and returns a dict of tune's arguments, at least {'model': …, 'sample_batch': …}"
)


def _workload(made: Any, name: str) -> Workload:
    if isinstance(made, nn.Module):
        raise ConfigError(
            f"The factory {name} returned only a model ({type(made).__name__}), and a model does not say what a batch "
            f"looks like. Return {{'model': model, 'sample_batch': batch}} instead."
        )
    if not isinstance(made, Mapping):
        raise ConfigError(f"The factory {name} returned a {type(made).__name__}: {_EXPECTED}.")
    allowed = [key for key in inspect.signature(autofit.tune).parameters if key not in ("on_trial", "on_progress")]
    for key in made:
        if key not in allowed:
            raise ConfigError(
                f"The factory {name} returned {key!r}, which is no argument of tune."
                f"{near_misses(str(key), allowed)} Allowed: {', '.join(allowed)}."
            )
    missing = [key for key in ("model", "sample_batch") if key not in made]
    if missing:
        raise ConfigError(f"The factory {name} returned no {' and no '.join(missing)}: {_EXPECTED}.")
    if not isinstance(made["model"], nn.Module):
        raise ConfigError(f"The factory {name} returned a {type(made['model']).__name__} as 'model', not a Module.")
    arguments = {key: value for key, value in made.items() if key not in ("model", "sample_batch")}
    return Workload(made["model"], made["sample_batch"], f"the batch of {name}", arguments)


def _cause(error: BaseException) -> str:
    """The error's type and text, and the line of the user's code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    last = frames[-1] if frames else None
    place = f" ({last.filename}, line {last.lineno})" if last is not None and last.filename != __file__ else ""
    return f"{type(error).__name__}: {error}{place}"
