"""Python stacks of loader processes, taken from outside, whatever they are doing.

A loader process has `faulthandler` answer a real-time signal: C code that needs no GIL writes the
stack of the thread that got it to a file in memory. The main process holds the same open file, so
it sets where the writing begins, and reads what came. Threads are asked one by one, each for its
own stack: to read the stack of one that runs meanwhile could crash the process. What a crash leaves
goes to the file, too. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hydrax import _core

__all__ = ["Frame", "Process", "Stack", "StackFiles", "format_stack", "offer_stacks"]

# How long a process may take to write its stack, for which it has to be scheduled; and each
# further thread.
_ANSWER_S = 1.0
_THREAD_S = 0.1
_LOOK_S = 0.002
# Threads other than the loading one that are asked, and shown.
_ASKED_THREADS = 16
_SHOWN_THREADS = 3

_PACKAGE = os.path.dirname(__file__) + os.sep
_OFFER = re.compile(rb"offer (\d+) (\d+)\n")
_CRASH = "Fatal Python error"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)$')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")


class Frame(NamedTuple):
    """Where a function stands."""

    path: str
    line: int
    function: str


class Process(NamedTuple):
    """A process to ask for its stacks; pidfd makes sure that no other is asked."""

    pid: int
    pidfd: int


class Stack(NamedTuple):
    """What a loader process is doing.

    Attributes:
        frames: Of the loading thread, from the function that Hydrax has called to the innermost.
        threads: Those of other Python threads.
        reason: Why there are no frames, where there are none.
    """

    frames: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()
    reason: str = ""


def offer_stacks(fd: int) -> None:
    """In a loader process: have stacks written to fd, at a signal and where it crashes.

    Which signal that is, and which number fd has here, is the first thing to be written there.
    Signals that this process already handles are left alone. As long as the signal is not
    blocked, it must not be sent before; a handler that this finds installed stays.
    """
    faulthandler.enable(fd)
    os.register_at_fork(after_in_child=_tell_stderr)  # the file is not for what the loader forks
    for signum in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        if signal.getsignal(signum) == signal.SIG_DFL:
            # System calls that it interrupts are restarted, where the kernel can do so.
            faulthandler.register(signum, fd, all_threads=False, chain=False)
            os.write(fd, b"offer %d %d\n" % (signum, fd))
            return


def _tell_stderr() -> None:
    """Have a crash of this process written to stderr, as usual."""
    faulthandler.disable()
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # no file
        faulthandler.enable()


class StackFiles:
    """The files that loader processes write their stacks to, one each.

    They are made by :meth:`open` and closed by :meth:`close`, once, by the process that made them.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._offers: dict[int, tuple[int, int]] = {}

    def open(self, count: int) -> None:
        """Make the files of so many processes."""
        for _ in range(count):
            self._fds.append(os.memfd_create("hydrax-stack"))

    def close(self) -> None:
        """Give the files back. May be called again."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def renew(self, index: int) -> int:
        """The file for a process that is about to start as number index, empty."""
        self._offers.pop(index, None)
        self._clear(index)
        return self._fds[index]

    def take(
        self, processes: Mapping[int, Process], *, of_all_threads: bool = False
    ) -> dict[int, Stack]:
        """The present stack of each of some processes.

        Args:
            processes: Number of a process to what it is.
            of_all_threads: Whether to ask all Python threads, and not the loading one only.
        """
        stacks: dict[int, Stack] = {}
        asked = {}
        for index, process in processes.items():
            reason = self._refusal(index, process) or self._ask(index, process, process.pid)
            if reason:
                stacks[index] = Stack(reason=reason)
            else:
                asked[index] = time.monotonic() + _ANSWER_S
        for index, deadline_s in asked.items():
            process = processes[index]
            frames = _parse(self._answer(index, process.pid, process.pid, deadline_s))
            if frames is None:
                stacks[index] = Stack(reason=_silence(process.pid))
            else:
                threads = self._threads(index, process) if of_all_threads else ()
                stacks[index] = Stack(_from_loader(frames), threads)
        return stacks

    def _answer(self, index: int, pid: int, thread: int, deadline_s: float) -> str:
        """Wait until a thread has dealt with the signal; returns what it has written."""
        signum, _ = self._offers[index]
        task = f"{pid}/task/{thread}"
        quiet_looks = 0
        with contextlib.suppress(OSError):  # it has ended
            while time.monotonic() < deadline_s:
                # It waits for the thread, or is being handled, and blocked meanwhile. In between
                # it can be neither for a moment.
                is_busy = _has(task, "SigPnd", signum) or _has(task, "SigBlk", signum)
                quiet_looks = 0 if is_busy else quiet_looks + 1
                # Of the threads, only those of Python write anything.
                if quiet_looks >= 2 and (thread != pid or self._read(index)):
                    break
                time.sleep(_LOOK_S)
        return self._read(index)

    def _threads(self, index: int, process: Process) -> tuple[tuple[Frame, ...], ...]:
        """The stacks of the Python threads other than the one that loads."""
        threads = []
        signum, _ = self._offers[index]
        with contextlib.suppress(OSError):  # it has ended
            for thread in map(int, os.listdir(f"/proc/{process.pid}/task")[:_ASKED_THREADS]):
                task = f"{process.pid}/task/{thread}"
                if thread == process.pid or _has(task, "SigBlk", signum):
                    continue
                if not self._ask(index, process, thread):
                    deadline_s = time.monotonic() + _THREAD_S
                    frames = _parse(self._answer(index, process.pid, thread, deadline_s))
                    if frames is not None:
                        threads.append(frames)
        return tuple(threads)

    def report_crash(self, index: int) -> str:
        """Tell where a process that has ended stood when it crashed.

        Everything that faulthandler wrote goes to stderr, where it is looked for.

        Returns:
            A newline and the stack of the thread that crashed, for a message; "" if none did.
        """
        text = self._read(index)
        start = text.rfind(_CRASH)
        if start < 0:
            return ""
        text = text[start:].partition("\nExtension modules:")[0].rstrip("\n")
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or no file
            sys.stderr.write(text + "\n")
        crashed = next((part for part in text.split("\n\n") if "Current thread" in part), text)
        frames = _parse(crashed)
        return "" if frames is None else "\n" + "\n".join(_format_frames(_from_loader(frames)))

    def _clear(self, index: int) -> None:
        os.ftruncate(self._fds[index], 0)
        os.lseek(self._fds[index], 0, os.SEEK_SET)  # of the one open file that both hold

    def _read(self, index: int) -> str:
        fd = self._fds[index]
        return os.pread(fd, os.fstat(fd).st_size, 0).decode("ascii", "replace")

    def _refusal(self, index: int, process: Process) -> str:
        """Why a process cannot be asked, or ""."""
        try:
            if index not in self._offers:
                offer = _OFFER.match(os.pread(self._fds[index], 64, 0))
                if offer is None:
                    return "it has not got so far as to show its stack"
                self._offers[index] = int(offer[1]), int(offer[2])
            if _CRASH in self._read(index):
                return "it is crashing"
            signum, fd = self._offers[index]
            # It may have closed the file, or taken the signal: both would do harm.
            if not _is_same_file(self._fds[index], f"/proc/{process.pid}/fd/{fd}"):
                return "it has closed the file that its stack is written to"
            if not _has(str(process.pid), "SigCgt", signum):
                return f"it has reset signal {signum}, by which it shows its stack"
        except OSError as error:  # it has ended, or descriptors have run out
            return f"it cannot be asked: {error.strerror}"
        return ""

    def _ask(self, index: int, process: Process, thread: int) -> str:
        """Have a thread write its stack; returns why that is not possible, or ""."""
        self._clear(index)
        try:
            signal.pidfd_send_signal(process.pidfd, 0)  # that the pid is still of this process
            _core.signal_thread(process.pid, thread, self._offers[index][0])
        except OSError as error:
            return f"it cannot be asked: {error.strerror}"
        return ""


def format_stack(stack: Stack, indent: str = "") -> list[str]:
    """Lines that look like those of a traceback, with the source where it can be read."""
    if not stack.frames:
        return [f"{indent}(no Python stack: {stack.reason})"]
    lines = _format_frames(stack.frames)
    for frames in stack.threads[:_SHOWN_THREADS]:
        lines += ["and another thread of it at", *_format_frames(frames)]
    return [indent + line for line in lines]


def _format_frames(frames: Iterable[Frame]) -> list[str]:
    summary = traceback.StackSummary.from_list(
        [(frame.path, frame.line, frame.function, None) for frame in frames]
    )
    return "".join(summary.format()).splitlines()


def _is_same_file(fd: int, path: str) -> bool:
    ours = os.fstat(fd)
    with contextlib.suppress(FileNotFoundError):
        theirs = os.stat(path)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
    return False


def _status_of(task: str, field: str) -> str:
    for line in Path(f"/proc/{task}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return ""


def _has(task: str, field: str, signum: int) -> bool:
    """Whether a signal is in a set of signals of a process or thread, as /proc shows it."""
    return bool(int(_status_of(task, field) or "0", 16) >> (signum - 1) & 1)


def _silence(pid: int) -> str:
    """Why a process may not have answered."""
    with contextlib.suppress(OSError):
        if _status_of(str(pid), "State").startswith("D"):
            return (
                "it is in a system call that cannot be interrupted, as on a file system that does "
                "not answer"
            )
    return f"it has not answered within {_ANSWER_S:g} s; it may have blocked all signals"


def _parse(text: str) -> tuple[Frame, ...] | None:
    """The stack that faulthandler wrote, from its outer end; None if there is none."""
    frames = []
    for line in text.splitlines():
        if match := _FRAME.match(line):
            path, number, function = match.groups()
            frames.append(Frame(_plain(path), int(number), _plain(function)))
    return tuple(reversed(frames)) or None


def _start_of_loading(frames: Sequence[Frame]) -> int | None:
    for position, frame in enumerate(frames):
        if frame.function == "run_worker" and frame.path.startswith(_PACKAGE):
            return position
    return None


def _from_loader(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Without what has led to the call of the user's function."""
    start = _start_of_loading(frames) or 0
    for position in range(start, len(frames)):
        if not frames[position].path.startswith(_PACKAGE):
            return frames[position:]
    return frames[start:]


def _plain(text: str) -> str:
    """Characters as they were; faulthandler writes ASCII only."""
    return _ESCAPED.sub(lambda match: chr(int(match[0][2:], 16)), text)
