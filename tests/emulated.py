"""An accelerator made of threads, which finds every moment that nobody waited for: no tests here.

Its tensors are the CPU's, and its compute queue is the calling thread. Copies run in two threads,
late by as much as a seed says. Memory is poisoned as it is given and as it is taken back, so that
what is read too early or too late is wrong. And each queue keeps a *vector clock*: how far it has
come itself, and how far it knows the others to have come, by the moments it was told to wait for.
An access that does not know of an earlier one that it must come after is a race, also where this
time nothing went wrong; `Watcher` tells of the accesses of operators, as it sees them below all
other modes.
"""

from __future__ import annotations

import mmap
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _stack
from torch.utils._pytree import tree_leaves

from dynoffload.below_modes import call_below
from dynoffload.memory.accelerator import guarded
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.guarded import is_guarded
from dynoffload.memory.accelerator.storages import RowStorage
from dynoffload.runtime import opening, target, unseen
from dynoffload.runtime.operators import counting_writes

COMPUTE, IN, OUT = range(3)
_POISON = 0xFB  # as float32 -2.6e36, as an index far outside
_QUEUES = ("compute", "copy in", "copy out")

Clock = tuple[int, int, int]


class Race(AssertionError):
    """An access that was not made to come after another."""


def _joined(clocks: Sequence[Clock]) -> Clock:
    first, second, third = zip(*clocks, strict=True)
    return max(first), max(second), max(third)


@dataclass(eq=False)
class Reached:
    """A `CopyEvent`; `reached` says no some times after it is, as an accelerator would."""

    clock: Clock
    done: threading.Event
    shy: int = 0
    times: tuple[float, float] | None = None  # of a copy, or of a wait

    def reached(self) -> bool:
        if not self.done.is_set():
            return False
        self.shy -= 1
        return self.shy < 0

    def span(self) -> tuple[float, float] | None:
        return self.times if self.reached() else None

    def wait(self) -> None:
        assert self.done.wait(60), "a copy does not end"
        self.shy = 0


@dataclass(eq=False)
class Seen:
    """The accesses to one storage's memory since it was given: by queue, its time then."""

    written: tuple[int, int] = (COMPUTE, 0)
    read: dict[int, int] = field(default_factory=dict)


