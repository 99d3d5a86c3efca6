"""The loss of a batch: how the model is called, what counts as its loss, and how the parts of a batch are weighted."""

from autofit.loss.check import check_weighting
from autofit.loss.facts import loss_facts
from autofit.loss.forms import Loss, resolve_loss
from autofit.loss.infer import resolve_weighting
from autofit.loss.weighting import Weighting

__all__ = ["Loss", "Weighting", "check_weighting", "loss_facts", "resolve_loss", "resolve_weighting"]
