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
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from hydrax import _core
from hydrax._arguments import check_int, check_timeout
from hydrax.data._callback import Cached, EngineServer, LoaderServer, Server, draw_cached
from hydrax.data._draws import ORDERED
from hydrax.data._engine import DrawEngine, ErrorBox
from hydrax.data._host import SourceDataLoader, check_sizes
from hydrax.data._loaders import (
    DataLoader,
    DeviceDataLoader,
    HostDataLoader,
    MiniBatchInformation,
    array_struct,
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

PyTree = Any

# Bytes of a mini-batch where the size is left to us.
_DEFAULT_NBYTES = 256 * 1024

jax.ffi.register_ffi_target("hydrax_draw", _core.draw_handler(), platform="cpu")


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


class _Handle:
    """What the functions of a wrapper share: they keep it, and with it the engine, alive.

    Attributes:
        box: Keeps the last error.
        engine: Serves the draws, or None.
        server: Serves the callbacks, or None.
    """

    def __init__(self) -> None:
        self.box = ErrorBox()
        self.engine: DrawEngine | None = None
        self.server: Server | None = None
        self.is_released = False

    def release(self) -> None:
        """Give back memory and processes. May be called again."""
        self.is_released = True
        if self.engine is not None:
            self.engine.close()
        if isinstance(self.server, LoaderServer) and not self.server.is_released:
            self.server.release()

    def check(self) -> None:
        """Refuse to begin a chain once released."""
        if self.is_released:
            raise RuntimeError("the data loader has been released; make a new one")

    def mark(self, *functions: Any) -> None:
        """Let last_error() find the errors from these functions."""
        for function in functions:
            function._hydrax_errors = self.box


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


def _is_supported_by_handler() -> bool:
    """Whether programs run, by default, where the handler in C serves them."""
    return jax.default_backend() == "cpu"


def _draw_from_engine(
    engine: DrawEngine, structs: PyTree, state: CacheState
) -> tuple[CacheState, tuple[PyTree, jax.Array]]:
    """Draw a mini-batch through the handler in C."""
    leaves, treedef = jax.tree.flatten(structs)
    results = [array_struct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    results.append(array_struct((engine.mb_size,), np.dtype(np.bool_)))
    *batch, mask = jax.ffi.ffi_call("hydrax_draw", results, vmap_method="broadcast_all")(
        np.uint32(engine.id), state.current_line, state.state
    )
    line = state.current_line + np.uint32(1)
    following = state._replace(
        current_line=line, state=state.state.at[-1].add((line == 0).astype(np.uint32))
    )
    return following, (jax.tree.unflatten(treedef, batch), mask)


def _draw_from_server(
    handle: Callable[[], _Handle | None], structs: PyTree, state: CacheState
) -> tuple[CacheState, tuple[PyTree, jax.Array]]:
    """Draw a mini-batch through a callback."""

    def server() -> Server | None:
        found = handle()
        return None if found is None or found.is_released else found.server

    cached = Cached(state.cached_batches, state.valid, state.current_line, state.state)
    cached, result = draw_cached(server, structs, cached, state.chain_id)
    following = state._replace(
        cached_batches=cached.batches,
        valid=cached.valid,
        current_line=cached.line,
        state=cached.words,
    )
    return following, result


class _HostDraws:
    """Chains of a host data loader and their draws.

    Args:
        loader: The data loader.
        cache_size: Draws that are loaded together.
        mb_size: Observations of a draw.
        handle: Gets what has to be released.
        worker_count: Loader processes, or None.
        timeout_s: Seconds that a draw may wait, or None.
    """

    def __init__(
        self,
        loader: HostDataLoader,
        cache_size: int,
        mb_size: int,
        handle: _Handle,
        worker_count: int | None,
        timeout_s: float | None,
    ) -> None:
        self.observation_count = int(loader.static_information["observation_count"])
        self.mb_size = mb_size
        self.cache_size = cache_size
        self.handle = handle
        structs, _ = loader.batch_format(cache_size, mb_size=mb_size)
        self.structs = jax.tree.map(
            lambda leaf: array_struct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)),
            structs,
        )
        self._loader: SourceDataLoader | None = None
        if isinstance(loader, SourceDataLoader):
            self._loader = loader
            handle.engine = loader.make_engine(
                cache_size=cache_size,
                mb_size=mb_size,
                worker_count=worker_count,
                timeout_s=timeout_s,
                box=handle.box,
            )
            handle.server = EngineServer(handle.engine, cache_size)
        else:
            handle.server = LoaderServer(loader, jax.tree.leaves(self.structs), handle.box)
        self._is_direct = handle.engine is not None and _is_supported_by_handler()

    def begin(self, *, is_ordered: bool, **kwargs: Any) -> CacheState:
        """A new chain's state before its first draw."""
        self.handle.check()

        def register(loader: HostDataLoader) -> int:
            method = (
                loader.register_ordered_pipeline if is_ordered else loader.register_random_pipeline
            )
            return method(cache_size=self.cache_size, mb_size=self.mb_size, **kwargs)

        if isinstance(self.handle.server, LoaderServer):
            chain_id = self.handle.server.register(register)
            words = np.zeros(2, np.uint32)
            words[0] = zlib.crc32(repr((self.observation_count, self.structs)).encode())
            return self._first_state(chain_id, words)
        assert self._loader is not None
        assert self.handle.engine is not None
        chain_id = register(self._loader)
        chain = self._loader.registered_chain(chain_id)
        words = self.handle.engine.state_words(chain)
        self.handle.engine.prepare(chain, 0)
        _core.watch_interrupts()
        return self._first_state(chain_id, words)

    def _first_state(self, chain_id: int, words: np.ndarray[Any, Any]) -> CacheState:
        state = CacheState(
            cached_batches_count=jnp.asarray(self.cache_size, jnp.int32),
            chain_id=jnp.asarray(chain_id, jnp.int32),
            state=jnp.asarray(words),
        )
        if self._is_direct:
            return state._replace(current_line=jnp.asarray(0, jnp.uint32))
        return state._replace(
            cached_batches=jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.structs
            ),
            valid=jnp.zeros((self.cache_size, self.mb_size), jnp.bool_),
            current_line=jnp.asarray(self.cache_size, jnp.int32),  # nothing is cached yet
        )

    def ordered_state(self) -> CacheState:
        """The state before a pass over the data in order, of a loader of this package."""
        assert self.handle.engine is not None
        return self._first_state(0, self.handle.engine.state_words(ORDERED))

    def draw(self, state: CacheState) -> tuple[CacheState, tuple[PyTree, MiniBatchInformation]]:
        """Draw a mini-batch."""
        if state.cached_batches is None:
            if self.handle.engine is None:
                raise ValueError("the CacheState is of another data loader")
            _core.watch_interrupts()  # also after somebody else has taken the signal over
            following, (batch, mask) = _draw_from_engine(self.handle.engine, self.structs, state)
        else:
            following, (batch, mask) = _draw_from_server(
                weakref.ref(self.handle), self.structs, state
            )
        return following, (
            batch,
            MiniBatchInformation(self.observation_count, mask, self.mb_size),
        )


