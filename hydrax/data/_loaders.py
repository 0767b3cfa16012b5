"""What a data loader has to offer: the classes to derive from."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "DataLoader",
    "DeviceDataLoader",
    "HostDataLoader",
    "MiniBatchInformation",
    "array_struct",
    "tree_dtype_struct",
    "tree_index",
]

PyTree = Any


class MiniBatchInformation(NamedTuple):
    """What is known about a mini-batch beside its data.

    Attributes:
        observation_count: Observations of the data set.
        mask: ``(mb_size,)`` bool; False where an observation only fills up the batch.
        batch_size: Observations of a mini-batch.
    """

    observation_count: Any
    mask: Any
    batch_size: Any


def array_struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, in JAX's form."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def tree_index(pytree: PyTree, index: Any) -> PyTree:
    """Each leaf at an index of its first dimension.

    Args:
        pytree: Leaves of one dimension at least.
        index: An int or an array of ints.

    Example:
        >>> tree_index({"a": np.arange(4), "b": np.eye(4)}, 2)["a"].item()
        2
    """
    return jax.tree.map(lambda leaf: leaf[index], pytree)


def tree_dtype_struct(pytree: PyTree) -> PyTree:
    """Each leaf as a :class:`jax.ShapeDtypeStruct`.

    Example:
        >>> tree_dtype_struct({"a": np.zeros((4, 3), np.float32)})
        {'a': ShapeDtypeStruct(shape=(4, 3), dtype=float32)}
    """
    return jax.tree.map(lambda leaf: array_struct(leaf.shape, leaf.dtype), pytree)


class DataLoader(metaclass=abc.ABCMeta):
    """A source of observations. Derive from :class:`HostDataLoader` or :class:`DeviceDataLoader`.

    A subclass implements :attr:`static_information` and ``_format``: the pytree of one observation
    with :class:`jax.ShapeDtypeStruct` as leaves.
    """

    @property
    @abc.abstractmethod
    def _format(self) -> PyTree:
        """The pytree of one observation, with jax.ShapeDtypeStruct as leaves."""

    @property
    @abc.abstractmethod
    def static_information(self) -> dict[str, Any]:
        """What is known about the data set; ``"observation_count"`` at least."""

    def initializer_batch(self, mb_size: int | None = None) -> PyTree:
        """A mini-batch of zeros, to initialise a model with.

        Args:
            mb_size: Observations of the batch; None gives a single observation, without the
                dimension of the batch.

        Returns:
            The pytree of an observation, with ``jax.Array`` leaves ``(mb_size, ...)``.
        """
        leading = () if mb_size is None else (mb_size,)
        return jax.tree.map(
            lambda leaf: jnp.zeros(
                leading + tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)
            ),
            self._format,
        )


class DeviceDataLoader(DataLoader):
    """A data loader whose whole data set is on the device.

    A subclass implements the methods below, free of side effects, so that they can be traced.
    """

    @abc.abstractmethod
    def get_full_data(self) -> dict[str, jax.Array]:
        """The whole data set, one array under each name."""

    @abc.abstractmethod
    def get_random_data(
        self, state: Any, batch_size: int
    ) -> tuple[Any, tuple[Any, MiniBatchInformation]]:
        """A random mini-batch.

        Args:
            state: As :meth:`init_random_data` or the last call has returned it.
            batch_size: Observations of the mini-batch.

        Returns:
            The next state, and the mini-batch with its information.
        """

    @abc.abstractmethod
    def init_random_data(self, *args: Any, **kwargs: Any) -> Any:
        """The state that :meth:`get_random_data` begins with."""


class HostDataLoader(DataLoader):
    """A data loader whose data set is not on the device.

    A subclass that you write implements the abstract methods, with NumPy and without JAX; they are
    called in the main process, one at a time. The loaders of this package load in processes of
    their own instead.
    """

    @abc.abstractmethod
    def register_random_pipeline(
        self, cache_size: int = 1, mb_size: int | None = None, **kwargs: Any
    ) -> int:
        """Begin a chain of random mini-batches.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch.
            **kwargs: What the ``init`` of :func:`random_reference_data` was given.

        Returns:
            The id of the chain.
        """

    @abc.abstractmethod
    def register_ordered_pipeline(
        self, cache_size: int = 1, mb_size: int | None = None, **kwargs: Any
    ) -> int:
        """Begin a chain of mini-batches in the order of the data.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch.
            **kwargs: What the ``init`` of :func:`full_reference_data` was given.

        Returns:
            The id of the chain.
        """

    @abc.abstractmethod
    def get_batches(self, chain_id: int) -> tuple[PyTree, np.ndarray[Any, Any] | None]:
        """The next mini-batches of a chain.

        Returns:
            The pytree of an observation with leaves ``(cache_size, mb_size, ...)``, and the mask,
            ``(cache_size, mb_size)`` bool, or None where all of them count.
        """

    def save_state(self, chain_id: int) -> Any:
        """What is needed to go on with a chain where it stands."""
        raise NotImplementedError(
            f"{type(self).__name__} does not save states; implement save_state and load_state"
        )

    def load_state(self, chain_id: int, data: Any) -> None:
        """Let a chain go on where :meth:`save_state` was called."""
        raise NotImplementedError(
            f"{type(self).__name__} does not load states; implement save_state and load_state"
        )

    def batch_format(self, cache_size: int, mb_size: int) -> tuple[PyTree, MiniBatchInformation]:
        """Shapes and dtypes of what :meth:`get_batches` returns.

        Args:
            cache_size: Mini-batches that are returned at a time.
            mb_size: Observations of a mini-batch.
        """
        struct = jax.tree.map(
            lambda leaf: array_struct((cache_size, mb_size, *leaf.shape), leaf.dtype),
            self._format,
        )
        count = self.static_information["observation_count"]
        return struct, MiniBatchInformation(count, np.ones(mb_size, np.bool_), mb_size)
