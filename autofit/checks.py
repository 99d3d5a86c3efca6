"""Is the call to tune() one that can be meant? Asked before anything is touched."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autofit.candidate import SearchSpace
from autofit.distributed import Team, world_size
from autofit.errors import ConfigError


def check_call(model: Any, *, target_batch: Any, max_trials: Any, timeout: Any, space: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    _check_model(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameters: nothing to train. Set requires_grad on some."
        )
    if isinstance(target_batch, bool) or not isinstance(target_batch, int) or target_batch < 1:
        raise ConfigError(f"target_batch must be a positive whole number of samples, got {target_batch!r}.")
    ranks = world_size()
    if target_batch < ranks:
        raise ConfigError(f"target_batch {target_batch} is smaller than the {ranks} ranks: each needs a sample.")
    if space is not None and not isinstance(space, SearchSpace):
        raise ConfigError(f"space must be an autofit.SearchSpace, got {type(space).__name__}.")
    _check_parallelism(space, ranks)
    if max_trials is not None and (isinstance(max_trials, bool) or not isinstance(max_trials, int) or max_trials < 1):
        raise ConfigError(f"max_trials must be a positive whole number, got {max_trials!r}.")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ConfigError(f"timeout must be a positive number of seconds, got {timeout!r}.")


def check_same_call(team: Team, model: nn.Module, *, target_batch: int) -> None:
    """Raises ConfigError, on all ranks, where they do not all tune the same model for the same target."""
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    asked = team.gather((type(model).__name__, sum(map(math.prod, shapes)), target_batch))
    if len(set(asked)) > 1:
        each = (
            f"rank {rank}: {name} of {count} parameters, {n} samples" for rank, (name, count, n) in enumerate(asked)
        )
        calls = "; ".join(each)
        raise ConfigError(f"All ranks have to tune the same model for the same target_batch, and they ask for {calls}.")


def _check_parallelism(space: SearchSpace | None, ranks: int) -> None:
    modes = () if space is None or space.parallelism is None else space.parallelism
    if ranks == 1 and set(modes) - {"none"}:
        raise ConfigError(
            f"parallelism={list(modes)} needs a process group of several ranks, and this process is on its own. Start "
            "the script with torchrun and call torch.distributed.init_process_group() first."
        )
    if ranks > 1 and "none" in modes:
        raise ConfigError(
            f"This process is one of {ranks} ranks; with parallelism 'none' each would train a model of its own. Leave "
            "parallelism out, or call tune() before the process group is initialised."
        )


def _check_model(model: nn.Module) -> None:
    """What can neither be restored nor trained."""
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"The model is wrapped in {kind} already. Pass the module inside, model.module: trials wrap it themselves, "
            "and so does the step of the plan."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"{kind} is a TorchScript module, whose steps can be neither traced nor recomputed. Pass the nn.Module "
            "that it was made from, and script it afterwards if it must be."
        )
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        raise ConfigError(
            f"{kind} has parameters without a shape yet: {', '.join(lazy[:5])}. Run one forward on the sample batch "
            "first, which lazy modules need to know their inputs."
        )
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise ConfigError(
            f"Training is impossible under torch.inference_mode(), and so is it with parameters that were made there. "
            f"Call this outside, on a {kind} that was made outside."
        )
