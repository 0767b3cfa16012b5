"""Start loader processes, watch them, and end them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from hydrax import _core, _spawned
from hydrax._worker_main import Job, leave, leave_group, run_worker, signals_held
from hydrax.errors import WorkerDiedError

__all__ = ["StartMethod", "WorkerPool"]

StartMethod = Literal["fork", "forkserver", "spawn"]

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


class WorkerPool:
    """The loader processes of one Dataloader.

    Args:
        arena: Shared with them; outlives the pool.
        count: How many.
        start_method: How they come into being.
        job: What they do.
        packed_job: The same as bytes, for the start methods that need it.
        timeout_s: How long a fresh process may take to be ready; None waits for ever.
    """

    def __init__(
        self,
        arena: _core.Arena,
        count: int,
        start_method: StartMethod,
        job: Job,
        packed_job: bytes | None,
        timeout_s: float | None,
    ) -> None:
        self._arena = arena
        self._count = count
        self._start_method = start_method
        self._job = job
        self._packed_job = packed_job
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._resources = contextlib.ExitStack()

    def start(self) -> None:
        """Start all processes; if one cannot be started, none is left."""
        trainer_fd = os.pidfd_open(os.getpid())
        self._resources.callback(os.close, trainer_fd)
        try:
            if self._start_method == "fork":
                self._fork_all(trainer_fd)
            elif self._start_method == "spawn":
                self._spawn_all(trainer_fd)
            else:
                self._fork_all_from_server(trainer_fd)
        except BaseException:
            self.stop()
            raise

    def _add(self, pid: int, reap: Callable[[], int | None]) -> None:
        try:
            worker = _Worker(pid, os.pidfd_open(pid), reap)
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            reap()
            raise
        self._arena.watch(len(self._workers), worker.pidfd)
        self._workers.append(worker)

    def _fork_all(self, trainer_fd: int) -> None:
        # What is buffered would be written by every child, too.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        for index in range(self._count):
            # Signals wait until a fresh child is ready for them and this process knows of it.
            with signals_held():
                pid = self._fork(index, trainer_fd)
                self._add(pid, lambda pid=pid: _wait_for(pid))  # type: ignore[misc]

    def _fork(self, index: int, trainer_fd: int) -> int:
        # The warnings say that a forked child must not use JAX or other threads' locks. A worker
        # does not, and the user did not write the call that they are about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
            if pid == 0:
                self._be_worker(index, trainer_fd)
        leave_group(pid)
        return pid

    def _be_worker(self, index: int, trainer_fd: int) -> NoReturn:
        status = 1
        try:
            run_worker(self._arena, self._job, index, trainer_fd)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            leave(status)

    def _spawn_all(self, trainer_fd: int) -> None:
        assert self._packed_job is not None
        connections = []
        for _ in range(self._count):
            with signals_held():
                process, connection = _spawned.start()
                self._resources.callback(connection.close)
                self._add(process.pid, process.wait)
            connections.append(connection)
        for index, connection in enumerate(connections):
            _spawned.introduce(connection, self._arena, trainer_fd, index, self._packed_job)
        for connection in connections:
            _spawned.await_ready(connection, self._timeout_s)

    def _fork_all_from_server(self, trainer_fd: int) -> None:
        assert self._packed_job is not None
        with signals_held():
            server, connection = _spawned.start()
            self._resources.callback(_end_server, server)
            self._resources.callback(connection.close)
        _spawned.introduce(connection, self._arena, trainer_fd, None, self._packed_job)
        _spawned.await_ready(connection, self._timeout_s)
        for index in range(self._count):
            pid = _spawned.fork_worker(connection, index)
            self._add(pid, lambda pid=pid: _spawned.reap_worker(connection, pid))  # type: ignore[misc]

    def __len__(self) -> int:
        return self._count

    @property
    def pids(self) -> list[int]:
        """Process id of each worker."""
        return [worker.pid for worker in self._workers]

    def ended(self, index: int, describe: Callable[[int, int], str]) -> WorkerDiedError:
        """Collect a worker that has ended on its own, as the error that says so.

        Args:
            index: Number of the worker.
            describe: Text for the item at a position of a batch with a serial number.
        """
        worker = self._workers[index]
        self._arena.watch(index, -1)
        exitcode = worker.reap()
        worker.reap = lambda: exitcode
        _, item, *_ = self._arena.worker_state(index)
        doing = "" if item is None else f" while loading {describe(*item)}"
        return WorkerDiedError(
            f"loader process {index} (pid {worker.pid}) {_describe_exit(exitcode)}{doing}"
            f"{_hint(exitcode)}",
            worker_index=index,
            pid=worker.pid,
            exitcode=exitcode,
        )

    def stop(self) -> None:
        """End all processes and give back what they needed. May be called again."""
        self._arena.close()
        workers, self._workers = self._workers, []
        running = {worker.pidfd for worker in workers}
        try:
            _wait_for_all(running)
        finally:
            # Also when a signal's handler raised while this was waiting.
            for fd in running:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            for index, worker in enumerate(workers):
                self._arena.watch(index, -1)
                worker.reap()
                os.close(worker.pidfd)
            self._resources.close()


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


def _hint(exitcode: int | None) -> str:
    hints: dict[int | None, str] = {
        -signal.SIGKILL: "; the kernel does that when memory runs out",
        -signal.SIGBUS: "; a file that it had mapped may have become shorter",
        -signal.SIGSEGV: "; native code crashed, see the Python stack on stderr",
    }
    return hints.get(exitcode, "")
