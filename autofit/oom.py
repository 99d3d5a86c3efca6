"""What went wrong: does an exception mean that memory ran out, and how is everything that it holds let go of?"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

FailureKind = Literal["memory", "maybe_memory", "device_lost", "other"]
T = TypeVar("T")

# Texts of untyped errors, as the libraries word them. A lost device is looked for first: such texts may mention memory.
_DEVICE_LOST = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|illegal address|misaligned address"
    r"|unspecified launch failure|hardware stack error|invalid program counter|uncorrectable ECC|context is destroyed"
    r"|GPU is lost|device lost|UR_RESULT_ERROR_DEVICE_LOST",
    re.IGNORECASE,
)
_MEMORY = re.compile(
    r"\b(CUDA|HIP|XPU|MPS backend|NCCL|Cuda failure \d*|CUDA driver error:|CUDA error:|HIP error:)[:\s']*out of memory"
    r"|hipErrorOutOfMemory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|MIOPEN)_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"
    r"|CUFFT_ALLOC_FAILED|cudnnStatusAllocFailed"
    r"|DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|NCCL[\s\S]{0,400}out of memory"
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)"
    r"|Invalid buffer size: [\d.]+ ?[KMGT]i?B",
    re.IGNORECASE,
)
# Libraries that find no room for their workspace say that they cannot do it at all. So does one that really cannot:
# only a smaller micro-batch that passes tells the two apart.
_MAYBE_MEMORY = re.compile(
    r"unable to find a valid cuDNN algorithm|unable to find an engine|no valid algorithm"
    r"|CUDNN_STATUS_(NOT_SUPPORTED|EXECUTION_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_INTERNAL_ERROR"
    r"|CUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED)|CUFFT_INTERNAL_ERROR|MIOPEN_STATUS_|miopenStatus",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """An exception, reduced to what may be kept: it holds no frame's variables, and so no tensor."""

    kind: FailureKind
    message: str
    error: BaseException


def classify(error: BaseException) -> FailureKind:
    """Whether an exception, or one that it was raised from, means that memory ran out.

    `maybe_memory` means memory only if a smaller micro-batch passes. A text that merely mentions memory is `other`.
    """
    kinds = [_classify_one(link) for link in chain(error)]
    order: tuple[FailureKind, ...] = ("device_lost", "memory", "maybe_memory")
    return next((kind for kind in order if kind in kinds), "other")


def _classify_one(error: BaseException) -> FailureKind:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "memory"
    if not isinstance(error, RuntimeError):  # torch and the libraries under it raise RuntimeError and its subclasses
        return "other"
    text = describe_error(error)
    if _DEVICE_LOST.search(text):
        return "device_lost"
    if _MEMORY.search(text):
        return "memory"
    return "maybe_memory" if _MAYBE_MEMORY.search(text) else "other"


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that it came from, as Python would print them; each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def describe_error(error: BaseException) -> str:
    """`Type: text` of any exception, even of one whose own `__str__` fails."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def headline(error: BaseException, limit: int = 300) -> str:
    """The first line of the exception's text, for a message or a table."""
    lines = describe_error(error).strip().splitlines()
    return lines[0][:limit]


def release_frames(error: BaseException) -> None:
    """Empties the frames that an exception keeps alive: they hold the tensors of the step that failed.

    The traceback itself stays, so that the error can still be read.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def tracebacks_to_text(error: BaseException) -> None:
    """Writes the traceback into a note of the error and lets go of it, and so of what even emptied frames hold.

    Those are the functions that ran in them, with the variables that these share with functions around them.
    """
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    for link in chain(error):
        link.__traceback__ = None


def drain_backward() -> None:
    """Lets go of the tensors of a backward that failed or was interrupted.

    The engine keeps the tasks that it did not come to, and their tensors with them, until this thread next goes
    backward. So it does, over nothing.
    """
    with torch.enable_grad(), _disable_current_modes():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def guarded(run: Callable[[], T]) -> tuple[T, None] | tuple[None, Failure]:
    """Runs something that may fail: its result, or the failure with nothing left alive by it.

    Recovering must happen after this has returned, never inside an `except` block. Interrupts pass through.
    """
    try:
        return run(), None
    except Exception as error:
        failure = Failure(classify(error), headline(error), error)
        release_frames(error)
    return None, failure
