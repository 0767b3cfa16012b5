"""Python stacks of loader processes, taken from outside, whatever they are doing.

A loader process has `faulthandler` answer a real-time signal: C code that needs no GIL writes the
stacks of all threads to a file in memory. The main process holds the same open file, so it sets
where the writing begins, and reads what came. What a crash leaves goes there, too. Imports no JAX.
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

__all__ = ["Frame", "Process", "Stack", "StackFiles", "format_stack", "offer_stacks"]

# How long a process may take to write its stacks. It has to be scheduled for it.
_ANSWER_S = 1.0
_LOOK_S = 0.005
# Threads other than the loading one that are worth showing.
_SHOWN_THREADS = 3

_PACKAGE = os.path.dirname(__file__) + os.sep
_OFFER = re.compile(rb"offer (\d+) (\d+)\n")
_CRASH = "Fatal Python error"
_THREAD = re.compile(r".*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)$')
_CUT_OFF = "  ...\n"
_OUTERMOST = " in run_worker\n"
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
            faulthandler.register(signum, fd, all_threads=True, chain=False)
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

    def take(self, processes: Mapping[int, Process]) -> dict[int, Stack]:
        """The present stack of each of some processes.

        Args:
            processes: Number of a process to what it is.
        """
        stacks: dict[int, Stack] = {}
        waiting = []
        for index, process in processes.items():
            reason = self._ask(index, process)
            if reason:
                stacks[index] = Stack(reason=reason)
            else:
                waiting.append(index)
        deadline_s = time.monotonic() + _ANSWER_S
        sizes = dict.fromkeys(waiting, -1)
        while waiting:
            is_late = time.monotonic() > deadline_s
            for index in list(waiting):
                text = self._read(index)
                is_whole = _OUTERMOST in text or text.endswith(_CUT_OFF)
                if is_late or (is_whole and len(text) == sizes[index]):
                    waiting.remove(index)
                    stacks[index] = _parse(text) or Stack(reason=_silence(processes[index].pid))
                sizes[index] = len(text)
            if waiting:
                time.sleep(_LOOK_S)
        return stacks

    def report_crash(self, index: int) -> str:
        """Tell where a process that has ended stood when it crashed.

        Everything that faulthandler wrote goes to stderr, where it is looked for.

        Returns:
            A newline and the loading thread's stack, for a message; "" where it did not crash.
        """
        text = self._read(index)
        start = text.rfind(_CRASH)
        if start < 0:
            return ""
        text = text[start:].partition("\nExtension modules:")[0].rstrip("\n")
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or no file
            sys.stderr.write(text + "\n")
        stack = _parse(text)
        return "" if stack is None else "\n" + "\n".join(_format_frames(stack.frames))

    def _clear(self, index: int) -> None:
        os.ftruncate(self._fds[index], 0)
        os.lseek(self._fds[index], 0, os.SEEK_SET)  # of the one open file that both hold

    def _read(self, index: int) -> str:
        fd = self._fds[index]
        return os.pread(fd, os.fstat(fd).st_size, 0).decode("ascii", "replace")

    def _ask(self, index: int, process: Process) -> str:
        """Send the signal; returns why it was not sent, or ""."""
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
            if not _is_caught(process.pid, signum):
                return f"it has reset signal {signum}, by which it shows its stack"
            self._clear(index)
            signal.pidfd_send_signal(process.pidfd, signum)
        except OSError as error:  # it has ended, or descriptors have run out
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


def _status_of(pid: int, field: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return ""


def _is_caught(pid: int, signum: int) -> bool:
    return bool(int(_status_of(pid, "SigCgt") or "0", 16) >> (signum - 1) & 1)


def _silence(pid: int) -> str:
    """Why a process may not have answered."""
    with contextlib.suppress(OSError):
        if _status_of(pid, "State").startswith("D"):
            return (
                "it is in a system call that cannot be interrupted, as on a file system that does "
                "not answer"
            )
    return f"it has not answered within {_ANSWER_S:g} s; it may have blocked all signals"


def _parse(text: str) -> Stack | None:
    """The stack in what faulthandler wrote, or None if there is none."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            path, number, function = match.groups()
            threads[-1].append(Frame(_plain(path), int(number), _plain(function)))
    stacks = [tuple(reversed(frames)) for frames in threads if frames]
    if not stacks:
        return None
    # The thread that loads is the oldest one, which is written last.
    main = next((s for s in stacks if _start_of_loading(s) is not None), stacks[-1])
    others = tuple(stack for stack in stacks if stack is not main)
    return Stack(_from_loader(main), others)


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
