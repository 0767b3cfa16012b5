"""Draws from data on the host, through the handler in C or a callback, and what they need.

Here a wrapper's engine or server is made and given back, and a program is traced that draws one
mini-batch. What is drawn when, and for which function of the user's, is up to hydrax.data.core.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrax import _core
from hydrax.data._callback import Cached, EngineServer, LoaderServer, Server, draw_cached
from hydrax.data._engine import DrawEngine, ErrorBox
from hydrax.data._host import SourceDataLoader
from hydrax.data._loaders import HostDataLoader, MiniBatchInformation, array_struct
from hydrax.data._pending import wait_for_results
from hydrax.data._types import CacheState, PyTree

__all__ = ["Handle", "HostDraws"]

jax.ffi.register_ffi_target("hydrax_draw", _core.draw_handler(), platform="cpu")


class Handle:
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
        self._pid = os.getpid()

    def release(self) -> None:
        """Give back memory and processes, once what runs has ended. May be called again."""
        try:
            # Not in a process that the user forked: it has none of JAX's threads.
            if not self.is_released and self.server is not None and os.getpid() == self._pid:
                wait_for_results()
        finally:
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
    handle: Callable[[], Handle | None], structs: PyTree, state: CacheState
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


class HostDraws:
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
        handle: Handle,
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
            chain_id = self.handle.server.register(register, is_ordered=is_ordered)
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
