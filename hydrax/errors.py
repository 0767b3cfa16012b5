"""What can go wrong, one class per thing a user can act on.

Every class derives from :class:`HydraxError` and from the built-in exception that a caller would
expect, so that both ``except hydrax.HydraxError`` and ``except TimeoutError`` do what they say.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArenaMemoryError",
    "ArrayChangedError",
    "ArrayKeptError",
    "BatchRetainedError",
    "BatchTimeoutError",
    "CacheError",
    "CacheMissingError",
    "HydraxError",
    "ImageError",
    "JaxInWorkerError",
    "LoaderError",
    "RaggedLengthError",
    "StateError",
    "UnwrittenArrayError",
    "ValueRangeError",
    "WorkerDiedError",
    "WorkerStartError",
]


class HydraxError(Exception):
    """Base of all errors that Hydrax itself raises.

    Wrong arguments are the exception: they raise the plain ``TypeError`` or ``ValueError`` that
    Python programmers expect, at construction.
    """


class BatchTimeoutError(HydraxError, TimeoutError):
    """No batch came within ``timeout_sec``.

    The message says what each loader process was doing, with the Python stack of those that were
    loading.
    """


class BatchRetainedError(BatchTimeoutError):
    """No batch came within ``timeout_sec``, as every slot was held by arrays of earlier batches.

    The message says what holds them: variables, containers, frames that a traceback keeps, or
    computations that JAX has not finished.
    """


class LoaderError(HydraxError, RuntimeError):
    """The loader function raised, or what it returned could not be used.

    Raised by ``next()`` in the place of the batch that holds the item; the loader goes on with the
    following batch when ``next()`` is called again. ``__cause__`` is the original exception where
    it could be brought over from the worker.

    Attributes:
        descriptor: The item's descriptor, ``group[index]``.
        index: Position of the item in its DataGroup.
        group_number: Which of the training (or validation) groups, counted from 0.
        epoch: Epoch of the batch; for validation the number of the validation run.
        seed: The seed that the loader was given; None for validation.
        traceback_text: The traceback as the worker saw it.
    """

    def __init__(
        self,
        message: str,
        *,
        descriptor: Any = None,
        index: int | None = None,
        group_number: int | None = None,
        epoch: int | None = None,
        seed: int | None = None,
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.descriptor = descriptor
        self.index = index
        self.group_number = group_number
        self.epoch = epoch
        self.seed = seed
        self.traceback_text = traceback_text


class WorkerDiedError(HydraxError, RuntimeError):
    """A loader process ended on its own: killed, crashed, or exited.

    Raised by ``next()``, also if the process was idle, unless ``max_restarts`` allows for another
    one in its place.

    Attributes:
        worker_index: Which loader process, counted from 0.
        pid: Its process id.
        exitcode: Exit status, or minus the number of the signal that ended it; None if unknown.
        indices: Positions in their DataGroup of the items that it had taken to load.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_index: int = -1,
        pid: int = 0,
        exitcode: int | None = None,
        indices: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.worker_index = worker_index
        self.pid = pid
        self.exitcode = exitcode
        self.indices = indices


class JaxInWorkerError(HydraxError, RuntimeError):
    """The loader function, or startup_func, uses JAX in a forked process, where JAX cannot work.

    It would wait there for ever. Use NumPy in loader functions: what they fill becomes jax.Arrays
    in the main process. The run cannot go on after this error.

    Attributes:
        worker_index: Which loader process, counted from 0.
        pid: Its process id.
        filename: File of the innermost line outside of JAX.
        lineno: Its line.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_index: int = -1,
        pid: int = 0,
        filename: str = "",
        lineno: int = 0,
    ) -> None:
        super().__init__(message)
        self.worker_index = worker_index
        self.pid = pid
        self.filename = filename
        self.lineno = lineno


class WorkerStartError(HydraxError, RuntimeError):
    """A loader process could not start: what it needs could not be loaded there."""


class ArenaMemoryError(HydraxError, MemoryError):
    """The arena does not fit the memory that is available; the message gives both sizes."""


class ValueRangeError(HydraxError, ValueError):
    """A loaded value does not fit the dtype in which JAX is to get it.

    Attributes:
        item: Which of the converted items, or None where that is not known.
    """

    def __init__(self, message: str, *, item: int | None = None) -> None:
        super().__init__(message)
        self.item = item


class RaggedLengthError(HydraxError, ValueError):
    """The length of an item does not fit its array, or was not set; see :class:`~hydrax.Ragged`.

    Attributes:
        item: Which item of a batched loader function's call, counted from 0.
    """

    def __init__(self, message: str, *, item: int = 0) -> None:
        super().__init__(message)
        self.item = item


class StateError(HydraxError, ValueError):
    """A state does not fit the Dataloader that it is given to; the message names what differs."""


class CacheError(HydraxError, RuntimeError):
    """The disk cache cannot be used: it was made under other parameters, or cannot hold a value.

    The message names what differs, or which additional result cannot be kept.
    """


class CacheMissingError(CacheError, FileNotFoundError):
    """A cache, or a batch of it, is not there or is damaged, and nothing could stand in for it.

    So it is with ``loader_arrays=None``, where every batch comes from the cache, and with a cache
    that may only be read and does not exist.

    Attributes:
        path: The file that is missing or damaged.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class UnwrittenArrayError(HydraxError, ValueError):
    """In debug mode: the loader function did not fill an array completely."""


class ArrayKeptError(HydraxError, ValueError):
    """In debug mode: something still refers to an array of the loader function after its return.

    By then the array's memory belongs to the batch, and later to another one.
    """


class ArrayChangedError(HydraxError, RuntimeError):
    """In debug mode: an array's memory was written to when nobody may.

    As the cause of a :class:`LoaderError`: after the loader function had returned, before the batch
    was delivered. Raised by ``next`` or at the end of the ``with`` block as it is: while the
    training loop had the batch, which holds for everything that takes part in it, such as a library
    that got the array through DLPack.
    """


class ImageError(HydraxError, OSError):
    """An image could not be read; the message names the file and the reason."""
