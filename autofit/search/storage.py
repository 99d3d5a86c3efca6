"""The database of a study: opened, its failures told as such, its password kept to itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autofit.errors import ConfigError, StorageError

# Workers that open a new database at the same moment get in each other's way when they make its tables.
OPENING_ATTEMPTS = 4
OPENING_PAUSE_SECONDS = 0.25
# SQLite locks the whole file for every write, so several workers have to wait for each other.
SQLITE_WAIT_SECONDS = 60

_PASSWORD = re.compile(r"((?:^|[\s'\"(]|://)[^/@\s:'\"]*:(?!//))[^\s'\"]*@")
_QUERY_PASSWORD = re.compile(r"((?:password|passwd|pwd|token|secret)=)[^&;\s'\"]+", re.IGNORECASE)


def without_password(text: str) -> str:
    """A URL, or a text that quotes one, with `***` in the place of what only its owner should know."""
    return _QUERY_PASSWORD.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


@contextmanager
def storage_errors() -> Iterator[None]:
    """Around what is read from or written to a study: raises StorageError where its database fails."""
    try:
        yield
    except (optuna.exceptions.OptunaError, SQLAlchemyError, OSError) as error:
        reason = without_password(str(error).strip().partition("\n")[0])
        raise StorageError(
            f"The storage of the study failed ({type(error).__name__}: {reason}). What was found so far is attached as "
            "a plan; with the storage in order again, the same call goes on from what it holds."
        ) from CensoredError.of(error)


class CensoredError(Exception):
    """Stands as the cause for an error whose own text names a password."""

    @classmethod
    def of(cls, error: Exception) -> Exception:
        """The error itself where it keeps no secret, so that its traceback can be read."""
        text = str(error)
        shown = without_password(text)
        return error if shown == text else cls(f"{type(error).__name__}: {shown}")


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """The database behind a URL. Raises ConfigError where it cannot be opened; no password is in its text or cause."""
    options = {"connect_args": {"timeout": SQLITE_WAIT_SECONDS}} if url.startswith("sqlite") else None
    for attempt in range(1, OPENING_ATTEMPTS + 1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except Exception as error:
            if attempt < OPENING_ATTEMPTS and isinstance(error, DBAPIError):
                time.sleep(OPENING_PAUSE_SECONDS)
                continue
            raise ConfigError(
                f"The storage {without_password(repr(url))} cannot be opened ({type(error).__name__}: "
                f"{without_password(str(error))}). Allowed: a database URL that Optuna knows, such as "
                "'sqlite:///autofit.db', or None to keep nothing."
            ) from CensoredError.of(error)
    raise AssertionError("unreachable: the last attempt returns or raises")
