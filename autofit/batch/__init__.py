"""Batches of any shape: where their samples lie, how to split, resize and move them."""

from autofit.batch.infer import infer_layout
from autofit.batch.layout import BatchLayout
from autofit.batch.transfer import batch_bytes, to_device

__all__ = ["BatchLayout", "batch_bytes", "infer_layout", "to_device"]