class Emulated:
    """`Streams` of threads.

    Args:
        seed: of the delays.
        delay_s: the longest of a copy.
        memory: bytes of all storages together, beyond which there is no more.

    Attributes:
        races: what was found, in words.
        given: bytes of storages now; `peak` the most.
        full_for: names of operators that find no memory the next time that they are called.
    """

    name = "emulated"
    device = torch.device("cpu")
    pinned = True

    def __init__(self, seed: int = 0, delay_s: float = 0.002, memory: int = 1 << 40) -> None:
        self._random = random.Random(seed)
        self._delay_s, self._memory = delay_s, memory
        self.races: list[str] = []
        self.full_for: set[str] = set()
        self.given = self.peak = self.host_bytes = 0
        self.copies = 0
        self._clocks: list[Clock] = [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
        self._seen: dict[int, Seen] = {}  # by the storage's object
        self._mutex = threading.RLock()
        # A copy that nobody waits for meets memory that is poisoned or not there, and never memory
        # that goes while it is copied, which would end the process instead of failing a test.
        self._moving = threading.Lock()
        self._jobs: list[queue.Queue[Callable[[], None] | None]] = [queue.Queue(), queue.Queue()]
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), daemon=True) for jobs in self._jobs
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, jobs: queue.Queue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            job = None  # what it copied may go

    # Moments

    def _tick(self, of: int) -> Clock:
        """The queue goes on; return its clock until then."""
        clock = self._clocks[of]
        later = list(clock)
        later[of] += 1
        self._clocks[of] = (later[0], later[1], later[2])
        return clock

    def now(self) -> Reached:
        with self._mutex:
            done = threading.Event()
            done.set()
            return Reached(self._tick(COMPUTE), done, self._random.randrange(3))

    def after(self, moment: Any) -> Reached:
        start = time.perf_counter()
        moment.wait()
        with self._mutex:
            self._clocks[COMPUTE] = _joined([self._clocks[COMPUTE], moment.clock])
        return Reached(moment.clock, moment.done, times=(start, time.perf_counter()))

    # Accesses

    def access(self, of: int, storage: torch.UntypedStorage, what: str, *, writes: bool) -> None:
        """A queue touches a storage's memory, if it is one that was given."""
        with self._mutex:
            seen = self._seen.get(storage._cdata)
            if seen is None:
                return
            clock = self._clocks[of]
            before = [seen.written, *(seen.read.items() if writes else ())]
            for other, then in before:
                if clock[other] < then:
                    self.races.append(
                        f"{what} ({_QUEUES[of]}) does not come after what {_QUEUES[other]} did "
                        f"with the same {_size(storage)} bytes"
                    )
            if writes:
                seen.written, seen.read = (of, clock[of]), {}
            else:
                seen.read[of] = clock[of]

    def see(self, storage: torch.UntypedStorage) -> None:
        """The compute queue has made a storage that is not of `fill`; it must outlive this."""
        with self._mutex:
            self._seen[storage._cdata] = Seen((COMPUTE, self._clocks[COMPUTE][COMPUTE]))

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether its accesses are looked at."""
        return storage._cdata in self._seen

    # Memory

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        assert _size(storage) == 0, "memory is given to what has some"
        if self.given + nbytes > self._memory:
            raise torch.OutOfMemoryError("the emulated accelerator is full")
        with self._moving:
            storage.resize_(nbytes)
        self.given += nbytes
        self.peak = max(self.peak, self.given)
        with self._mutex:
            self._seen[storage._cdata] = Seen((COMPUTE, self._clocks[COMPUTE][COMPUTE]))
        _bytes_of(storage).fill_(_POISON)

    def empty(self, storage: torch.UntypedStorage) -> None:
        self.access(COMPUTE, storage, "taking memory back", writes=True)
        with self._mutex:
            del self._seen[storage._cdata]
        self.given -= _size(storage)
        with self._moving:
            _bytes_of(storage).fill_(_POISON)
            storage.resize_(0)

    def host(self, nbytes: int) -> torch.Tensor:
        self.host_bytes += nbytes
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        memory.fill_(_POISON)
        return memory

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        self.host_bytes -= len(memory)
        if not held:
            memory.fill_(_POISON)

    def peak_bytes(self) -> int:
        peak, self.peak = self.peak, self.given
        return peak

    def given_bytes(self) -> int:
        return self.given

    def free_bytes(self) -> int:
        return self._memory - self.given

    def trim(self, limit: int) -> None:
        pass

    # Copies

    def copy_in(self, target: Any, source: Any, after: Sequence[Any]) -> Reached:
        return self._copy(IN, target, source, _storage_of(target), after)

    def copy_out(self, target: Any, source: Any, after: Sequence[Any]) -> Reached:
        return self._copy(OUT, target, source, _storage_of(source), after)

    def _copy(
        self, of: int, target: Any, source: Any, storage: torch.UntypedStorage, after: Sequence[Any]
    ) -> Reached:
        for one in (target, source):  # in the caller's modes, as the streams of an accelerator
            if isinstance(one, torch.UntypedStorage):
                _bytes_of(one)
        with self._mutex:
            self.copies += 1
            self._clocks[of] = _joined([self._clocks[of], *(moment.clock for moment in after)])
            self.access(of, storage, _QUEUES[of], writes=of == IN)
            moment = Reached(self._tick(of), threading.Event(), self._random.randrange(3))
            delay = self._random.random() ** 3 * self._delay_s
            begins = [moment.done for moment in after]

            def job() -> None:
                for begun in begins:
                    begun.wait(60)
                start = time.perf_counter()
                time.sleep(delay)
                try:
                    with self._moving, torch.no_grad():
                        ours, theirs = (
                            one if isinstance(one, torch.Tensor) else _bytes_of(one)
                            for one in (target, source)
                        )
                        assert len(ours) == len(theirs), "a copy of another size"
                        ours.copy_(theirs)
                except Exception as error:
                    self.races.append(f"{_QUEUES[of]} failed: {error}")
                moment.times = start, time.perf_counter()
                moment.done.set()

            self._jobs[of - 1].put(job)
        return moment


def _plain(value: Any) -> Any:
    """Return the tensor below the wrappers of `torch.func`."""
    functorch = torch._C._functorch
    while isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


def _size(storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage as it is now, which asking a region's would bring."""
    return int(torch.UntypedStorage.nbytes(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _storage_of(memory: torch.UntypedStorage | torch.Tensor) -> torch.UntypedStorage:
    return memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory


class Watcher(TorchDispatchMode):
    """Tells the emulated accelerator what operators touch, and refuses those on absent tensors.

    Args:
        queues: of the accelerator.
        owns: whether a storage is a region's.
    """

    def __init__(self, queues: Emulated, owns: Callable[[torch.UntypedStorage], bool]) -> None:
        super().__init__()
        self._queues, self._owns = queues, owns
        self.seen = 0

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """See all operators of this thread, and those on regions of others."""
        count = unseen._count_dispatching

        def of_others() -> int:  # who looks at a session
            return count() - (self in _stack())

        with (
            mock.patch.object(unseen, "_count_dispatching", of_others),
            mock.patch.object(guarded, "call_below", self._seeing(guarded.call_below)),
            mock.patch.object(guarded, "call_plain", self._seeing(guarded.call_plain)),
            self,
        ):
            yield self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = map(_plain, tree_leaves((args, kwargs)))
        if any(isinstance(leaf, torch.Tensor) and is_guarded(leaf) for leaf in leaves):
            return func(*args, **kwargs)  # it comes below
        self.see(func, args, kwargs)
        with counting_writes(func, args, kwargs):  # which torch does, without a mode
            return call_below(func, args, kwargs)

    def _seeing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def seen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.see(func, args, kwargs)
            return call(func, args, kwargs)

        return seen

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at an operator that is called now.

        Raises:
            Race: it touches what is absent.
        """
        if str(func) in self._queues.full_for:
            self._queues.full_for.remove(str(func))
            raise torch.OutOfMemoryError(f"the emulated accelerator has no memory for {func}")
        schema = func._schema
        aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
        if all(alias.is_write for alias in aliases):  # else it is a view, and touches no byte
            written = {
                id(_plain(leaf))
                for argument, given in (
                    *zip(schema.arguments, args, strict=False),
                    *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
                )
                if argument.alias_info is not None and argument.alias_info.is_write
                for leaf in tree_leaves(given)
            }
            for leaf in map(_plain, tree_leaves((args, kwargs))):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
                    storage = leaf.untyped_storage()
                    if not self._owns(storage):
                        continue
                    self.seen += 1
                    if isinstance(storage, RowStorage):
                        if any(name in str(func) for name in ("_like", "aten.new_", "aten.set_.")):
                            continue  # it reads no byte
                        raise Race(f"{func} touches a row, which has no memory as a whole")
                    if _size(storage) == 0:
                        raise Race(f"{func} touches an absent tensor")
                    self._queues.access(COMPUTE, storage, str(func), writes=id(leaf) in written)


@contextmanager
def emulated(seed: int = 0, **options: Any) -> Iterator[Emulated]:
    """Open an emulated accelerator; what races it found fails the block."""
    queues = Emulated(seed, **options)
    try:
        yield queues
    finally:
        queues.close()
    if queues.races:
        raise Race("\n".join(queues.races[:5]))


DEVICE = "privateuseone"
"""What sessions within `accelerated` name as their device."""


@contextmanager
def accelerated(
    seed: int = 0, *, memory: int = 1 << 40, elsewhere: bool = False, watched: bool = True
) -> Iterator[Emulated]:
    """Let sessions that name `DEVICE` as their device take an emulated accelerator.

    Args:
        seed: of its delays.
        elsewhere: what comes from the CPU is not on the accelerator, which has the CPU's tensors:
            so it goes back where it came from as a block ends.
        memory: bytes that it has.
        watched: a mode of the tests sees every operator. While it is on, torch calls modes whatever
            becomes of ours, so faults in entering and leaving ours show only without it.
    """
    made: list[Accelerator] = []
    begin = opening.Accelerator

    def opened(*args: Any, **kwargs: Any) -> Accelerator:
        made.append(begin(*args, **kwargs))
        return made[-1]

    def owns(storage: torch.UntypedStorage) -> bool:
        return any(device.owner(storage) >= 0 for device in made)

    with emulated(seed, delay_s=0.0005, memory=memory) as queues:
        # Not the CPU without a number, which its tensors are on.
        place = (lambda model: torch.device("cpu", 0)) if elsewhere else target._place_of
        with (
            mock.patch.object(target, "_place_of", place),
            mock.patch.object(target, "open_streams", return_value=queues),
            mock.patch.object(opening, "Accelerator", opened),
            Watcher(queues, owns).watching() if watched else nullcontext() as seen,
        ):
            yield queues
        assert made, "no session began"
        assert seen is None or seen.seen > 0, "nothing was seen: this shows nothing"
        assert queues.host_bytes == 0, "host memory is left"