def _observation_count(loader: DataLoader) -> int:
    return int(loader.static_information["observation_count"])


def _check_loader(data_loader: Any) -> None:
    if not isinstance(data_loader, (HostDataLoader, DeviceDataLoader)):
        raise TypeError(
            f"data_loader is {type(data_loader).__name__}; expected a HostDataLoader or a "
            "DeviceDataLoader"
        )


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
        ``release()``, which ends the loader processes and gives back their memory.

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
    if worker_count is not None:
        worker_count = check_int("worker_count", worker_count, minimum=1, maximum=2**12)
    handle = _Handle()
    if isinstance(data_loader, DeviceDataLoader):
        return _random_on_device(data_loader, mb_size, handle)
    assert isinstance(data_loader, HostDataLoader)
    draws = _HostDraws(data_loader, cache_size, mb_size, handle, worker_count, timeout_s)

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
    loader: DeviceDataLoader, mb_size: int, handle: _Handle
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
    count, cache_size, mb_size = _check_full_sizes(data_loader, cached_batches_count, mb_size)
    timeout_s = check_timeout(timeout_sec)
    handle = _Handle()
    draws: _HostDraws | None = None
    if isinstance(data_loader, HostDataLoader):
        draws = _HostDraws(data_loader, cache_size, mb_size, handle, worker_count, timeout_s)

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
    return init, full_data_map, release


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
    init, full_data_map, release = full_reference_data(
        data_loader,
        cached_batches_count,
        mb_size,
        worker_count=worker_count,
        timeout_sec=timeout_sec,
    )

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
        _, result = full_data_map(
            fun, init(), carry, masking=masking, information=information, device_count=device_count
        )
        return result

    mapper._hydrax_errors = release._hydrax_errors  # type: ignore[attr-defined]
    return mapper, release


def _vectorised(fun: Any, information: bool) -> Any:
    """A function of one observation as one of a mini-batch."""

    def vectorised(given: Any, state: Any) -> Any:
        batch, info = given if information else (given, None)

        def single(observation: Any, state: Any) -> Any:
            return fun((observation, info) if information else observation, state)

        return jax.vmap(single, in_axes=(0, None), out_axes=(0, None))(batch, state)

    return vectorised
