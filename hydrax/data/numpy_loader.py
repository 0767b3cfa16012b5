"""Data loaders over NumPy arrays, for programs under ``jit``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from hydrax._convert import convert
from hydrax._mapped import reads_of
from hydrax._specs import dlpack_code
from hydrax.data._draws import Chain, Selections
from hydrax.data._host import SourceDataLoader
from hydrax.data._loaders import DataLoader, DeviceDataLoader, MiniBatchInformation, array_struct
from hydrax.data._source import DrawSource

__all__ = ["DeviceNumpyDataLoader", "NumpyBase", "NumpyDataLoader"]


class NumpyBase(DataLoader):
    """What the loaders over NumPy arrays have in common.

    Args:
        on_device: Whether the data are to lie on JAX's default device.
        copy: Whether to copy the arrays; otherwise do not change them afterwards.
        **reference_data: Arrays with an equal first dimension, the observations, each under the
            name that it gets in a mini-batch.

    Raises:
        TypeError: There are no arrays, or one holds something that JAX has no dtype for.
        ValueError: The arrays differ in their first dimension, or are empty.
    """

    def __init__(self, on_device: bool = True, copy: bool = True, **reference_data: Any) -> None:
        super().__init__()
        if not reference_data:
            raise ValueError("no data: give at least one array, such as x=numpy.arange(10)")
        self._data: dict[str, Any] = {}
        for name, value in sorted(reference_data.items()):
            is_copied = copy or (isinstance(value, jax.Array) and not on_device)
            if is_copied:
                array = np.array(value)
            else:  # a memory map stays one, so that it is known
                array = value if isinstance(value, np.memmap) else np.asarray(value)
            if dlpack_code(array.dtype) is None:
                raise TypeError(
                    f"{name} has dtype {array.dtype}, which cannot be an array of JAX; give "
                    "arrays of numbers"
                )
            if not array.dtype.isnative:
                array = array.astype(array.dtype.newbyteorder("="))
            if array.ndim == 0:
                raise ValueError(f"{name} is a scalar; its first dimension counts observations")
            self._data[name] = array
        counts = {name: len(array) for name, array in self._data.items()}
        if len(set(counts.values())) != 1:
            lengths = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise ValueError(
                f"the arrays must have the same number of observations (first dimension): {lengths}"
            )
        self._count = next(iter(counts.values()))
        if self._count == 0:
            raise ValueError("the arrays have 0 observations (first dimension); expected 1 or more")
        if on_device:
            for name, array in self._data.items():
                self._data[name] = _on_device(name, array)

    @property
    def reference_data(self) -> dict[str, Any]:
        """The data, one array under each name: on the device, or else of NumPy.

        Do not change them.
        """
        return dict(self._data)

    @property
    def static_information(self) -> dict[str, Any]:
        """``{"observation_count": int}``."""
        return {"observation_count": self._count}

    @property
    def _format(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: array_struct(array.shape[1:], array.dtype) for name, array in self._data.items()
        }


def _on_device(name: str, array: NDArray[Any]) -> jax.Array:
    """An array on JAX's default device, in the dtype that JAX has for it. May use its memory."""
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype != dtype:
        target = np.empty(array.shape, dtype)
        convert(name, array, target)
        array = target
    placed: jax.Array = jax.device_put(array)
    return placed


