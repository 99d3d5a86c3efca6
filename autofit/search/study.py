"""The Optuna study: opened, closed and kept quiet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from sqlalchemy.exc import DBAPIError

from autofit.errors import ConfigError

# Workers that open a new database at the same moment get in each other's way when they make its tables.
OPENING_ATTEMPTS = 4
OPENING_PAUSE_SECONDS = 0.25
# SQLite locks the whole file for every write, so several workers have to wait for each other.
SQLITE_WAIT_SECONDS = 60


class ChosenSampler(optuna.samplers.BaseSampler):
    """Hands Optuna the parameters that were `chosen`; others are drawn at random."""

    def __init__(self, *, seed: int) -> None:
        self.chosen: dict[str, Any] = {}
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Nothing is sampled together: Optuna asks for one parameter after the other."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Nothing, as `infer_relative_search_space` says."""
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The chosen value of one parameter."""
        if param_name in self.chosen:
            return self.chosen[param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)


@contextmanager
def open_study(*, storage: str | None, name: str | None, sampler: ChosenSampler) -> Iterator[optuna.Study]:
    """The study of that name in that storage, continued if it exists; in memory without a storage.

    Raises ConfigError when the storage cannot be opened or the study is not one of autofit's.
    """
    backend = None if storage is None else _open_storage(storage)
    try:
        with quiet():
            study = optuna.create_study(
                storage=backend, study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
            )
        if study.direction != StudyDirection.MAXIMIZE:
            raise ConfigError(
                f"The study {name!r} in {storage!r} minimises, so it is not one of autofit's, which maximise samples "
                "per second. Pass another study_name."
            )
        yield study
    finally:
        if backend is not None:
            backend.remove_session()
            backend.engine.dispose()


def _open_storage(url: str) -> optuna.storages.RDBStorage:
    options = {"connect_args": {"timeout": SQLITE_WAIT_SECONDS}} if url.startswith("sqlite") else None
    for attempt in range(1, OPENING_ATTEMPTS + 1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except Exception as error:
            if attempt < OPENING_ATTEMPTS and isinstance(error, DBAPIError):
                time.sleep(OPENING_PAUSE_SECONDS)
                continue
            raise ConfigError(
                f"The storage {url!r} cannot be opened ({type(error).__name__}: {error}). Allowed: a database URL that "
                "Optuna knows, such as 'sqlite:///autofit.db', or None to keep nothing."
            ) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna's notices from this thread off the screen, and nobody else's, without touching its verbosity."""
    thread = threading.get_ident()
    handlers = list(logging.getLogger("optuna").handlers)

    def worth_showing(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    for handler in handlers:
        handler.addFilter(worth_showing)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(worth_showing)
