"""What a training step needs in memory, predicted: the step on tensors without values, its storages, the allocator."""

from autofit.predict.failures import UntraceableError
from autofit.predict.prediction import Breakdown, MemoryPrediction, TimelinePoint
from autofit.predict.predictor import Predictor, predict_memory

__all__ = ["predict_memory", "Predictor", "MemoryPrediction", "Breakdown", "TimelinePoint", "UntraceableError"]
