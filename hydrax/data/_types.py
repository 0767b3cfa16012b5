"""The state of a chain of draws, and the types of the functions that hydrax.data.core makes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

__all__ = [
    "CacheState",
    "FullDataMapFunction",
    "FullDataMapperFunction",
    "GetBatchFunction",
    "MaskedMappedFunction",
    "PyTree",
    "UnmaskedMappedFunction",
]

PyTree = Any


class CacheState(NamedTuple):
    """Which draw of which chain comes next: all that a draw depends on.

    It is a pytree of small arrays and can be carried, stacked for :func:`jax.vmap`, and saved with
    any checkpoint library. On the CPU it holds no data; elsewhere, and for data loaders that you
    have written, it holds the cache of mini-batches.

    Attributes:
        callback_uuid: None; there for programs that name it.
        cached_batches: Cached mini-batches, leaves ``(cached_batches_count, mb_size, ...)``; or
            None.
        cached_batches_count: Mini-batches that are loaded together.
        current_line: The next draw: of the chain (modulo ``2**32``), or of the cache.
        chain_id: Number of the chain in its data loader; says nothing about the draws.
        state: What else a draw depends on: the data's fingerprint, options, seed, and a count. For
            data loaders on the device their own state.
        valid: Mask of the cached mini-batches, or None.
        token: None; there for programs that name it.
    """

    callback_uuid: Any = None
    cached_batches: Any = None
    cached_batches_count: Any = None
    current_line: Any = None
    chain_id: Any = None
    state: Any = None
    valid: Any = None
    token: Any = None


class GetBatchFunction(Protocol):
    """Draws mini-batches; the second function of :func:`random_reference_data`."""

    def __call__(
        self, data_state: CacheState, information: bool = False, device_count: int = 1
    ) -> Any:
        """Draw a mini-batch.

        Args:
            data_state: Which draw.
            information: Whether to return the :class:`MiniBatchInformation` too.
            device_count: Devices on which this is called with equal states. Equal states draw
                equal mini-batches whatever it is.

        Returns:
            The state of the following draw, and the mini-batch: the pytree of an observation with
            leaves ``(mb_size, ...)``; or ``(mini-batch, information)`` in its place.
        """


@runtime_checkable
class MaskedMappedFunction(Protocol):
    """What is mapped over the data with ``masking=True``."""

    def __call__(self, batch: Any, mask: jax.Array, state: Any) -> tuple[Any, Any]:
        """Compute one result for a mini-batch.

        Args:
            batch: Leaves ``(mb_size, ...)``; with ``information=True`` a tuple with the
                :class:`MiniBatchInformation` as its second element.
            mask: ``(mb_size,)`` bool; False where an observation only fills up.
            state: What the call for the mini-batch before returned.

        Returns:
            The result, and the state for the next mini-batch.
        """


@runtime_checkable
class UnmaskedMappedFunction(Protocol):
    """What is mapped over the data with ``masking=False``."""

    def __call__(self, batch: Any, state: Any) -> tuple[Any, Any]:
        """Compute a result for each observation of a mini-batch.

        Args:
            batch: Leaves ``(mb_size, ...)``; with ``information=True`` a tuple with the
                :class:`MiniBatchInformation` as its second element.
            state: What the call for the mini-batch before returned.

        Returns:
            The results, leaves ``(mb_size, ...)``, and the state for the next mini-batch.
        """


class FullDataMapFunction(Protocol):
    """Maps functions over all data; the second function of :func:`full_reference_data`."""

    def __call__(
        self,
        fun: MaskedMappedFunction | UnmaskedMappedFunction,
        data_state: CacheState,
        carry: Any,
        masking: bool = False,
        information: bool = False,
        device_count: int = 1,
    ) -> tuple[CacheState, tuple[Any, Any]]:
        """Map a function over all observations, in order.

        Args:
            fun: Called for one mini-batch after the other.
            data_state: As the ``init`` function returned it.
            carry: What the first call gets as its state.
            masking: Whether ``fun`` gets the mask and returns one result per mini-batch. Otherwise
                it returns one per observation, and those that only fill up are dropped.
            information: Whether ``fun`` gets the :class:`MiniBatchInformation` too.
            device_count: Devices on which this is called with equal states.

        Returns:
            The data state, and the results with the last state of ``fun``. The results have a
            leading dimension for the observations, or with ``masking`` for the mini-batches.
        """


class FullDataMapperFunction(Protocol):
    """Maps functions over all data; the first function of :func:`full_data_mapper`."""

    def __call__(
        self,
        fun: Any,
        carry: Any,
        masking: bool = False,
        information: bool = False,
        batched: bool = True,
        device_count: int = 1,
    ) -> tuple[Any, Any]:
        """Map a function over all observations, in order.

        Args:
            fun: Called for one mini-batch after the other.
            carry: What the first call gets as its state.
            masking: Whether ``fun`` gets the mask and returns one result per mini-batch.
            information: Whether ``fun`` gets the :class:`MiniBatchInformation` too.
            batched: Whether ``fun`` takes mini-batches. Otherwise it takes one observation, and is
                vectorised; the state that it returns must not depend on the observation then.
            device_count: Devices on which this is called.

        Returns:
            The results and the last state of ``fun``.
        """
