"""What the command line takes where an option is left out, and the names that it knows."""

from __future__ import annotations

from enum import StrEnum

ACCELERATOR_BATCH = 256
CPU_BATCH = 32
SEED = 0


class PrecisionName(StrEnum):
    """`autofit.candidate.Precision` in the form that the option parser takes."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class CheckpointingName(StrEnum):
    """`autofit.candidate.RecomputingMode` in the form that the option parser takes."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class OptimizerName(StrEnum):
    """The optimizers of torch.optim, by class name, that take any model's parameters and step without a closure."""

    AdamW = "adamw"
    Adam = "adam"
    SGD = "sgd"
    Adagrad = "adagrad"
    Adadelta = "adadelta"
    Adafactor = "adafactor"
    Adamax = "adamax"
    NAdam = "nadam"
    RAdam = "radam"
    RMSprop = "rmsprop"
