"""Is the call to tune() one that can be meant? Asked before anything is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autofit.candidate import SearchSpace
from autofit.distributed import world_size
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
    if ranks > 1:
        raise ConfigError(
            f"This process is one of {ranks} ranks. tune() works on one device: call it before the process group is "
            f"initialised, with target_batch={target_batch // ranks}, one rank's share."
        )
    if space is not None and not isinstance(space, SearchSpace):
        raise ConfigError(f"space must be an autofit.SearchSpace, got {type(space).__name__}.")
    if max_trials is not None and (isinstance(max_trials, bool) or not isinstance(max_trials, int) or max_trials < 1):
        raise ConfigError(f"max_trials must be a positive whole number, got {max_trials!r}.")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ConfigError(f"timeout must be a positive number of seconds, got {timeout!r}.")


def _check_model(model: nn.Module) -> None:
    """What can neither be restored nor trained."""
    kind = type(model).__name__
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
