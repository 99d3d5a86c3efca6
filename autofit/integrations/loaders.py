"""Data loaders with another batch size."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autofit.errors import ConfigError
from autofit.random_states import RandomStates


def with_batch_size(loader: DataLoader[Any], batch_size: int, *, workers: int | None = None) -> DataLoader[Any]:
    """A loader of the same data in the same order, in batches of `batch_size`; `workers` in place of its own.

    Raises ConfigError for a loader that forms its batches by itself, with a batch sampler or in its dataset.
    """
    if loader.batch_size is None:
        raise ConfigError(
            "The DataLoader forms its batches by a batch_sampler or in the dataset, so its batch size cannot be set. "
            "Give it batch_size and, if need be, a sampler."
        )
    count = loader.num_workers if workers is None else workers
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        sampler=None if isinstance(loader.dataset, IterableDataset) else loader.sampler,
        num_workers=count,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout if count else 0,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if count else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if count else None,
        persistent_workers=loader.persistent_workers and count > 0,
    )


def first_batch(loader: DataLoader[Any], device: torch.device) -> Any:
    """The batch that the loader would give first, loaded in this process; random states stay what they are."""
    generators = {id(g): g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    random_states = RandomStates(device)
    try:
        return next(iter(with_batch_size(loader, loader.batch_size or 1, workers=0)))
    except StopIteration:
        raise ConfigError(
            "The DataLoader gives no batch: its dataset is empty, or drop_last drops all of it."
        ) from None
    finally:
        random_states.put_back()
        for generator, state in states:
            generator.set_state(state)
