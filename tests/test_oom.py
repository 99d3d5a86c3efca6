"""What counts as running out of memory, and that nothing stays alive by a failure."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from autofit.oom import Failure, classify, describe_error, guarded, headline


class AcceleratorError(RuntimeError):
    """As torch names errors of a device."""


MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 10.76 GiB total capacity)"),
    AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("HIP out of memory. Tried to allocate 256.00 MiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB, max allowed: 9.07 GB)."
    ),
    RuntimeError("Invalid buffer size: 24.00 GB"),
    RuntimeError("XPU out of memory. Tried to allocate 1.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:80] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
    ),
    RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error.\nLast error:\nCuda failure 2 'out of memory'"
    ),
]
MAYBE = [
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
]
LOST = [
    RuntimeError("CUDA error: device-side assert triggered"),
    AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
]
OTHER = [
    RuntimeError("out of resource: shared memory, Required: 180224, Hardware limit: 101376"),
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("size mismatch, the memory format of the input is wrong"),
    ValueError("memory must be 3-D: CUDA out of memory was not meant"),
    RuntimeError("The memory bank is out of memory slots"),
    KeyError("labels"),
    RuntimeError(),
    Exception("a", 2),
]


@pytest.mark.parametrize("error", MEMORY, ids=lambda e: str(e)[:50])
def test_memory(error: Exception) -> None:
    """A3, A4, A6, A7: every library's way to say that memory ran out."""
    assert classify(error) == "memory"


@pytest.mark.parametrize("error", MAYBE, ids=lambda e: str(e)[:50])
def test_maybe_memory(error: Exception) -> None:
    """A1: a library that found no room for its workspace says that it cannot do it."""
    assert classify(error) == "maybe_memory"


@pytest.mark.parametrize("error", LOST, ids=lambda e: str(e)[:50])
def test_device_lost(error: Exception) -> None:
    """A9: an assert or an illegal access leaves no usable device, whatever else the text says."""
    assert classify(error) == "device_lost"


@pytest.mark.parametrize("error", OTHER, ids=lambda e: str(e)[:50])
def test_other(error: Exception) -> None:
    """A text that merely mentions memory is not about running out of it."""
    assert classify(error) == "other"


def _raise_from(*, suppressed: bool) -> None:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    except torch.OutOfMemoryError as error:
        if suppressed:
            raise KeyError("loss") from None
        raise RuntimeError("batch 3 failed") from error


def test_the_cause_counts() -> None:
    """A12: memory that ran out below an error of the user's own is found."""
    with pytest.raises(RuntimeError) as caught:
        _raise_from(suppressed=False)
    assert classify(caught.value) == "memory"


def test_a_suppressed_context_does_not_count() -> None:
    """What an error was explicitly not raised from says nothing about it."""
    with pytest.raises(KeyError) as caught:
        _raise_from(suppressed=True)
    assert classify(caught.value) == "other"


def test_a_ring_of_causes_ends() -> None:
    """Exceptions that name each other as their cause do not hang the classification."""
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) == "other"


class UnprintableError(RuntimeError):
    def __str__(self) -> str:
        raise AttributeError("'OutOfMemoryError' object has no attribute 'encode'")


@pytest.mark.parametrize("error", [UnprintableError(), RuntimeError(b"\xff"), RuntimeError(1, 2), RuntimeError(None)])
def test_the_handler_never_raises(error: Exception) -> None:
    """A10: whatever an exception carries, it is classified and described."""
    assert classify(error) == "other"
    assert describe_error(error)
    assert headline(error)


def test_headline_is_one_line() -> None:
    """Messages in tables have no line breaks and an end."""
    text = headline(RuntimeError("a" * 1000 + "\nsecond"), limit=50)
    assert len(text) == 50
    assert "\n" not in text


class Big:
    """Stands for a tensor; can be watched."""


def _fails(alive: list[weakref.ref[Big]]) -> None:
    big = Big()
    alive.append(weakref.ref(big))
    try:
        _deeper(big)
    except ValueError as error:
        raise RuntimeError("outer") from error


def _deeper(big: Big) -> None:
    held = [big]
    raise ValueError(f"inner {len(held)}")


def test_nothing_stays_alive_by_a_failure() -> None:
    """B1, B3: frames of the failed step are emptied, its cause's too, while the error can still be read."""
    alive: list[weakref.ref[Big]] = []
    result, failure = guarded(lambda: _fails(alive))
    assert result is None
    assert isinstance(failure, Failure)
    assert alive[0]() is None
    assert isinstance(failure.error.__cause__, ValueError)
    assert failure.message == "RuntimeError: outer"


def test_a_real_host_allocation_that_fails() -> None:
    """A7: the host's own allocator running out is memory, and the next attempt works."""
    _, failure = guarded(lambda: torch.empty(10**15))
    assert failure is not None
    assert failure.kind == "memory"
    gc.collect()
    result, failure = guarded(lambda: torch.ones(3).sum())
    assert failure is None
    assert result is not None
    assert float(result) == 3


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through(interrupt: type[BaseException]) -> None:
    """Ctrl-C is not a failed trial."""

    def stop() -> None:
        raise interrupt

    with pytest.raises(interrupt):
        guarded(stop)
