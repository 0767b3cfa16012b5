"""Start loader processes, watch them, and end them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from hydrax import _core, _spawned
from hydrax._jax_watch import is_jax_running
from hydrax._memory import available_nbytes, format_nbytes
from hydrax._stacks import Process, Stack, StackFiles
from hydrax._worker_main import Job, leave, leave_group, run_worker, signals_held
from hydrax.errors import WorkerDiedError, WorkerStartError

__all__ = ["StartMethod", "WorkerPool"]

logger = logging.getLogger(__name__)

StartMethod = Literal["fork", "forkserver", "spawn"]

# How many of the items that a dead worker had taken are listed.
_LISTED_ITEMS = 8

# How long workers that are still loading may go on after the end, before they are killed.
_GRACE_S = 0.25


@dataclass
class _Worker:
    """A loader process.

    Attributes:
        pid: Its process id.
        pidfd: Becomes readable when it ends; owned.
        reap: Collects its exit code once it has ended; None if somebody else has collected it.
    """

    pid: int
    pidfd: int
    reap: Callable[[], int | None]


_fork_lock = threading.Lock()


def _renew_fork_lock() -> None:
    global _fork_lock
    _fork_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_fork_lock)


class WorkerPool:
    """The loader processes of one Dataloader.

    Args:
        arena: Shared with them; outlives the pool.
        count: How many.
        start_method: How they come into being.
        job: What they do.
        packed_job: The same as bytes, for the start methods that need it.
        timeout_s: How long a fresh process may take to be ready; None waits for ever.
        max_restarts: How many processes that have ended on their own are replaced.
        indices_of: Positions in the group of the ``count`` items from ``first`` on of a batch with
            a serial number, as ``indices_of(serial, first, count)``; None leaves them out.

    Attributes:
        restart_count: Processes that have been replaced so far.
        retried_count: Items that these had taken, and that are loaded again.
    """

    def __init__(
        self,
        arena: _core.Arena,
        count: int,
        start_method: StartMethod,
        job: Job,
        packed_job: bytes | None,
        timeout_s: float | None,
        max_restarts: int = 0,
        indices_of: Callable[[int, int, int], list[int]] | None = None,
    ) -> None:
        self._arena = arena
        self._count = count
        self._start_method = start_method
        self._job = job
        self._packed_job = packed_job
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._indices_of = indices_of
        self._workers: dict[int, _Worker] = {}
        self._pids = [0] * count
        self._endings = select.poll()
        self._trainer_fd = -1
        self._server: socket.socket | None = None
        self._stack_files = StackFiles()
        self._is_forked_from_jax = self._is_forking = False
        self._resources = contextlib.ExitStack()
        self.restart_count = self.retried_count = 0

    def start(self) -> None:
        """Start all processes; if one cannot be started, none is left."""
        self._trainer_fd = os.pidfd_open(os.getpid())
        self._resources.callback(self._close_trainer_fd)
        self._resources.callback(self._stack_files.close)
        self._is_forked_from_jax = self._start_method == "fork" and is_jax_running()
        try:
            self._stack_files.open(self._count)
            if self._start_method == "forkserver":
                self._start_server()
            self._start_workers(range(self._count))
        except BaseException:
            self.stop()
            raise

    def _start_workers(self, indices: Sequence[int]) -> None:
        if self._start_method == "fork":
            self._fork_workers(indices)
        elif self._start_method == "spawn":
            self._spawn_workers(indices)
        else:
            self._fork_workers_from_server(indices)

    def _add(self, index: int, pid: int, reap: Callable[[], int | None]) -> None:
        try:
            worker = _Worker(pid, os.pidfd_open(pid), reap)
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            reap()
            raise
        self._arena.watch(index, worker.pidfd)
        self._endings.register(worker.pidfd, select.POLLIN)
        self._workers[index] = worker
        self._pids[index] = pid

    def _fork_workers(self, indices: Sequence[int]) -> None:
        # What is buffered would be written by every child, too.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        for index in indices:
            # Signals wait until a fresh child is ready for them and this process knows of it.
            with signals_held():
                pid = self._fork(index)
                self._add(index, pid, lambda pid=pid: _wait_for(pid))  # type: ignore[misc]

    def _fork(self, index: int) -> int:
        stack_fd = self._stack_files.renew(index)
        # The warnings say that a forked child must not use JAX or other threads' locks. A worker
        # does not, and the user did not write the call that they are about.
        # One fork at a time: what other libraries do before and after one need not stand several.
        with _fork_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._is_forking = True
            try:
                pid = os.fork()
            finally:
                self._is_forking = False
            if pid == 0:
                self._be_worker(index, stack_fd)
        leave_group(pid)
        return pid

    def _be_worker(self, index: int, stack_fd: int) -> NoReturn:
        status = 1
        try:
            run_worker(self._arena, self._job, index, self._trainer_fd, stack_fd)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            leave(status)

    def _spawn_workers(self, indices: Sequence[int]) -> None:
        assert self._packed_job is not None
        with contextlib.ExitStack() as connections:
            started = []
            for index in indices:
                with signals_held():
                    process, connection = _spawned.start()
                    connections.callback(connection.close)
                    self._add(index, process.pid, process.wait)
                started.append((index, connection))
            for index, connection in started:
                worker = index, self._stack_files.renew(index)
                _spawned.introduce(
                    connection, self._arena, self._trainer_fd, worker, self._packed_job
                )
            for _, connection in started:
                _spawned.await_ready(connection, self._timeout_s)

    def _start_server(self) -> None:
        assert self._packed_job is not None
        with signals_held():
            server, connection = _spawned.start()
            self._resources.callback(_end_server, server)
            self._resources.callback(connection.close)
        _spawned.introduce(connection, self._arena, self._trainer_fd, None, self._packed_job)
        _spawned.await_ready(connection, self._timeout_s)
        self._server = connection

    def _fork_workers_from_server(self, indices: Sequence[int]) -> None:
        for index in indices:
            try:
                pid = self._fork_by_server(index)
            except (EOFError, OSError) as error:
                raise WorkerStartError(
                    "the process that forks the loader processes has ended"
                ) from error
            self._add(index, pid, lambda by=self._server, pid=pid: _spawned.reap_worker(by, pid))  # type: ignore[misc]

    def _fork_by_server(self, index: int) -> int:
        assert self._server is not None
        try:
            return _spawned.fork_worker(self._server, index, self._stack_files.renew(index))
        except (EOFError, OSError):
            logger.warning("the process that forks the loader processes has ended; another starts")
            self._server.close()
            self._start_server()
            return _spawned.fork_worker(self._server, index, self._stack_files.renew(index))

    def __len__(self) -> int:
        return self._count

    @property
    def pids(self) -> list[int]:
        """Process id of each worker; of one that has ended, what it was."""
        return list(self._pids)

    @property
    def is_forked_from_jax(self) -> bool:
        """Whether the workers were forked while JAX was running; there it would wait for ever."""
        return self._is_forked_from_jax

    def stacks(self, indices: Iterable[int], *, of_all_threads: bool = False) -> dict[int, Stack]:
        """Where some of the workers stand now, by their numbers; not of those that have ended."""
        workers = {index: self._workers[index] for index in indices if index in self._workers}
        return self._stack_files.take(
            {index: Process(worker.pid, worker.pidfd) for index, worker in workers.items()},
            of_all_threads=of_all_threads,
        )

    def find_ended(self) -> int | None:
        """Number of a worker that has ended on its own, or None. Does not wait."""
        ended = {fd for fd, _ in self._endings.poll(0)}
        return next((i for i, worker in self._workers.items() if worker.pidfd in ended), None)

    def replace(self, index: int, describe: Callable[[int, int], str]) -> None:
        """Put another process in the place of a worker that has ended; it loads its items again.

        Args:
            index: Number of the worker.
            describe: Text for the item at a position of a batch with a serial number.

        Raises:
            WorkerDiedError: ``max_restarts`` processes have been replaced already.
            WorkerStartError: Another process could not be started.
        """
        error = self.bury(index, describe)
        if self.restart_count >= self._max_restarts:
            raise error
        self.restart_count += 1
        self.retried_count += len(error.indices)
        logger.warning(
            "restart %d of at most %d (max_restarts): %s",
            self.restart_count,
            self._max_restarts,
            error,
        )
        self._start_workers((index,))

    def bury(self, index: int, describe: Callable[[int, int], str]) -> WorkerDiedError:
        """Collect a worker that has ended on its own, as the error that says so."""
        worker = self._workers.pop(index)
        self._arena.watch(index, -1)
        self._endings.unregister(worker.pidfd)
        exitcode = worker.reap()
        os.close(worker.pidfd)
        is_started, item, *_ = self._arena.worker_state(index)
        run = self._arena.worker_run(index)
        self._arena.bury(index)
        indices: tuple[int, ...] = ()
        doing = " while it waited for work" if is_started else " before it had started"
        if item is not None and run is not None:
            doing = f" while loading {describe(*item)}"
            indices = tuple(self._indices_of(*run)) if self._indices_of is not None else ()
            if len(indices) > 1:
                listed = ", ".join(map(str, indices[:_LISTED_ITEMS]))
                rest = len(indices) - _LISTED_ITEMS
                doing += f"; it had taken items {listed}" + (f" and {rest} more" * (rest > 0))
        return WorkerDiedError(
            f"loader process {index} (pid {worker.pid}) {_describe_exit(exitcode)}{doing}"
            f"{self._hint(exitcode)}{self._stack_files.report_crash(index)}",
            worker_index=index,
            pid=worker.pid,
            exitcode=exitcode,
            indices=indices,
        )

    def _hint(self, exitcode: int | None) -> str:
        """What may have been the cause, to be added to a sentence."""
        if exitcode == -signal.SIGKILL:
            return (
                "; the kernel does that when memory runs out: the arena takes "
                f"{format_nbytes(self._arena.nbytes)}, and {format_nbytes(available_nbytes())} "
                "are available now"
            )
        if exitcode == -signal.SIGBUS:
            return "; a file that it had mapped may have become shorter"
        if exitcode == -signal.SIGSEGV:
            return "; native code crashed, see the Python stack on stderr"
        return ""

    def stop(self) -> None:
        """End all processes and give back what they needed. May be called again."""
        self._arena.close()
        workers, self._workers = self._workers, {}
        running = {worker.pidfd for worker in workers.values()}
        try:
            _wait_for_all(running)
        finally:
            # Also when a signal's handler raised while this was waiting.
            for worker in workers.values():
                if worker.pidfd in running:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                    # And what its loader function has started: nobody else waits for that. The
                    # number is the group's as long as the worker has not been collected.
                    with contextlib.suppress(OSError):
                        os.killpg(worker.pid, signal.SIGKILL)
            for index, worker in workers.items():
                self._arena.watch(index, -1)
                worker.reap()
                os.close(worker.pidfd)
            self._resources.close()

    def abandon(self) -> None:
        """In a process that was forked from this one: let go of what it got, and of that only."""
        if self._is_forking:
            return  # it is a worker, which needs some of it
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            os.close(worker.pidfd)
        self._stack_files.close()
        self._close_trainer_fd()
        if self._server is not None:
            self._server.close()
        self._resources.pop_all()  # the server's end is not its business

    def _close_trainer_fd(self) -> None:
        fd, self._trainer_fd = self._trainer_fd, -1
        if fd >= 0:
            os.close(fd)


def _end_server(server: subprocess.Popen[bytes]) -> None:
    """Wait for a fork server that has lost its connection; it may still be importing."""
    try:
        server.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait_for(pid: int) -> int | None:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # the user ignores SIGCHLD, or collects all children himself
        return None
    return os.waitstatus_to_exitcode(status)


def _wait_for_all(running: set[int]) -> None:
    """Remove from a set of pidfds those whose processes end within the time of grace."""
    poll = select.poll()
    for fd in running:
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + _GRACE_S
    while running and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            running.discard(fd)


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is None:
        return "ended, and its exit status was collected by somebody else,"
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        name = f"signal {-exitcode}"
    return f"was ended by {name}"
