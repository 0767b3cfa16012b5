"""Mini-batches for programs that run under ``jit``.

Programs that live inside one :func:`jax.jit`, such as Markov chains and scans over steps, cannot
call ``next(loader)``. The functions of this module give them mini-batches: at random
(:func:`random_reference_data`), or all data in order (:func:`full_reference_data`,
:func:`full_data_mapper`). The names and their meaning are those of ``jax_sgmc.data``.

A draw is a function of its :class:`CacheState`: the same state gives the same mini-batch, under
every transformation, and after it was saved and restored in another process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrax._arguments import check_int, check_timeout
from hydrax.data._engine import ErrorBox
from hydrax.data._host import check_sizes
from hydrax.data._host_draws import Handle, HostDraws
from hydrax.data._loaders import (
    DataLoader,
    DeviceDataLoader,
    HostDataLoader,
    MiniBatchInformation,
    tree_dtype_struct,
    tree_index,
)
from hydrax.data._types import (
    CacheState,
    FullDataMapFunction,
    FullDataMapperFunction,
    GetBatchFunction,
    MaskedMappedFunction,
    PyTree,
    UnmaskedMappedFunction,
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

# Bytes of a mini-batch where the size is left to us.
_DEFAULT_NBYTES = 256 * 1024


def last_error(source: Any) -> BaseException | None:
    """The error of the draw that failed last.

    A program that fails raises ``jax.errors.JaxRuntimeError`` with the text of the error. This is
    the error itself, such as the exception that a loader function raised, with its traceback in the
    loader process as a note.

    Args:
        source: A data loader of this package, or one of the functions that
            :func:`random_reference_data`, :func:`full_reference_data` and :func:`full_data_mapper`
            returned.

    Returns:
        The error, or None if no draw has failed.

    Raises:
        TypeError: Errors are not kept for such an object.
    """
    box = getattr(source, "_hydrax_errors", None) or getattr(source, "_errors", None)
    if not isinstance(box, ErrorBox):
        raise TypeError(
            f"source is {type(source).__name__}; expected a data loader of this package or a "
            "function that draws from one"
        )
    return box.error


def _observation_count(loader: DataLoader) -> int:
    return int(loader.static_information["observation_count"])


def _check_loader(data_loader: Any) -> None:
    if not isinstance(data_loader, (HostDataLoader, DeviceDataLoader)):
        raise TypeError(
            f"data_loader is {type(data_loader).__name__}; expected a HostDataLoader or a "
            "DeviceDataLoader"
        )


def _check_worker_count(worker_count: Any) -> None:
    if worker_count is not None:
        check_int("worker_count", worker_count, minimum=1, maximum=2**12)


def _check_state(data_state: Any, device_count: Any) -> None:
    if not isinstance(data_state, CacheState):
        raise TypeError(
            f"data_state is {type(data_state).__name__}; expected the CacheState that the init "
            "function or the last draw returned"
        )
    check_int("device_count", device_count, minimum=1)


def random_reference_data(
    data_loader: DataLoader,
    cached_batches_count: int,
    mb_size: int,
    verify_calls: bool = False,
    *,
    worker_count: int | None = None,
    timeout_sec: float = 60,
) -> tuple[Callable[..., CacheState], GetBatchFunction, Callable[[], None]]:
    """Draw random mini-batches in programs under ``jit``.

    Args:
        data_loader: Where the data come from. Those of this package load in processes of their
            own, which start now.
        cached_batches_count: Mini-batches that are loaded together. More of them are faster, and
            take more memory; the draws are the same.
        mb_size: Observations of a mini-batch.
        verify_calls: Has no effect: equal states draw equal mini-batches on every device.
        worker_count: Loader processes; None leaves it to the data loader.
        timeout_sec: Seconds that a draw may wait for data; 0 or less waits for ever.

    Returns:
        ``init(**kwargs)``, which begins a chain and takes what the data loader's
        ``register_random_pipeline`` takes; ``get_batch``, a :class:`GetBatchFunction`; and
        ``release()``, which ends the loader processes and gives back their memory. It waits for
        programs that were started before, if their results are still held.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A size is out of range; the message names both numbers.

    Example:
        >>> from hydrax.data.numpy_loader import NumpyDataLoader
        >>> loader = NumpyDataLoader(x=np.arange(10))
        >>> init, get_batch, release = random_reference_data(loader, 10, 2)
        >>> @jax.jit
        ... def five_draws(state):
        ...     def step(state, _):
        ...         state, batch = get_batch(state)
        ...         return state, batch["x"].sum()
        ...
        ...     return jax.lax.scan(step, state, length=5)
        >>> state, sums = five_draws(init(seed=0, shuffle=True))
        >>> int(sums.sum())
        45
        >>> release()
    """
    _check_loader(data_loader)
    cache_size, mb_size = check_sizes(
        _observation_count(data_loader), cached_batches_count, mb_size
    )
    timeout_s = check_timeout(timeout_sec)
    _check_worker_count(worker_count)
    handle = Handle()
    if isinstance(data_loader, DeviceDataLoader):
        return _random_on_device(data_loader, mb_size, handle)
    assert isinstance(data_loader, HostDataLoader)
    draws = HostDraws(data_loader, cache_size, mb_size, handle, worker_count, timeout_s)

    def init(**kwargs: Any) -> CacheState:
        return draws.begin(is_ordered=False, **kwargs)

    def get_batch(data_state: CacheState, information: bool = False, device_count: int = 1) -> Any:
        _check_state(data_state, device_count)
        following, (batch, info) = draws.draw(data_state)
        return following, ((batch, info) if information else batch)

    def release() -> None:
        handle.release()

    handle.mark(init, get_batch, release)
    return init, get_batch, release


def _random_on_device(
    loader: DeviceDataLoader, mb_size: int, handle: Handle
) -> tuple[Callable[..., CacheState], GetBatchFunction, Callable[[], None]]:
    def init(*args: Any, **kwargs: Any) -> CacheState:
        handle.check()
        return CacheState(state=loader.init_random_data(*args, **kwargs))

    def get_batch(data_state: CacheState, information: bool = False, device_count: int = 1) -> Any:
        _check_state(data_state, device_count)
        state, (batch, info) = loader.get_random_data(data_state.state, mb_size)
        return data_state._replace(state=state), ((batch, info) if information else batch)

    def release() -> None:
        handle.release()

    handle.mark(init, get_batch, release)
    return init, get_batch, release


def _default_mb_size(loader: DataLoader, observation_count: int) -> int:
    nbytes = sum(
        int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(loader.initializer_batch())
    )
    fitting: int = _DEFAULT_NBYTES // max(nbytes, 1)
    return max(1, min(observation_count, fitting))


def _check_full_sizes(
    data_loader: DataLoader, cached_batches_count: Any, mb_size: Any
) -> tuple[int, int, int]:
    """Observations of the data, mini-batches to load together, and observations of each."""
    _check_loader(data_loader)
    count = _observation_count(data_loader)
    if mb_size is None:
        mb_size = _default_mb_size(data_loader, count)
    cache_size, mb_size = check_sizes(count, cached_batches_count, mb_size)
    return count, min(cache_size, -(-count // mb_size)), mb_size


def _scan(
    draw: Callable[[Any], tuple[Any, tuple[PyTree, MiniBatchInformation]]],
    fun: Callable[..., Any],
    state: Any,
    carry: Any,
    observation_count: int,
    mb_size: int,
    *,
    masking: bool,
    information: bool,
) -> tuple[Any, tuple[Any, Any]]:
    """Map a function over the draws of one pass."""

    def step(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Any]:
        data_state, carry = state
        data_state, (batch, info) = draw(data_state)
        given = (batch, info) if information else batch
        arguments = (given, info.mask, carry) if masking else (given, carry)
        result, carry = fun(*arguments)
        return (data_state, carry), result

    length = -(-observation_count // mb_size)
    carry = jax.tree.map(jnp.asarray, carry)
    (state, carry), results = jax.lax.scan(step, (state, carry), length=length)
    if not masking:
        results = jax.tree.map(functools.partial(_join, observation_count, mb_size), results)
    return state, (results, carry)


def _join(observation_count: int, mb_size: int, leaf: jax.Array) -> jax.Array:
    """Results of all observations, from those of the mini-batches."""
    if leaf.ndim < 2 or leaf.shape[1] != mb_size:
        raise ValueError(
            f"fun returned a result of shape {leaf.shape[1:]} for a mini-batch; without masking "
            f"it must have one result for each of the {mb_size} observations (mb_size) in front; "
            "use masking=True for one result per mini-batch"
        )
    return leaf.reshape(-1, *leaf.shape[2:])[:observation_count]


def _device_draw(
    loader: DeviceDataLoader, observation_count: int, mb_size: int
) -> Callable[[Any], tuple[Any, tuple[PyTree, MiniBatchInformation]]]:
    """Draws in order from data on the device; the state is the number of the draw."""

    def draw(line: jax.Array) -> tuple[jax.Array, tuple[PyTree, MiniBatchInformation]]:
        rows = line * mb_size + jnp.arange(mb_size, dtype=jnp.int32)
        mask = rows < observation_count
        batch = tree_index(loader.get_full_data(), jnp.where(mask, rows, rows - observation_count))
        return line + 1, (batch, MiniBatchInformation(observation_count, mask, mb_size))

    return draw


def full_reference_data(
    data_loader: DataLoader,
    cached_batches_count: int = 100,
    mb_size: int | None = None,
    *,
    worker_count: int | None = None,
    timeout_sec: float = 60,
) -> tuple[Callable[..., CacheState], FullDataMapFunction, Callable[[], None]]:
    """Map functions over all data, in order, in programs under ``jit``.

    Args:
        data_loader: Where the data come from.
        cached_batches_count: Mini-batches that are loaded together, at most those of one pass.
        mb_size: Observations of a mini-batch. None takes as many as fit into 256 KiB, at least one
            and at most all.
        worker_count: Loader processes; None leaves it to the data loader.
        timeout_sec: Seconds that a draw may wait for data; 0 or less waits for ever.

    Returns:
        ``init()``, which returns the state to begin with; ``full_data_map``, a
        :class:`FullDataMapFunction`; and ``release()``.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A size is out of range; the message names both numbers.

    Example:
        >>> from hydrax.data.numpy_loader import NumpyDataLoader
        >>> loader = NumpyDataLoader(x=np.arange(10))
        >>> init, full_data_map, release = full_reference_data(loader, 2, 3)
        >>> def squares(batch, mask, count):
        ...     return jnp.sum(batch["x"] ** 2, where=mask), count + jnp.sum(mask)
        >>> state, (results, count) = full_data_map(squares, init(), 0, masking=True)
        >>> results.tolist(), int(results.sum()), int(count)
        ([5, 50, 149, 81], 285, 10)
        >>> release()
    """
    _, init, full_data_map, release = _full_map(
        data_loader, cached_batches_count, mb_size, worker_count, timeout_sec
    )
    return init, full_data_map, release


def _full_map(
    data_loader: DataLoader,
    cached_batches_count: int,
    mb_size: int | None,
    worker_count: int | None,
    timeout_sec: float,
) -> tuple[Handle, Callable[..., CacheState], FullDataMapFunction, Callable[[], None]]:
    """The functions of full_reference_data(), and what they share."""
    count, cache_size, mb_size = _check_full_sizes(data_loader, cached_batches_count, mb_size)
    timeout_s = check_timeout(timeout_sec)
    _check_worker_count(worker_count)
    handle = Handle()
    draws: HostDraws | None = None
    if isinstance(data_loader, HostDataLoader):
        draws = HostDraws(data_loader, cache_size, mb_size, handle, worker_count, timeout_s)

    def init(**kwargs: Any) -> CacheState:
        handle.check()
        if draws is None:
            return CacheState(current_line=jnp.asarray(0, jnp.int32))
        return draws.begin(is_ordered=True, **kwargs)

    def full_data_map(
        fun: Any,
        data_state: CacheState,
        carry: Any,
        masking: bool = False,
        information: bool = False,
        device_count: int = 1,
    ) -> tuple[CacheState, tuple[Any, Any]]:
        _check_state(data_state, device_count)
        modes = {"masking": masking, "information": information}
        if draws is None:
            assert isinstance(data_loader, DeviceDataLoader)
            draw = _device_draw(data_loader, count, mb_size)
            start = jnp.zeros_like(data_state.current_line)
            _, result = _scan(draw, fun, start, carry, count, mb_size, **modes)
            return data_state, result
        if handle.engine is None:
            # A loader of the user's goes forwards; its state says where it stands.
            return _scan(draws.draw, fun, data_state, carry, count, mb_size, **modes)
        _, result = _scan(draws.draw, fun, data_state, carry, count, mb_size, **modes)
        return data_state, result

    def release() -> None:
        handle.release()

    handle.mark(init, full_data_map, release)
    return handle, init, full_data_map, release


def full_data_mapper(
    data_loader: DataLoader | None = None,
    cached_batches_count: int = 1,
    mb_size: int | None = 1,
    *,
    worker_count: int | None = None,
    timeout_sec: float = 60,
) -> tuple[FullDataMapperFunction, Callable[[], None]]:
    """Map functions over all data, in order, without a state to carry.

    Args:
        data_loader: Where the data come from.
        cached_batches_count: Mini-batches that are loaded together, at most those of one pass.
        mb_size: Observations of a mini-batch. None takes as many as fit into 256 KiB.
        worker_count: Loader processes; None leaves it to the data loader.
        timeout_sec: Seconds that a draw may wait for data; 0 or less waits for ever.

    Returns:
        A :class:`FullDataMapperFunction`, and ``release()``.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A size is out of range; the message names both numbers.

    Example:
        >>> from hydrax.data.numpy_loader import NumpyDataLoader
        >>> mapper, release = full_data_mapper(NumpyDataLoader(x=np.arange(10)), 2, 3)
        >>> @jax.jit
        ... def sum_of_powers(power):
        ...     results, _ = mapper(lambda batch, state: (batch["x"] ** power, state), None)
        ...     return results.sum()
        >>> [int(sum_of_powers(power)) for power in range(3)]
        [10, 45, 285]
        >>> release()
    """
    if data_loader is None:
        raise TypeError("data_loader is None; expected a HostDataLoader or a DeviceDataLoader")
    handle, init, full_data_map, release = _full_map(
        data_loader, cached_batches_count, mb_size, worker_count, timeout_sec
    )
    start = init()

    def mapper(
        fun: Any,
        carry: Any,
        masking: bool = False,
        information: bool = False,
        batched: bool = True,
        device_count: int = 1,
    ) -> tuple[Any, Any]:
        if not batched:
            if masking:
                raise ValueError(
                    "masking=True needs a function that takes mini-batches (batched=True)"
                )
            fun = _vectorised(fun, information)
        handle.check()
        _, result = full_data_map(
            fun, start, carry, masking=masking, information=information, device_count=device_count
        )
        return result

    handle.mark(mapper)
    return mapper, release


def _vectorised(fun: Any, information: bool) -> Any:
    """A function of one observation as one of a mini-batch."""

    def vectorised(given: Any, state: Any) -> Any:
        batch, info = given if information else (given, None)

        def single(observation: Any, state: Any) -> Any:
            return fun((observation, info) if information else observation, state)

        return jax.vmap(single, in_axes=(0, None), out_axes=(0, None))(batch, state)

    return vectorised
