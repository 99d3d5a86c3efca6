"""Storages followed from birth to death: what counts, when it ends, and running out in the middle of a step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autofit.memory import AllocatorOutOfMemoryError, Block, CachingAllocator, Event, EventLog, StorageTracker, replay
from autofit.units import KiB, MiB


class ConvNet(nn.Module):
    """Convolution, batch norm, dropout and a linear layer that holds most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1))
        self.head = nn.Linear(8 * 14 * 14, 2000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


class Training:
    """A net, its optimizer and a batch; `phases` are the parts of one step."""

    def __init__(self) -> None:
        self.net = ConvNet()
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.images = torch.ones(64, 3, 16, 16)
        self.labels = torch.zeros(64, dtype=torch.int64)
        self.loss: Tensor | None = None
        self.phases: dict[str, Callable[[], object]] = {
            "forward": self.forward,
            "backward": self.backward,
            "optimizer": self.optimizer.step,
        }

    def forward(self) -> None:
        self.loss = nn.functional.cross_entropy(self.net(self.images), self.labels)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def step(self, reached: list[str]) -> None:
        for name, run in self.phases.items():
            reached.append(name)
            run()

    def resident(self) -> list[Tensor]:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [*self.net.parameters(), *self.net.buffers(), *state, self.images, self.labels]

    def forget(self) -> None:
        """What is left of a step, failed or not."""
        self.loss = None
        self.optimizer.zero_grad()
        self.optimizer.state.clear()


def peaks_by_phase() -> dict[str, int]:
    """Reserved peak at the end of each phase, without a cap."""
    training, allocator, peaks = Training(), CachingAllocator(), {}
    with StorageTracker("cpu", allocator=allocator) as tracker:
        tracker.resident(training.resident())
        for name, run in training.phases.items():
            run()
            peaks[name] = allocator.peak_reserved_bytes
    return peaks


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_memory_runs_out_in_every_phase(phase: str) -> None:
    """Just below what a phase needs, the error comes out of that phase; dropped, it leaves nothing alive."""
    cap = peaks_by_phase()[phase] - 1
    training, allocator = Training(), CachingAllocator(cap)
    reached: list[str] = []
    with StorageTracker("cpu", allocator=allocator) as tracker:
        tracker.resident(training.resident())
        before = tracker.allocator.allocated_bytes
        with pytest.raises(torch.OutOfMemoryError) as caught:
            training.step(reached)
        assert reached[-1] == phase
        assert caught.value.__context__ is None  # it would hold the frames, and they the tensors
        caught.value.__traceback__ = None
        del caught
        training.forget()
        gc.collect()
        assert tracker.allocator.allocated_bytes == before


def test_a_step_that_fits_leaves_only_what_it_should() -> None:
    """After a step the optimizer's state has come on top; after a second one nothing more."""
    training, allocator = Training(), CachingAllocator()
    live = []
    with StorageTracker("cpu", allocator=allocator) as tracker:
        tracker.resident(training.resident())
        for _ in range(3):
            live.append(tracker.allocator.allocated_bytes)
            for run in training.phases.values():
                run()
            training.optimizer.zero_grad()
    parameters = sum(parameter.nbytes for parameter in training.net.parameters())
    assert live[1] - live[0] >= 2 * parameters
    assert live[2] == live[1]


def test_the_message_reads_like_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what was tried, the cap, and what is reserved and allocated."""
    allocator = CachingAllocator(30 * MiB)
    expected = (
        r"^CPU out of memory\. Tried to allocate 21\.0 MiB\. The cap is 30\.0 MiB of which 10\.0 MiB is free\. Of the "
        r"reserved 20\.0 MiB, 4\.0 MiB is allocated by tensors, and 16\.0 MiB is reserved but unallocated"
    )
    with StorageTracker("cpu", allocator=allocator) as tracker:
        kept = torch.empty(MiB)
        with pytest.raises(torch.OutOfMemoryError, match=expected):
            torch.empty(21 * MiB, dtype=torch.uint8)
        assert tracker.allocator.allocated_bytes == kept.nbytes


KIBIBYTE = 256  # elements of float32


def resized() -> Tensor:
    return torch.empty(KIBIBYTE).resize_(4 * KIBIBYTE)


def shrunk_out_of_sight() -> Tensor:
    tensor = torch.empty(4 * KIBIBYTE)
    tensor.untyped_storage().resize_(0)
    return tensor.view(-1)


def given_another_storage() -> Tensor:
    tensor = torch.empty(4 * KIBIBYTE)
    return tensor.set_(torch.empty(KIBIBYTE))


def coo() -> Tensor:
    return torch.ones(KIBIBYTE).to_sparse()


def csr() -> Tensor:
    return torch.ones(16, 16).to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "kibibytes"),
    [
        (lambda: torch.empty(KIBIBYTE), 1),
        (lambda: torch.empty(KIBIBYTE)[10:20], 1),  # a view keeps all of its storage
        (lambda: torch.empty(KIBIBYTE).add_(1), 1),
        (lambda: torch.empty(KIBIBYTE) + 1, 1),
        (lambda: torch.empty(KIBIBYTE).chunk(4), 1),
        (lambda: torch.ones(2, KIBIBYTE).topk(KIBIBYTE), 2 + 4),  # values and int64 indices
        (lambda: torch._foreach_add([torch.empty(KIBIBYTE)] * 3, 1), 3),
        (lambda: torch.empty(KIBIBYTE, dtype=torch.complex64), 2),
        (lambda: torch.empty(0), 0),
        (lambda: torch.empty(KIBIBYTE, device="meta"), 0),
        (lambda: torch.add(torch.ones(KIBIBYTE), 1, out=torch.empty(KIBIBYTE)), 1),
        (resized, 4),
        (shrunk_out_of_sight, 0),
        (given_another_storage, 1),
        (coo, 1 + 2),
        (csr, 1 + 4 + 0.5),  # the column indices are a view of both coordinates
    ],
)
def test_what_is_alive_counts(make: Callable[[], Any], kibibytes: float) -> None:
    """Each storage counts once, with its bytes, until the last tensor on it is gone."""
    allocator = CachingAllocator()
    with StorageTracker("cpu", allocator=allocator) as tracker:
        alive = make()
        assert tracker.allocator.allocated_bytes == kibibytes * KiB
        del alive
        assert tracker.allocator.allocated_bytes == 0


class Pair(Tensor):
    """A tensor that wraps two others, as distributed and quantized tensors do."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        return Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def apply(name: str) -> Tensor:
            return func(*(getattr(arg, name) if isinstance(arg, Pair) else arg for arg in args), **(kwargs or {}))

        return cls(apply("first"), apply("second"))


def test_tensors_inside_of_tensors_count() -> None:
    """A wrapper counts as the tensors that it wraps, both as resident and as the result of an operator."""
    allocator = CachingAllocator()
    pair = Pair(torch.empty(KIBIBYTE), torch.empty(3 * KIBIBYTE))
    with StorageTracker("cpu", allocator=allocator) as tracker:
        tracker.resident([pair])
        assert tracker.allocator.allocated_bytes == 4 * KiB
        other = pair + 1
        assert tracker.allocator.allocated_bytes == 8 * KiB
        del pair, other
        assert tracker.allocator.allocated_bytes == 0


def test_saved_tensors_live_as_long_as_their_graph() -> None:
    """What only the graph holds is alive until backward has used it."""
    allocator = CachingAllocator()
    weight = torch.ones(KIBIBYTE, requires_grad=True)
    with StorageTracker("cpu", allocator=allocator) as tracker:
        loss = weight.exp().exp().exp().sum()
        assert tracker.allocator.allocated_bytes == 3 * KiB + 512
        loss.backward()
        assert tracker.allocator.allocated_bytes == KiB + 512  # the gradient and the loss
        del loss
        weight.grad = None
        assert tracker.allocator.allocated_bytes == 0


def test_residents_are_born_in_order_and_once() -> None:
    """What is alive already is taken over, a storage that two tensors share only once."""
    log = EventLog()
    tracker = StorageTracker("cpu", log=log)
    first, second = torch.empty(KIBIBYTE), torch.empty(2 * KIBIBYTE)
    tracker.resident([first, second, first.view(2, -1)])
    with tracker:
        del first
        second.add_(1)
    assert log.events == [(1, KiB), (2, 2 * KiB), (1, 0)]
    assert log.operators == [0, 0, 0]


def test_the_log_says_which_operator_it_was() -> None:
    """Births and deaths carry the number of the operator, and the replay of the log has the allocator's peaks."""
    training, allocator, log = Training(), CachingAllocator(), EventLog()
    with StorageTracker("cpu", allocator=allocator, log=log) as tracker:
        tracker.resident(training.resident())
        for run in training.phases.values():
            run()
    assert len(log.events) == len(log.operators)
    assert log.operators == sorted(log.operators)
    assert 0 < log.operators[-1] <= tracker.operators
    peaks = replay(log.events)
    assert peaks.peak_allocated_bytes == allocator.peak_allocated_bytes
    assert peaks.peak_reserved_bytes == allocator.peak_reserved_bytes


def test_growing_is_a_birth_and_then_a_death() -> None:
    """The allocator has both the old room and the new one for a moment, so the log has them in that order."""
    log = EventLog()
    with StorageTracker("cpu", log=log):
        tensor = torch.empty(KIBIBYTE)
        tensor.resize_(2 * KIBIBYTE)
        del tensor
    assert log.events == [(1, KiB), (2, 2 * KiB), (1, 0), (2, 0)]


def step_log(*, checkpointed: bool, autocast: bool) -> EventLog:
    """Events of a step on small tensors: forward, backward and optimizer."""
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(8, 32)
    log = EventLog()
    with StorageTracker("cpu", log=log) as tracker:
        tracker.resident([*net.parameters(), batch])
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = checkpoint(net, batch, use_reentrant=False) if checkpointed else net(batch)
                loss = output.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss
    return log


def deaths_sorted(events: list[Event]) -> list[Event]:
    """Deaths between two births in order of storage: in which order several end at once is an accident."""
    groups = [sorted(group) if dead else list(group) for dead, group in groupby(events, key=lambda event: not event[1])]
    return [event for group in groups for event in group]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_fake_tensors_tell_the_same_story(checkpointed: bool, autocast: bool) -> None:
    """A step on fake tensors has the very births and deaths of the step on real ones."""
    real = step_log(checkpointed=checkpointed, autocast=autocast)
    with FakeTensorMode():
        fake = step_log(checkpointed=checkpointed, autocast=autocast)
    assert deaths_sorted(fake.events) == deaths_sorted(real.events)
    assert len(real.events) > 40


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_lowers_the_peak(use_reentrant: bool) -> None:
    """What is recomputed in backward is not alive before, in both kinds of checkpointing."""
    batch = torch.ones(KIBIBYTE, requires_grad=True)

    def peak(run: Callable[[Tensor], Tensor]) -> int:
        allocator = CachingAllocator()
        with StorageTracker("cpu", allocator=allocator):
            run(run(run(batch))).sum().backward()
        batch.grad = None
        return allocator.peak_allocated_bytes

    def block(x: Tensor) -> Tensor:
        return x.sin().sin().sin().sin()

    assert peak(lambda x: checkpoint(block, x, use_reentrant=use_reentrant)) < peak(block)


def test_other_modes_go_on_working() -> None:
    """Modes entered before and after see every operator, and without gradients storages count as well."""

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    allocator, outer, inner = CachingAllocator(), Counting(), Counting()
    with outer, StorageTracker("cpu", allocator=allocator) as tracker, inner, torch.no_grad():
        kept = torch.ones(KIBIBYTE).mul(2)
    assert outer.seen == inner.seen == tracker.operators == 2
    assert allocator.peak_allocated_bytes == 2 * kept.nbytes


def test_nothing_counts_after_leaving() -> None:
    """Leaving forgets every storage: it keeps nothing alive, and no later death reaches the allocator."""
    allocator = CachingAllocator()
    tracker = StorageTracker("cpu", allocator=allocator)
    with tracker:
        tensor = torch.empty(KIBIBYTE)
    storage = weakref.ref(tensor.untyped_storage())
    gone = weakref.ref(tracker)
    del tensor
    assert storage() is None
    assert tracker.allocator.allocated_bytes == KiB
    del tracker
    assert gone() is None


def test_an_error_of_an_operator_passes_through() -> None:
    """Any other exception comes out as it is, and the count goes on."""
    allocator = CachingAllocator()
    with StorageTracker("cpu", allocator=allocator) as tracker:
        with pytest.raises(RuntimeError, match="shape"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert tracker.allocator.allocated_bytes == 0
        kept = torch.ones(KIBIBYTE)
        assert tracker.allocator.allocated_bytes == kept.nbytes


def test_a_cycle_is_alive_until_it_is_collected() -> None:
    """Storages in reference cycles end when the garbage collector finds them."""
    allocator = CachingAllocator()
    with StorageTracker("cpu", allocator=allocator) as tracker:
        cycle: list[Any] = [torch.empty(KIBIBYTE)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert tracker.allocator.allocated_bytes == 0


class Interrupted(CachingAllocator):
    """Lets something happen in the middle of a request, as the garbage collector may."""

    meanwhile: Callable[[], object] | None = None

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            before = self.allocated_bytes
            meanwhile()
            assert self.allocated_bytes == before
        return super().malloc(nbytes, stream)


@pytest.mark.parametrize("threaded", [False, True], ids=["same thread", "other thread"])
def test_a_death_in_the_middle_of_a_birth_waits(threaded: bool) -> None:
    """A death while the allocator is at work is counted right after it, whichever thread it happens in."""
    allocator = Interrupted()
    with StorageTracker("cpu", allocator=allocator) as tracker:
        doomed = [torch.empty(KIBIBYTE)]

        def die() -> None:
            thread = threading.Thread(target=doomed.clear)
            thread.start()
            thread.join(timeout=30)

        allocator.meanwhile = die if threaded else doomed.clear
        kept = torch.empty(2 * KIBIBYTE)
        assert tracker.allocator.allocated_bytes == kept.nbytes


def test_running_out_keeps_deaths_in_the_middle() -> None:
    """A birth that is refused while a death waits raises, and the death is counted all the same."""
    allocator = Interrupted(2 * MiB)
    with StorageTracker("cpu", allocator=allocator) as tracker:
        doomed = [torch.empty(KIBIBYTE)]
        allocator.meanwhile = doomed.clear
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MiB)
        assert tracker.allocator.allocated_bytes == 0
        with pytest.raises(AllocatorOutOfMemoryError):
            allocator.malloc(4 * MiB)


def test_a_birth_that_another_works_off_raises_in_its_operator() -> None:
    """When somebody else works the queue off before the birth's own turn, the refusal still reaches the operator."""
    allocator = CachingAllocator(2 * MiB)
    tracker = StorageTracker("cpu", allocator=allocator)
    with tracker:
        doomed = [torch.empty(KIBIBYTE)]
        settle = tracker.settle

        def settle_late() -> None:
            del tracker.settle
            doomed.clear()
            settle()  # as another thread may
            settle()

        tracker.settle = settle_late  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MiB)
        assert tracker.allocator.allocated_bytes == 0


def test_what_was_refused_is_refused_again() -> None:
    """A storage that found no room is not taken for counted when it is seen once more."""
    tracker = StorageTracker("cpu", allocator=CachingAllocator(2 * MiB))
    large = torch.empty(MiB)
    with tracker:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                tracker.resident([large])


def test_growing_beyond_the_cap_raises_and_keeps_the_old_room() -> None:
    """A storage that cannot grow counts as before until it dies."""
    allocator = CachingAllocator(2 * MiB)
    with StorageTracker("cpu", allocator=allocator) as tracker:
        tensor = torch.empty(KIBIBYTE)
        with pytest.raises(torch.OutOfMemoryError):
            tensor.resize_(MiB)
        assert tracker.allocator.allocated_bytes == KiB
        del tensor
        assert tracker.allocator.allocated_bytes == 0
