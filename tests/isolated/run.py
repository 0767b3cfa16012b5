"""Runs the scripts of this folder in interpreters of their own, under a watchdog."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
WATCHDOG_S = 50.0


class Result(NamedTuple):
    """What became of a script."""

    returncode: int
    stdout: str
    stderr: str


def start(*command: str, stdin: str | None = None) -> subprocess.Popen[str]:
    """Start an interpreter with all warnings on, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-W", "default", *command],
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"},
    )
    if stdin is not None:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        process.stdin = None
    return process


def finish(process: subprocess.Popen[str], timeout_s: float = WATCHDOG_S) -> Result:
    """Wait for the end of what start() returned; ended by the watchdog it is a failure."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"not done after {timeout_s} s\nstdout:\n{stdout}\nstderr:\n{stderr}"
        ) from None
    return Result(process.returncode, stdout, stderr)


def run_script(name: str, *args: str, timeout_s: float = WATCHDOG_S) -> Result:
    """Run a script of this folder to its end."""
    return finish(start(str(FOLDER / name), *args), timeout_s)


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an exit code that nobody has fetched.

    Its main thread may have ended before the others, and then it runs.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] != "Z" or int(fields[17]) > 1


def seconds_until_gone(pids: Iterable[int], at_most_s: float) -> float:
    """Seconds until none of the processes runs; those left at the end are killed and named."""
    start_s = time.monotonic()
    left = set(pids)
    while left := {pid for pid in left if is_running(pid)}:
        if time.monotonic() - start_s > at_most_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes {sorted(left)} still run after {at_most_s} s")
        time.sleep(0.01)
    return time.monotonic() - start_s
