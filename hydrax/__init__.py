"""Hydrax: zero-copy, multiprocess data loading for JAX.

A :class:`Dataloader` forks loader processes that run your loader function straight into shared
memory; the training loop gets :class:`TrainingBatch` and :class:`ValidationBatch` objects whose
``jax.Array`` objects are that memory.

Importing this package does not import JAX, so that loader processes stay free of it.
"""

from hydrax._batch import Batch, TrainingBatch, ValidationBatch
from hydrax._context import LoaderContext, is_worker, loader_context
from hydrax._datagroup import DataGroup
from hydrax._dataloader import Dataloader
from hydrax._references import debug_batch_references
from hydrax._specs import ArrayLayout
from hydrax._stats import LoaderStats, WorkerStats
from hydrax._version import __version__
from hydrax.errors import (
    ArenaMemoryError,
    BatchRetainedError,
    BatchTimeoutError,
    CacheError,
    CacheMissingError,
    HydraxError,
    ImageError,
    JaxInWorkerError,
    LoaderError,
    StateError,
    UnwrittenArrayError,
    ValueRangeError,
    WorkerDiedError,
    WorkerStartError,
)

__all__ = [
    "ArenaMemoryError",
    "ArrayLayout",
    "Batch",
    "BatchRetainedError",
    "BatchTimeoutError",
    "CacheError",
    "CacheMissingError",
    "DataGroup",
    "Dataloader",
    "HydraxError",
    "ImageError",
    "JaxInWorkerError",
    "LoaderContext",
    "LoaderError",
    "LoaderStats",
    "StateError",
    "TrainingBatch",
    "UnwrittenArrayError",
    "ValidationBatch",
    "ValueRangeError",
    "WorkerDiedError",
    "WorkerStartError",
    "WorkerStats",
    "__version__",
    "debug_batch_references",
    "is_worker",
    "loader_context",
]
