"""Programs that still run: whoever takes their data away waits for them first.

JAX returns before a program ends. What it drew from may be released meanwhile, on the next line.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax

__all__ = ["has_pending_results", "wait_for_results"]


def _arrays() -> list[Any]:
    arrays: list[Any] = jax.live_arrays()  # type: ignore[no-untyped-call]
    return arrays


def has_pending_results() -> bool:
    """Whether somebody holds results that programs have not computed yet."""
    return any(not array.is_deleted() and not array.is_ready() for array in _arrays())


def wait_for_results() -> None:
    """Wait until all results that somebody holds are there, or have failed."""
    for array in _arrays():
        with contextlib.suppress(Exception):  # the holder of the result gets to see it
            array.block_until_ready()
