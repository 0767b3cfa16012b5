"""Mini-batches for programs that run under ``jit``; the names of ``jax_sgmc.data``.

Data loaders are in :mod:`hydrax.data.numpy_loader`, :mod:`hydrax.data.hdf5_loader`,
:mod:`hydrax.data.tensorflow_loader` and :mod:`hydrax.data.arena_loader`.
"""

from hydrax.data.core import (
    CacheState,
    DataLoader,
    DeviceDataLoader,
    FullDataMapFunction,
    FullDataMapperFunction,
    GetBatchFunction,
    HostDataLoader,
    MaskedMappedFunction,
    MiniBatchInformation,
    UnmaskedMappedFunction,
    full_data_mapper,
    full_reference_data,
    last_error,
    random_reference_data,
    tree_dtype_struct,
    tree_index,
)

__all__ = [
    "CacheState",
    "DataLoader",
    "DeviceDataLoader",
    "FullDataMapFunction",
    "FullDataMapperFunction",
    "GetBatchFunction",
    "HostDataLoader",
    "MaskedMappedFunction",
    "MiniBatchInformation",
    "UnmaskedMappedFunction",
    "full_data_mapper",
    "full_reference_data",
    "last_error",
    "random_reference_data",
    "tree_dtype_struct",
    "tree_index",
]
