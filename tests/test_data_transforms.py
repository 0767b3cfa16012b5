"""Draws under every transformation: what is drawn depends on the CacheState alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrax import data
from hydrax.data._draws import Selection, random_chain
from hydrax.data.numpy_loader import NumpyDataLoader

COUNT = 50
MB_SIZE = 4


@pytest.fixture(scope="module")
def draws() -> Iterator[Any]:
    """Random draws over rows that hold their own numbers."""
    loader = NumpyDataLoader(x=np.arange(COUNT, dtype=np.float32))
    init, get_batch, release = data.random_reference_data(loader, 3, MB_SIZE)
    yield init, get_batch
    release()


def expected(seed: int, first: int, count: int, **options: bool) -> np.ndarray:
    chain = random_chain(seed=seed, **options)
    indices, _ = Selection(chain, COUNT, MB_SIZE).block(first, count)
    return indices.astype(np.float32)


def scan_draws(get_batch: Any, state: Any, length: int) -> tuple[Any, jax.Array]:
    def step(state: Any, _: None) -> Any:
        state, batch = get_batch(state)
        return state, batch["x"]

    return jax.lax.scan(step, state, length=length)


def test_draws_in_a_scan_are_those_of_the_seed(draws):
    init, get_batch = draws
    state, rows = jax.jit(lambda s: scan_draws(get_batch, s, 20))(init(seed=3))
    np.testing.assert_array_equal(rows, expected(3, 0, 20))
    _, rows = jax.jit(lambda s: scan_draws(get_batch, s, 20))(state)
    np.testing.assert_array_equal(rows, expected(3, 20, 20))


def test_without_jit_draws_are_the_same(draws):
    init, get_batch = draws
    state = init(seed=4)
    for draw in range(7):
        state, batch = get_batch(state)
        np.testing.assert_array_equal(batch["x"], expected(4, draw, 1)[0])


def test_a_state_draws_the_same_however_often_and_in_whatever_order(draws):
    init, get_batch = draws
    draw = jax.jit(get_batch)
    states = [init(seed=5)]
    first = []
    for _ in range(12):
        state, batch = draw(states[-1])
        states.append(state)
        first.append(np.asarray(batch["x"]))
    for number in (11, 0, 5, 5, 3, 8, 1):
        np.testing.assert_array_equal(draw(states[number])[1]["x"], first[number])


def test_a_state_far_ahead_is_found_at_once(draws):
    init, get_batch = draws
    state = init(seed=6)._replace(current_line=jnp.uint32(100_000))
    _, batch = jax.jit(get_batch)(state)
    np.testing.assert_array_equal(batch["x"], expected(6, 100_000, 1)[0])


def test_the_number_of_a_draw_goes_on_beyond_32_bits(draws):
    init, get_batch = draws
    state = init(seed=6)._replace(current_line=jnp.uint32(2**32 - 1))
    state = jax.jit(lambda s: s._replace(state=s.state.at[-1].add(0)))(state)
    following = jax.eval_shape(get_batch, state)[0]
    assert following.current_line.dtype == jnp.uint32
    # Only the state is looked at: reaching such a draw takes hours.
    line = state.current_line + jnp.uint32(1)
    assert int(line) == 0


def test_vmap_draws_each_chains_own_batches(draws):
    init, get_batch = draws
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[init(seed=s) for s in range(4)])
    _, rows = jax.jit(jax.vmap(lambda s: scan_draws(get_batch, s, 10)))(states)
    for seed in range(4):
        np.testing.assert_array_equal(rows[seed], expected(seed, 0, 10))


def test_vmap_of_many_more_chains_than_slots_draws_each_chains_own_batches(draws):
    init, get_batch = draws
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[init(seed=s) for s in range(50)])
    _, rows = jax.jit(jax.vmap(lambda s: scan_draws(get_batch, s, 4)))(states)
    for seed in range(50):
        np.testing.assert_array_equal(rows[seed], expected(seed, 0, 4))


def test_nested_vmap_draws_each_chains_own_batches(draws):
    init, get_batch = draws
    states = jax.tree.map(
        lambda *leaves: jnp.stack(leaves).reshape(2, 3, *leaves[0].shape),
        *[init(seed=s) for s in range(6)],
    )
    _, batch = jax.jit(jax.vmap(jax.vmap(get_batch)))(states)
    for seed in range(6):
        np.testing.assert_array_equal(batch["x"][seed // 3, seed % 3], expected(seed, 0, 1)[0])


def test_fori_loop_and_while_loop_draw_in_sequence(draws):
    init, get_batch = draws

    def body(number: Any, carry: Any) -> Any:
        state, rows = carry
        state, batch = get_batch(state)
        return state, rows.at[number].set(batch["x"])

    @jax.jit
    def fori(state: Any) -> jax.Array:
        return jax.lax.fori_loop(0, 8, body, (state, jnp.zeros((8, MB_SIZE))))[1]

    @jax.jit
    def loop(state: Any) -> jax.Array:
        def step(carry: Any) -> Any:
            number, rest = carry
            return number + 1, body(number, rest)

        start = (0, (state, jnp.zeros((8, MB_SIZE))))
        return jax.lax.while_loop(lambda carry: carry[0] < 8, step, start)[1][1]

    np.testing.assert_array_equal(fori(init(seed=7)), expected(7, 0, 8))
    np.testing.assert_array_equal(loop(init(seed=7)), expected(7, 0, 8))


def test_cond_draws_in_the_branch_that_is_taken_only():
    loader = NumpyDataLoader(x=np.arange(COUNT, dtype=np.float32))
    init, get_batch, release = data.random_reference_data(loader, 1, MB_SIZE)
    (engine,) = loader._engines

    @jax.jit
    def maybe(take: jax.Array, state: Any) -> Any:
        def skip(state: Any) -> Any:
            return state, {"x": jnp.zeros(MB_SIZE)}

        return jax.lax.cond(take, get_batch, skip, state)

    state = init(seed=1)
    far = state._replace(current_line=jnp.uint32(1000))
    before = engine.blocks_requested
    unchanged, batch = maybe(False, far)
    assert engine.blocks_requested == before
    assert int(unchanged.current_line) == 1000
    moved, batch = maybe(True, far)
    assert engine.blocks_requested > before
    assert int(moved.current_line) == 1001
    np.testing.assert_array_equal(batch["x"], expected(1, 1000, 1)[0])
    release()


def test_grad_goes_through_a_drawn_batch(draws):
    init, get_batch = draws

    def loss(weight: jax.Array, state: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            state, total = carry
            state, batch = get_batch(state)
            return (state, total + jnp.sum(weight * batch["x"])), None

        (state, total), _ = jax.lax.scan(step, (state, jnp.zeros(())), length=6)
        return total, state

    (_, state), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(2.0, init(seed=8))
    assert float(gradient) == expected(8, 0, 6).sum()
    assert int(state.current_line) == 6


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_a_rematerialised_draw_gives_the_same_batch(draws, policy):
    init, get_batch = draws

    @functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    def step(carry: Any, _: None) -> Any:
        state, weight, total = carry
        state, batch = get_batch(state)
        return (state, weight, total + jnp.sum(jnp.sin(weight * batch["x"]))), None

    def loss(weight: jax.Array, state: Any) -> jax.Array:
        return jax.lax.scan(step, (state, weight, 0.0), length=9)[0][2]

    rows = expected(9, 0, 9).astype(np.float64)
    gradient = jax.jit(jax.grad(loss))(0.5, init(seed=9))
    np.testing.assert_allclose(gradient, np.sum(rows * np.cos(0.5 * rows)), rtol=1e-4)


def test_jvp_and_vmap_of_grad_draw_the_same(draws):
    init, get_batch = draws

    def loss(weight: jax.Array, state: Any) -> jax.Array:
        return jnp.sum(weight * get_batch(state)[1]["x"])

    state = init(seed=2)
    total = expected(2, 0, 1).sum()
    _, tangent = jax.jvp(lambda w: loss(w, state), (1.0,), (1.0,))
    assert float(tangent) == total
    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None)))(jnp.arange(3.0), state)
    np.testing.assert_array_equal(gradients, [total] * 3)


def test_two_programs_in_two_threads_draw_their_own_chains(draws):
    init, get_batch = draws
    program = jax.jit(lambda s: scan_draws(get_batch, s, 200))
    states = [init(seed=s) for s in (20, 21)]
    program(states[0])
    results: list[Any] = [None, None]

    def run(number: int) -> None:
        results[number] = np.asarray(program(states[number])[1])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        np.testing.assert_array_equal(results[number], expected(20 + number, 0, 200))


def test_a_state_that_is_donated_can_be_drawn_from(draws):
    init, get_batch = draws
    draw = jax.jit(get_batch, donate_argnums=0)
    state = init(seed=11)
    for number in range(5):
        state, batch = draw(state)
        np.testing.assert_array_equal(batch["x"], expected(11, number, 1)[0])


@pytest.mark.parametrize("cache_size", [1, 2, 7, 50])
def test_the_cache_size_does_not_change_the_draws(cache_size):
    loader = NumpyDataLoader(x=np.arange(COUNT, dtype=np.float32))
    init, get_batch, release = data.random_reference_data(loader, cache_size, MB_SIZE)
    for options in ({}, {"shuffle": True}, {"shuffle": True, "in_epochs": True}):
        _, rows = jax.jit(lambda s: scan_draws(get_batch, s, 40))(init(seed=1, **options))
        np.testing.assert_array_equal(rows, expected(1, 0, 40, **options))
    release()
