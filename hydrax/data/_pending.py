"""Programs that still run: whoever takes their data away waits for them first.

JAX returns before a program ends. What it drew from may be released meanwhile, on the next line.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax

__all__ = ["pending_results", "still_pending", "wait_for_results"]


def _arrays() -> list[Any]:
    arrays: list[Any] = jax.live_arrays()  # type: ignore[no-untyped-call]
    return arrays


def pending_results() -> list[Any]:
    """Results that somebody holds and that programs have not computed yet."""
    return still_pending(_arrays())


def still_pending(arrays: list[Any]) -> list[Any]:
    """Those of the arrays that have not been computed yet."""
    return [array for array in arrays if not array.is_deleted() and not array.is_ready()]


def wait_for_results() -> None:
    """Wait until all results that somebody holds are there, or have failed.

    Not in a callback on a thread of JAX's: a program would wait for it, and it for the program.
    """
    if isinstance(threading.current_thread(), threading._DummyThread):
        return
    for array in _arrays():
        with contextlib.suppress(Exception):  # the holder of the result gets to see it
            array.block_until_ready()
