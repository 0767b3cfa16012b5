"""What a run of items leaves, as it travels from a worker to the main process.

Its results, and why items of it could not be loaded.
"""

from __future__ import annotations

import bdb
import os
import pickle
import traceback
from typing import NamedTuple

__all__ = ["EXITS", "STARTING_UP", "LoadFailure", "RunReport", "describe_failure", "is_of"]

# Characters of a message or a traceback that go into an error's text; the exception itself has all.
_TEXT_LENGTH = 100_000

EXITS = (KeyboardInterrupt, SystemExit, bdb.BdbQuit)
"""Exceptions that ask the program to end, whatever is being loaded."""

STARTING_UP = "starting up"
"""Stage of a failure that is about no item."""


def is_of(error: BaseException, kinds: type | tuple[type, ...]) -> bool:
    """Like isinstance(), without asking the exception for its ``__class__``, which may raise."""
    return issubclass(type(error), kinds)


class LoadFailure(NamedTuple):
    """An item that could not be loaded, as it travels to the main process.

    Attributes:
        kind: Name of the exception's type.
        message: Its text.
        traceback_text: As the worker saw it.
        exception: The exception pickled, or None where it cannot be.
        arrays: What the item's arrays were, for the message.
        stage: What was being done.
        pid: Of the process it happened in.
        is_exit: Whether it asks the program to end and so is not about the item.
    """

    kind: str
    message: str
    traceback_text: str
    exception: bytes | None
    arrays: str
    stage: str
    pid: int
    is_exit: bool = False


class RunReport(NamedTuple):
    """What a run leaves that has more to say than its results.

    Attributes:
        results: The additional results, pickled: their classes may refuse to be rebuilt, and the
            rest is to be read even so. None if there are none.
        skipped: Item, counted within the batch, to why it was left out.
        checksums: Item to array name to checksum; only in debug mode.
    """

    results: bytes | None
    skipped: dict[int, LoadFailure]
    checksums: dict[int, dict[str, int]]


def _cut(text: str) -> str:
    """Beginning and end of a text that is longer than anybody reads."""
    left_out = len(text) - _TEXT_LENGTH
    if left_out <= 0:
        return text
    half = _TEXT_LENGTH // 2
    return f"{text[:half]}\n... ({left_out} characters) ...\n{text[-half:]}"


def describe_failure(error: BaseException, arrays: str, stage: str) -> LoadFailure:
    """An exception as something that can be sent, whatever its own methods do."""
    try:
        message = _cut(str(error))
    except BaseException as other:
        message = f"<its text cannot be had: {type(other).__name__}>"
    try:
        text = _cut("".join(traceback.format_exception(error)))
    except BaseException as other:
        text = f"<its traceback cannot be had: {type(other).__name__}>"
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except BaseException:
        pickled = None
    try:
        kind = type(error).__qualname__
        if type(error).__module__ != "builtins":
            kind = f"{type(error).__module__}.{kind}"
    except BaseException:  # its metaclass may do anything, too
        kind = "an exception"
    if is_of(error, bdb.BdbQuit):
        message = "a debugger cannot be used in a loader process; use loader_count=0 for that"
    return LoadFailure(
        kind, message, text, pickled, arrays, stage, os.getpid(), is_of(error, EXITS)
    )
