"""A loader process: it takes runs of items, has them loaded, and is quiet otherwise.

Imports no JAX.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from hydrax import _context, _core
from hydrax._failures import STARTING_UP
from hydrax._random import ItemRandom
from hydrax._stacks import offer_stacks
from hydrax.errors import HydraxError

__all__ = ["Job", "RunLoader", "leave", "leave_group", "run_worker", "signals_held"]

# Time slice of a loader process; the usual one is about 3 ms.
_SLICE_NS = 20_000_000

# What a loader process adds to its badness in the eyes of the kernel that has run out of memory:
# as much as half of all memory.
_OOM_SCORE = 500


class RunLoader(Protocol):
    """Loads runs of items in a loader process."""

    @property
    def random(self) -> ItemRandom:
        """The global generators' switch."""

    def load(self, run: _core.Run) -> None:
        """Load a run's items and end the run."""

    def fail(self, run: _core.Run, error: BaseException, stage: str) -> None:
        """End a run as failed without loading it."""


class Job(Protocol):
    """What the loader processes of an arena do; the same for all of them."""

    @property
    def nice(self) -> int:
        """Added to their niceness."""

    @property
    def startup_func(self) -> Callable[[], None] | None:
        """Called once in each of them before it loads."""

    def make_loader(self, arena: _core.Arena) -> RunLoader:
        """What loads there."""


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise HydraxError(
        "breakpoint() cannot be used in a loader process, which has no terminal; "
        "use loader_count=0, which loads the same batches in the main process"
    )


def leave_group(pid: int) -> None:
    """Give a process, 0 for this one, a process group of its own.

    A process that forks a worker and the worker both do it, so that neither has to wait.
    """
    with contextlib.suppress(OSError):  # it has one already, or has ended
        os.setpgid(pid, pid)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back all signals, so that a fresh process is not hit before it is ready for them.

    Another thread, of a library, may get one all the same. Ctrl+C then waits for the end, too: what
    its handler raises in what Python calls before and after a fork would be lost.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    is_deferred = callable(handler) and threading.current_thread() is threading.main_thread()
    # Blocking may raise what came just before it, so that what is to be undone is known before.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if is_deferred:
            signal.signal(signal.SIGINT, lambda signum, _: came.append(signum))
        yield
    finally:
        try:
            if is_deferred:
                signal.signal(signal.SIGINT, handler)
                for signum in came[:1]:
                    signal.raise_signal(signum)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _offer_to_die_first() -> None:
    """Where memory runs out the kernel is to end this process, so that the trainer can say so."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < _OOM_SCORE:
            file.write(str(_OOM_SCORE))


def _settle_in(job: Job, index: int, stack_fd: int) -> None:
    """Make this process a good worker: quiet, guarded, and out of the way of the others."""
    # Ctrl+C and kill go to a whole process group; it is for the main process to act on them, so
    # this process leaves its group, and what came until then is dropped. When the main process
    # ends, the guard ends this one, whatever it is doing. Signals keep their usual meaning, as
    # processes that the loader function starts inherit it, from their first moment on.
    leave_group(0)
    while signal.sigtimedwait((signal.SIGINT, signal.SIGTERM), 0) is not None:
        pass
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    offer_stacks(stack_fd)  # while signals still wait
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
    sys.breakpointhook = _refuse_breakpoint
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    if job.nice:
        with contextlib.suppress(OSError):  # it takes a privilege to be less nice
            os.nice(job.nice)
    _offer_to_die_first()
    # The trainer works for a moment now and then; where processors are few it must get one at once.
    _core.take_slices(_SLICE_NS)
    # The parent's objects are not this process's to collect: looking at them would copy them.
    gc.freeze()
    _context.enter_worker(index)


def run_worker(arena: _core.Arena, job: Job, index: int, trainer_fd: int, stack_fd: int) -> None:
    """Be loader process number index until the arena is closed or the trainer ends.

    Args:
        arena: The shared arena.
        job: What to do.
        index: Number of this worker.
        trainer_fd: pidfd of the trainer; taken.
        stack_fd: Where this process's Python stacks are written to; taken.
    """
    _settle_in(job, index, stack_fd)
    _core.start_guard(os.dup(trainer_fd))
    loader = job.make_loader(arena)
    loader.random.install()
    failure: BaseException | None = None
    if job.startup_func is not None:
        try:
            job.startup_func()
        except BaseException as error:
            failure = error
    arena.set_started(index)
    while (run := arena.claim(index, trainer_fd, None)) is not None:
        if failure is None:
            loader.load(run)
        else:
            loader.fail(run, failure, STARTING_UP)


def leave(status: int) -> NoReturn:
    """End this process at once, without the clean-up that belongs to the main process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or no file
            stream.flush()
    os._exit(status)
