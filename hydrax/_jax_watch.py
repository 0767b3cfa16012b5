"""Finds out that a loader function uses JAX in a forked process, where JAX waits for ever.

The threads of XLA do not survive a fork, and what waits for one of them never goes on. So a process
that loads, uses no processor time, and stands in JAX at two looks in a row is past help. Imports
no JAX.
"""

from __future__ import annotations

import bisect
import importlib.util
import linecache
import os
import struct
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydrax import _core
from hydrax._stacks import Frame, Stack

if TYPE_CHECKING:
    from hydrax._workers import WorkerPool

__all__ = ["JaxWatch", "is_in_jax", "is_jax_running", "jax_call", "source_of"]

# Without processor time for so long, a process is worth a look; and between two looks.
_IDLE_NS = 1_000_000_000
_BETWEEN_NS = 1_500_000_000
# Processor time that a process may use and still count as waiting, and as not having moved at all.
_SPARE_CPU_NS = 5_000_000
_SAME_CPU_NS = 20_000
# Of the native stack, what is read, and how many frames of XLA must be the innermost.
_STACK_NBYTES = 16 * 1024
_XLA_FRAMES = 3

_STDLIB = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_SITE = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})


def is_jax_running() -> bool:
    """Whether JAX has started in this process; a process that is forked then cannot use it."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    try:
        return bridge is not None and bool(bridge.backends_are_initialized())
    except Exception:  # no public function tells
        return True


def jax_call(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside of JAX, if the innermost ones are in JAX; else None.

    The standard library does not count: JAX waits and wraps with its help. An import that is
    going on is no such call, however long it takes.
    """
    is_inside = False
    for frame in reversed(frames):
        if _is_importing(frame):
            return None
        if frame.path.startswith(_jax_folders()):
            is_inside = True
        elif not _is_library(frame.path):
            return frame if is_inside else None
    return None


def is_in_jax(stack: Stack) -> bool:
    """Whether a thread is in JAX."""
    return any(jax_call(frames) is not None for frames in (stack.frames, *stack.threads))


def source_of(frame: Frame) -> str:
    """The source line of a frame, or "" where it cannot be read."""
    return linecache.getline(frame.path, frame.line).strip()


@dataclass
class _Look:
    """What was last seen of a process that is loading.

    Attributes:
        place: Which process it was, and what it was loading.
        cpu_ns: Its processor time then.
        since_ns: When that was.
        frames: The stack until into JAX, if it was seen to wait there.
        is_elsewhere: It was seen to wait somewhere else.
    """

    place: tuple[int, bool, tuple[int, int] | None]
    cpu_ns: int
    since_ns: int
    frames: tuple[Frame, ...] = ()
    is_elsewhere: bool = False


class JaxWatch:
    """Watches the forked loader processes of a Dataloader while ``next`` waits.

    Args:
        arena: Where the processes note what they are doing.
        pool: The processes.
    """

    def __init__(self, arena: _core.Arena, pool: WorkerPool) -> None:
        self._arena = arena
        self._pool = pool
        self._looks: dict[int, _Look] = {}

    def look(self) -> tuple[int, Stack] | None:
        """Look at all processes.

        Returns:
            Number of one that waits inside JAX, and the stack up to the first function there, if
            there is one; None where there is no such process.
        """
        suspects = [index for index in range(len(self._pool)) if self._is_suspect(index)]
        if not suspects:
            return None
        found = None
        for index, stack in self._pool.stacks(suspects).items():
            look = self._looks[index]
            frames = self._frames_until_jax(self._pool.pids[index], stack)
            if frames and frames == look.frames:
                found = index, Stack(frames)
            # To answer has taken some time.
            self._looks[index] = _Look(
                look.place,
                _cpu_ns(self._pool.pids[index]),
                time.monotonic_ns(),
                frames,
                is_elsewhere=not frames,
            )
        return found

    def _is_suspect(self, index: int) -> bool:
        """Whether a process has waited for long enough at one place to look where that is."""
        is_started, item, *_ = self._arena.worker_state(index)
        if is_started and item is None:
            self._looks.pop(index, None)
            return False
        pid = self._pool.pids[index]
        now, cpu_ns = time.monotonic_ns(), _cpu_ns(pid)
        look = self._looks.get(index)
        place = (pid, is_started, item)
        if look is None or look.place != place or cpu_ns - look.cpu_ns > _SPARE_CPU_NS:
            self._looks[index] = _Look(place, cpu_ns, now)
            return False
        if look.is_elsewhere and cpu_ns - look.cpu_ns < _SAME_CPU_NS:
            return False  # it must still be there, and is left in peace
        return now - look.since_ns > (_BETWEEN_NS if look.frames else _IDLE_NS)

    @staticmethod
    def _frames_until_jax(pid: int, stack: Stack) -> tuple[Frame, ...]:
        """The stack up to the first function of JAX, if it waits there; () if it does not."""
        call = jax_call(stack.frames)
        if call is not None:
            return stack.frames[: len(stack.frames) - stack.frames[::-1].index(call) + 1]
        if stack.frames and _waits_in_xla(pid):
            # From the line itself to native code, without a function of JAX between them.
            innermost = stack.frames[-1]
            if not _is_importing(innermost) and not _is_library(innermost.path):
                return stack.frames
        return ()


def _is_importing(frame: Frame) -> bool:
    return frame.path.startswith("<frozen importlib") or frame.function == "<module>"


def _is_library(path: str) -> bool:
    """Whether a file belongs to the standard library or to JAX."""
    if path.startswith((*_jax_folders(), "<frozen ")):
        return True
    return path.startswith(_STDLIB) and not path.startswith(_SITE)


def _jax_folders() -> tuple[str, ...]:
    global _folders
    if _folders is None:
        found = []
        for name in ("jax", "jaxlib"):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                found.append(os.path.dirname(spec.origin) + os.sep)
        _folders = tuple(found)
    return _folders


_folders: tuple[str, ...] | None = None


def _cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process; 0 once it has ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)  # how the kernel numbers these clocks
    except OSError:
        return 0


def _waits_in_xla(pid: int) -> bool:
    """Whether the main thread of a process waits in native code of jaxlib.

    Its stack is searched for addresses of code: from the innermost on, those outside of the C
    library are to be jaxlib's. Where the kernel does not let one process see another's memory, the
    answer is no.
    """
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text().split()
        if len(fields) < 3:
            return False  # it is running
        code = _code_regions(Path(f"/proc/{pid}/maps").read_text())
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(fields[-2], 16))
            stack = memory.read(_STACK_NBYTES)
    except (OSError, ValueError, OverflowError):
        return False
    starts = [start for start, _, _ in code]
    count = 0
    for (word,) in struct.iter_unpack("=Q", stack[: len(stack) // 8 * 8]):
        position = bisect.bisect(starts, word) - 1
        if position < 0 or word >= code[position][1]:
            continue
        path = code[position][2]
        if path.startswith(_jax_folders()):
            count += 1
            if count == _XLA_FRAMES:
                return True
        elif not os.path.basename(path).startswith(("libc.", "libc-", "libpthread", "ld-", "[")):
            return False
    return False


def _code_regions(maps: str) -> list[tuple[int, int, str]]:
    """Start, end and file of the executable mappings, in order."""
    regions = []
    for line in maps.splitlines():
        addresses, flags, _, _, _, *path = line.split(maxsplit=5)
        if "x" in flags and path:
            start, end = addresses.split("-")
            regions.append((int(start, 16), int(end, 16), path[0]))
    return regions
