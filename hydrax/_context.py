"""What code can ask about the process it runs in and the item that is being loaded."""

from __future__ import annotations

from typing import NamedTuple

from hydrax import _core

__all__ = ["LoaderContext", "is_worker", "loader_context"]

_is_worker = False
_worker_index: int | None = None
_run: _core.Run | None = None
_training_group_count = 0


class LoaderContext(NamedTuple):
    """Where a loader function is being called.

    Attributes:
        epoch: Training epoch of the item, counted from 0; for validation the number of the
            validation run.
        is_training: Whether the item belongs to a training batch.
        group_number: Which of the training, or of the validation groups.
        worker_index: Which loader process, counted from 0; None in the main process
            (``loader_count=0``).
    """

    epoch: int
    is_training: bool
    group_number: int
    worker_index: int | None


def is_worker() -> bool:
    """Whether this is a loader process.

    Example:
        >>> is_worker()
        False
    """
    return _is_worker


def loader_context() -> LoaderContext:
    """Where the loader function that calls this is being called.

    Loader processes do not see changes that the training process makes after they have started.
    What is to change in the course of training, such as the strength of an augmentation, is
    computed in the loader function from ``loader_context().epoch``.

    Raises:
        RuntimeError: No item is being loaded in this process.

    Example:
        >>> def load(descriptor, arrays, seed):
        ...     strength = min(1.0, hydrax.loader_context().epoch / 10)
    """
    if _run is None:
        raise RuntimeError("loader_context() is for loader functions; no item is being loaded")
    is_training = _run.kind == _core.TRAINING
    group_number = _run.group if is_training else _run.group - _training_group_count
    return LoaderContext(_run.epoch, is_training, group_number, _worker_index)


def enter_worker(index: int) -> None:
    """Mark this process as loader process number index."""
    global _is_worker, _worker_index
    _is_worker = True
    _worker_index = index


def set_run(run: _core.Run | None, training_group_count: int) -> tuple[_core.Run | None, int]:
    """Set, or with None clear, the run whose items are being loaded; returns what was set."""
    global _run, _training_group_count
    previous = _run, _training_group_count
    _run = run
    _training_group_count = training_group_count
    return previous
