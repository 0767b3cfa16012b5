"""A process that was started afresh: a spawned worker, or a server that forks workers.

Both ends of its conversation with the trainer are here: the trainer sends descriptors and what to
do over a socket, and hears back whether that could be loaded. Unlike a forked worker, such a
process never inherits the threads of the trainer. It imports no JAX of its own accord.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import warnings
from typing import Any, NoReturn

from hydrax import _context, _core
from hydrax._failures import LoadFailure, describe_failure
from hydrax._item_loader import LoadJob
from hydrax._sequences import dumps
from hydrax._worker_main import leave, leave_group, run_worker, signals_held
from hydrax.errors import WorkerStartError

__all__ = ["pack_job", "serve", "start"]

_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<q")
_FORK, _REAP = b"F", b"R"
_UNKNOWN = 2**32  # no exit code


def pack_job(job: LoadJob) -> bytes:
    """The job and what a fresh process must know to unpickle it, as bytes.

    Raises:
        TypeError: Something cannot be pickled or found again by a fresh process; names it.
    """
    main = sys.modules.get("__main__")
    is_importable = getattr(main, "__spec__", None) is not None or os.path.exists(
        getattr(main, "__file__", "")
    )
    parts: dict[str, Any] = {"loader_func": job.loader_func, "startup_func": job.startup_func}
    parts.update({f"the data of group {i}": group.data for i, group in enumerate(job.groups)})
    for name, part in parts.items():
        try:
            packed = dumps(part)
        except Exception as error:
            raise TypeError(
                f"{name} ({part!r:.80}) cannot be pickled, which start_method='spawn' and "
                f"'forkserver' need: {error}; use start_method='fork', or define it at the top "
                "level of a module and without open files or locks"
            ) from error
        if not is_importable and b"__main__" in packed:
            raise TypeError(
                f"{name} ({part!r:.80}) is defined in an interactive session or a script without "
                "a file, where a fresh process cannot find it; use start_method='fork', or put "
                "it into a module"
            )
    preparation = multiprocessing.spawn.get_preparation_data("hydrax-loader")
    # The child's own business, and a secret that cannot be pickled.
    for key in ("authkey", "start_method", "log_to_stderr"):
        preparation.pop(key, None)
    return pickle.dumps((preparation, dumps(job)), protocol=5)


class _Process(subprocess.Popen[bytes]):
    """A process whose end is the business of the pool that started it.

    Python would say of one that still runs when this is deleted that it does: in a process that was
    forked meanwhile, or where the pool ends it a moment later.
    """

    def __del__(self) -> None:
        pass


def start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fresh process; it waits for introduce()."""
    here, there = socket.socketpair()
    with there:
        code = f"import sys; sys.path[:] = {sys.path!r}; from hydrax import _spawned; "
        # Signals wait until the process is ready for them; exec keeps the mask.
        with signals_held():
            process = _Process(
                [sys.executable, "-c", code + f"_spawned.enter({there.fileno()})"],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
    return process, here


def introduce(
    connection: socket.socket,
    arena: _core.Arena,
    trainer_fd: int,
    worker: tuple[int, int] | None,
    job: bytes,
) -> None:
    """Send what the process needs.

    Args:
        connection: To the process.
        arena: What it is to attach to.
        trainer_fd: pidfd of this process.
        worker: Be a worker, with this number and file for stacks; None: be a fork server.
        job: What pack_job() returned.
    """
    number, *stack_fd = (-1,) if worker is None else worker
    socket.send_fds(connection, [_NUMBER.pack(number)], [*arena.fds, trainer_fd, *stack_fd])
    connection.sendall(_LENGTH.pack(len(job)))
    connection.sendall(job)


def await_ready(connection: socket.socket, timeout_s: float | None) -> None:
    """Wait until the process has loaded its job; None waits for ever.

    Raises:
        WorkerStartError: It could not; with the traceback from there.
    """
    connection.settimeout(timeout_s)
    try:
        message = _receive_message(connection)
    except TimeoutError:
        raise WorkerStartError(
            f"a loader process had not imported the main module and loaded its data within "
            f"timeout_sec={timeout_s:g} seconds; put what the script does under "
            "if __name__ == '__main__':"
        ) from None
    except EOFError:
        raise WorkerStartError(
            "a loader process ended while it started; its own output says why"
        ) from None
    connection.settimeout(None)
    if message:
        failure = LoadFailure(*pickle.loads(message))
        raise WorkerStartError(
            f"a loader process could not load what it needs: {failure.kind}: {failure.message}\n"
            f"{failure.traceback_text}"
        )


def fork_worker(connection: socket.socket, index: int, stack_fd: int) -> int:
    """Have the fork server start worker number index; returns its process id."""
    socket.send_fds(connection, [_FORK + _NUMBER.pack(index)], [stack_fd])
    return int(_NUMBER.unpack(_receive(connection, _NUMBER.size))[0])


def reap_worker(connection: socket.socket, pid: int) -> int | None:
    """Have the fork server collect a worker that has ended; returns its exit code, if known."""
    try:
        connection.sendall(_REAP + _NUMBER.pack(pid))
        answer = int(_NUMBER.unpack(_receive(connection, _NUMBER.size))[0])
    except (OSError, EOFError):  # the server has ended; what it started is collected elsewhere
        return None
    return None if answer == _UNKNOWN else answer


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(min(nbytes - len(parts), 2**20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _receive_message(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return _receive(connection, length)


def enter(fd: int) -> NoReturn:
    """Where a fresh process begins; fd is its inherited socket."""
    status = 1
    try:
        serve(socket.socket(fileno=fd))
        status = 0
    except (EOFError, ConnectionError):
        pass  # the trainer has ended, or no longer wants this process
    finally:
        leave(status)


def serve(connection: socket.socket) -> None:
    """Be a spawned worker, or the server that forks workers, as the trainer says."""
    # First, so that a main module without a guard is told where it is being imported.
    _context.enter_worker(-1)
    header, fds, _, _ = socket.recv_fds(connection, _NUMBER.size, 6)
    if len(header) < _NUMBER.size or len(fds) < 5:
        raise EOFError
    (index,) = _NUMBER.unpack(header)
    *arena_fds, trainer_fd = fds[:5]
    for fd in fds:
        os.set_inheritable(fd, False)
    packed = _receive_message(connection)
    try:
        arena = _core.Arena.attach(*arena_fds)
        preparation, packed_job = pickle.loads(packed)
        multiprocessing.spawn.prepare(preparation)
        job = pickle.loads(packed_job)
        del packed, packed_job
    except BaseException as error:
        message = pickle.dumps(tuple(describe_failure(error, "", "starting")))
        connection.sendall(_LENGTH.pack(len(message)) + message)
        return
    connection.sendall(_LENGTH.pack(0))
    if index >= 0:
        connection.close()
        run_worker(arena, job, index, trainer_fd, fds[5])
    else:
        _fork_on_demand(connection, arena, job, trainer_fd)


def _fork_on_demand(
    connection: socket.socket, arena: _core.Arena, job: LoadJob, trainer_fd: int
) -> None:
    """Fork and reap workers until the trainer closes the connection or ends."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(trainer_fd, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if trainer_fd in ready:
            return
        message, fds, _, _ = socket.recv_fds(connection, 1 + _NUMBER.size, 1)
        if len(message) < 1 + _NUMBER.size:
            raise EOFError
        command, (number,) = message[:1], _NUMBER.unpack(message[1:])
        if command == _REAP:
            try:
                _, status = os.waitpid(number, 0)
                answer = os.waitstatus_to_exitcode(status)
            except ChildProcessError:  # the main module has SIGCHLD ignored
                answer = _UNKNOWN
        else:
            answer = _fork_here(connection, arena, job, number, trainer_fd, fds[0])
            os.close(fds[0])
        connection.sendall(_NUMBER.pack(answer))


def _fork_here(
    connection: socket.socket,
    arena: _core.Arena,
    job: LoadJob,
    index: int,
    trainer_fd: int,
    stack_fd: int,
) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        leave_group(pid)
        return pid
    status = 1
    try:
        connection.close()
        os.set_inheritable(stack_fd, False)
        run_worker(arena, job, index, trainer_fd, stack_fd)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(status)
