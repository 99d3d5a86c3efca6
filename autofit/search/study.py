"""The Optuna study: opened, closed and kept quiet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from autofit.errors import ConfigError
from autofit.search.storage import open_storage, storage_errors, without_password


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
    backend = None if storage is None else open_storage(storage)
    try:
        with quiet(), storage_errors():
            study = optuna.create_study(
                storage=backend, study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
            )
        if study.direction != StudyDirection.MAXIMIZE:
            raise ConfigError(
                f"The study {name!r} in {without_password(repr(storage))} minimises, so it is not one of autofit's, "
                "which maximise samples per second. Pass another study_name."
            )
        yield study
    finally:
        if backend is not None:
            backend.remove_session()
            backend.engine.dispose()


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
