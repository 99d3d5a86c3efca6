"""Fixtures for all tests. Every test is checked for what it leaves changed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from autofit.flags import Flags

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure() -> None:
    """One thread: the models are tiny, and threads that wait for each other would take most of the time."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they do not run where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True)
def nothing_left_changed() -> Iterator[None]:
    """Fails a test that leaves a switch of torch, the grad mode or the environment other than it found it."""
    environment = dict(os.environ)
    flags = Flags()
    random_states = torch.get_rng_state(), random.getstate()
    yield
    changed = flags.changed()
    torch.set_rng_state(random_states[0])
    random.setstate(random_states[1])
    flags.put_back()
    assert not changed, f"left changed: {changed}"
    assert _ours(dict(os.environ)) == _ours(environment), "left the environment changed"


def _ours(environment: dict[str, str]) -> dict[str, str]:
    """The environment without what pytest and torch's compiler, once loaded, set in it."""
    theirs = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    return {name: value for name, value in environment.items() if name not in theirs}