class _NumpySource(DrawSource):
    """Takes the observations of each draw out of arrays.

    Args:
        arrays: One per leaf.
        mb_size: Observations of a draw.
    """

    # Copying rows is quick: one processor is left to the program that draws.
    worker_count = min(2, max(1, (os.cpu_count() or 1) - 1))

    def __init__(self, arrays: Sequence[NDArray[Any]], mb_size: int) -> None:
        self._arrays = arrays
        self._reads = [reads for array in arrays if (reads := reads_of(array)) is not None]
        self._selections = Selections(len(arrays[0]), mb_size)

    @property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [(array.shape[1:], array.dtype) for array in self._arrays]

    def load(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        indices, valid = self._selections[chain].block(first, count)
        np.copyto(mask, valid)
        for array, target in zip(self._arrays, arrays, strict=True):
            # With mode="raise" NumPy would go through a buffer.
            np.take(array, indices, axis=0, out=target, mode="clip")
        for reads in self._reads:
            reads.note(indices.size, is_random=not chain.is_ordered)


class NumpyDataLoader(NumpyBase, SourceDataLoader):
    """Loads mini-batches out of NumPy arrays.

    The data stay in the memory of the main process, where the loader processes see them without a
    copy.

    Args:
        copy: Whether to copy the arrays; otherwise do not change them afterwards. A ``jax.Array``
            is always copied, once. For data larger than memory give a ``numpy.memmap`` and False.
        **reference_data: Arrays with an equal first dimension, the observations, each under the
            name that it gets in a mini-batch.

    Raises:
        TypeError: An array holds something that JAX has no dtype for.
        ValueError: There are no arrays, or they differ in their first dimension.

    Example:
        >>> x, y = np.arange(10), np.zeros((10, 4, 3))
        >>> data_loader = NumpyDataLoader(name_for_x=x, name_for_y=y)
        >>> zero_batch = data_loader.initializer_batch(4)
        >>> for key, value in zero_batch.items():
        ...     print(f"{key}: shape={value.shape}, dtype={value.dtype}")
        name_for_x: shape=(4,), dtype=int32
        name_for_y: shape=(4, 4, 3), dtype=float32
    """

    def __init__(self, copy: bool = True, **reference_data: Any) -> None:
        super().__init__(on_device=False, copy=copy, **reference_data)

    def register_random_pipeline(
        self,
        cache_size: int = 1,
        mb_size: int | None = None,
        in_epochs: bool = False,
        shuffle: bool = False,
        **kwargs: Any,
    ) -> int:
        """Begin a chain of random mini-batches.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch.
            in_epochs: With ``shuffle``, begin each order with a mini-batch of its own; what fills
                up the last one before is marked by a mask of False.
            shuffle: Take all observations in a random order, and then in another one, instead of
                drawing each independently.
            **kwargs: ``seed``: of the random order, an int; the id of the chain if it is left out,
                one from the operating system for None.

        Returns:
            The id of the chain.

        Raises:
            TypeError: Another option is given.
            ValueError: A size or the seed is out of range.
        """
        return super().register_random_pipeline(
            cache_size, mb_size, in_epochs=in_epochs, shuffle=shuffle, **kwargs
        )

    def _source(self, mb_size: int) -> DrawSource:
        return _NumpySource(list(self._data.values()), mb_size)


class DeviceNumpyDataLoader(NumpyBase, DeviceDataLoader):
    """Keeps all data on the device, and draws there. Nothing is kept on the host.

    Args:
        copy: Whether to copy the arrays; otherwise do not change them afterwards, as a CPU device
            may use their memory.
        **reference_data: Arrays with an equal first dimension, the observations, each under the
            name that it gets in a mini-batch.

    Raises:
        TypeError: An array holds something that JAX has no dtype for.
        ValueError: There are no arrays, or they differ in their first dimension.
        ValueRangeError: A number does not fit the dtype that JAX has for it.

    Example:
        >>> data_loader = DeviceNumpyDataLoader(x=np.arange(10))
        >>> state = data_loader.init_random_data(key=jax.random.PRNGKey(1))
        >>> state, (batch, information) = data_loader.get_random_data(state, 4)
        >>> batch["x"].shape, information.batch_size
        ((4,), 4)
    """

    def __init__(self, copy: bool = True, **reference_data: Any) -> None:
        super().__init__(on_device=True, copy=copy, **reference_data)

    def get_full_data(self) -> dict[str, jax.Array]:
        """The whole data set, one array under each name."""
        return dict(self._data)

    def init_random_data(self, *args: Any, **kwargs: Any) -> Any:
        """The state that draws begin with.

        Args:
            *args: Ignored.
            **kwargs: ``key``: a key of :mod:`jax.random`, by default ``PRNGKey(0)``.
        """
        key = kwargs.get("key")
        return jax.random.PRNGKey(0) if key is None else key

    def get_random_data(
        self, state: Any, batch_size: int
    ) -> tuple[Any, tuple[dict[str, jax.Array], MiniBatchInformation]]:
        """Draw observations independently of each other.

        Args:
            state: A key of :mod:`jax.random`.
            batch_size: Observations to draw.

        Returns:
            The next state, and the mini-batch with its information.
        """
        key, split = jax.random.split(state)
        rows = jax.random.randint(split, (batch_size,), 0, self._count)
        batch = jax.tree.map(lambda leaf: leaf[rows], self.get_full_data())
        information = MiniBatchInformation(self._count, jnp.ones(batch_size, jnp.bool_), batch_size)
        return key, (batch, information)
