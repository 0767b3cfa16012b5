"""An item that could not be loaded, as it travels from a worker to the main process."""

from __future__ import annotations

import bdb
import os
import pickle
import traceback
from typing import NamedTuple

__all__ = ["LoadFailure", "describe_failure"]


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
    """

    kind: str
    message: str
    traceback_text: str
    exception: bytes | None
    arrays: str
    stage: str
    pid: int


def describe_failure(error: BaseException, arrays: str, stage: str) -> LoadFailure:
    """An exception as something that can be sent, whatever its own methods do."""
    try:
        message = str(error)
    except BaseException as other:
        message = f"<its text cannot be had: {type(other).__name__}>"
    try:
        text = "".join(traceback.format_exception(error))
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
    if isinstance(error, bdb.BdbQuit):
        message = "a debugger cannot be used in a loader process; use loader_count=0 for that"
    return LoadFailure(kind, message, text, pickled, arrays, stage, os.getpid())
