"""Hydrax: zero-copy, multiprocess data loading for JAX.

A :class:`Dataloader` forks loader processes that run your loader function straight into shared
memory; the training loop gets :class:`TrainingBatch` and :class:`ValidationBatch` objects whose
``jax.Array`` objects are that memory.

Importing this package does not import JAX, so that loader processes stay free of it.
"""

from hydrax._batch import Batch, TrainingBatch, ValidationBatch
from hydrax._buckets import PackPlan, bucket_by_length, pack_sequences
from hydrax._context import LoaderContext, is_worker, loader_context
from hydrax._datagroup import DataGroup
from hydrax._dataloader import Dataloader
from hydrax._ragged import length_mask
from hydrax._references import debug_batch_references
from hydrax._share import process_share
from hydrax._specs import ArrayLayout, Ragged
from hydrax._stats import LoaderStats, WorkerStats
from hydrax._version import __version__
from hydrax.errors import (
    ArenaMemoryError,
    ArrayChangedError,
    ArrayKeptError,
    BatchRetainedError,
    BatchTimeoutError,
    CacheError,
    CacheMissingError,
    HydraxError,
    ImageError,
    JaxInWorkerError,
    LoaderError,
    RaggedLengthError,
    StateError,
    UnwrittenArrayError,
    ValueRangeError,
    WorkerDiedError,
    WorkerStartError,
)

__all__ = [
    "ArenaMemoryError",
    "ArrayChangedError",
    "ArrayKeptError",
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
    "PackPlan",
    "Ragged",
    "RaggedLengthError",
    "StateError",
    "TrainingBatch",
    "UnwrittenArrayError",
    "ValidationBatch",
    "ValueRangeError",
    "WorkerDiedError",
    "WorkerStartError",
    "WorkerStats",
    "__version__",
    "bucket_by_length",
    "debug_batch_references",
    "is_worker",
    "length_mask",
    "loader_context",
    "pack_sequences",
    "process_share",
]
