"""TensorflowDataLoader: elements of real pipelines, drawn from under jit."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from hydrax.data import (
    full_data_mapper,
    full_reference_data,
    last_error,
    random_reference_data,
)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Imported for the first test here: it makes the process so large that forks of it are slow.
tf: Any = None
TensorflowDataLoader: Any = None


@pytest.fixture(scope="module", autouse=True)
def _tensorflow_is_up() -> None:
    """What TensorFlow opens at its first use, it opens before the first test is watched."""
    global tf, TensorflowDataLoader
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    from hydrax.data import tensorflow_loader

    TensorflowDataLoader = tensorflow_loader.TensorflowDataLoader
    for _ in tf.data.Dataset.range(4).map(lambda x: x, num_parallel_calls=2).prefetch(1):
        pass


def numbered(count: int) -> Any:
    return tf.data.Dataset.range(count).map(
        lambda x: {
            "x": tf.cast(x, tf.float32) * tf.ones(3),
            "n": tf.cast(x, tf.int32),
            "id": tf.strings.as_string(x),
        }
    )


def numbers_of(batch: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Numbers of the elements, after a look whether all leaves are of the same ones."""
    numbers = np.asarray(batch["n"])
    np.testing.assert_array_equal(batch["x"], np.repeat(numbers[..., None], 3, -1))
    assert set(batch) == {"x", "n"}
    return numbers


@pytest.fixture
def loader() -> TensorflowDataLoader:
    return TensorflowDataLoader(numbered(50), shuffle_cache=20, exclude_keys=["id"])


def scanned(get_batch: Any, length: int) -> Any:
    return jax.jit(
        lambda state: jax.lax.scan(lambda state, _: get_batch(state), state, length=length)
    )


def test_random_draws_under_jit_take_each_element_once_in_a_pass(
    loader: TensorflowDataLoader,
) -> None:
    init, get_batch, release = random_reference_data(loader, 4, 8)
    try:
        draws = scanned(get_batch, 25)
        _, batch = draws(init(seed=1))
        passes = numbers_of(batch).reshape(4, 50)
        for order in passes:
            assert sorted(order) == list(range(50))
        assert len({tuple(order) for order in passes}) == 4
        np.testing.assert_array_equal(numbers_of(draws(init(seed=1))[1]), numbers_of(batch))
        assert not np.array_equal(numbers_of(draws(init(seed=2))[1]), numbers_of(batch))
    finally:
        release()


def test_the_size_of_the_cache_changes_no_draw(loader: TensorflowDataLoader) -> None:
    drawn = []
    for cached_batches_count in (1, 3, 16):
        init, get_batch, release = random_reference_data(loader, cached_batches_count, 8)
        try:
            drawn.append(numbers_of(scanned(get_batch, 30)(init(seed=1))[1]))
        finally:
            release()
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


def test_a_state_gives_the_same_draw_again(loader: TensorflowDataLoader) -> None:
    init, get_batch, release = random_reference_data(loader, 2, 8)
    try:
        draw = jax.jit(get_batch)
        states, numbers = [init(seed=5)], []
        for _ in range(20):
            state, batch = draw(states[-1])
            states.append(state)
            numbers.append(numbers_of(batch))
        for k in (19, 3, 0, 12):
            np.testing.assert_array_equal(numbers_of(draw(states[k])[1]), numbers[k])
    finally:
        release()


def test_chains_under_vmap_draw_for_themselves(loader: TensorflowDataLoader) -> None:
    init, get_batch, release = random_reference_data(loader, 2, 8)
    try:
        starts = [init(seed=seed) for seed in (1, 2, 3)]
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
        draws = scanned(get_batch, 10)
        together = numbers_of(jax.vmap(draws)(states)[1])
        for chain, start in zip(together, starts, strict=True):
            np.testing.assert_array_equal(chain, numbers_of(draws(start)[1]))
    finally:
        release()


def test_all_elements_are_mapped_in_order(loader: TensorflowDataLoader) -> None:
    init, full_data_map, release = full_reference_data(loader, 3, 7)
    try:
        mapped = jax.jit(
            lambda state: full_data_map(
                lambda batch, mask, total: (batch, total + jnp.sum(mask)), state, 0, masking=True
            )
        )
        for _ in range(2):
            _, (batch, total) = mapped(init())
            assert total == 50
            np.testing.assert_array_equal(numbers_of(batch).ravel(), [*range(50), *range(6)])
    finally:
        release()


def test_pipelines_of_any_structure_are_mapped() -> None:
    pipeline = tf.data.Dataset.from_tensor_slices(
        (np.arange(10), {"deep": np.arange(20.0, dtype=np.float32).reshape(10, 2)})
    )
    mapper, release = full_data_mapper(TensorflowDataLoader(pipeline), 2, 3)
    try:
        mapped = jax.jit(
            lambda power: mapper(lambda b, s: ((b[0] ** power, b[1]["deep"]), s), None)[0]
        )
        for power, total in enumerate([10, 45, 285]):
            powers, deep = mapped(power)
            assert powers.sum() == total
            np.testing.assert_array_equal(deep, np.arange(20.0).reshape(10, 2))
    finally:
        release()


def test_elements_of_a_generator_of_unknown_length_are_counted_and_drawn() -> None:
    def generate() -> Iterator[np.ndarray[Any, Any]]:
        for number in range(23):
            yield np.full(2, number, np.int16)

    pipeline = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec((2,), tf.int16)
    )
    loader = TensorflowDataLoader(pipeline, shuffle_cache=5)
    assert loader.static_information == {"observation_count": 23}
    assert loader.initializer_batch(4).dtype == jnp.int16
    init, get_batch, release = random_reference_data(loader, 2, 23)
    try:
        _, batch = scanned(get_batch, 3)(init())
        for draw in np.asarray(batch)[..., 0]:
            assert sorted(draw) == list(range(23))
    finally:
        release()


def test_a_chain_goes_on_from_a_saved_state(loader: TensorflowDataLoader) -> None:
    chain = loader.register_random_pipeline(2, 8, seed=9)
    loader.get_batches(chain)
    state = loader.save_state(chain)
    expected = [numbers_of(loader.get_batches(chain)[0]) for _ in range(5)]
    other = TensorflowDataLoader(numbered(50), shuffle_cache=20, exclude_keys=["id"])
    chain = other.register_random_pipeline(2, 8)
    other.load_state(chain, state)
    np.testing.assert_array_equal(
        [numbers_of(other.get_batches(chain)[0]) for _ in range(5)], expected
    )


def test_mini_batch_size_is_the_size_of_chains_registered_without_one() -> None:
    loader = TensorflowDataLoader(tf.data.Dataset.range(10), 3)
    for register in (loader.register_ordered_pipeline, loader.register_random_pipeline):
        assert loader.get_batches(register(cache_size=2))[0].shape == (2, 3)
        assert loader.get_batches(register(cache_size=2, mb_size=5))[0].shape == (2, 5)
    with pytest.raises(ValueError, match="mb_size is None"):
        TensorflowDataLoader(tf.data.Dataset.range(10)).register_ordered_pipeline()


def test_an_element_that_fails_is_the_error_of_the_draw_and_the_next_one_is_good() -> None:
    failing = threading.Event()

    def generate() -> Iterator[int]:
        for number in range(12):
            if number == 7 and failing.is_set():
                raise LookupError("number 7 is not to be had")
            yield number

    pipeline = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec((), tf.int32)
    )
    init, full_data_map, release = full_reference_data(TensorflowDataLoader(pipeline), 1, 4)
    try:
        mapped = jax.jit(lambda state: full_data_map(lambda b, s: (b, s), state, 0)[1][0])
        failing.set()
        for _ in range(2):
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=r"LookupError: number 7 is not to be had"
            ):
                jax.block_until_ready(mapped(init()))
            assert isinstance(last_error(full_data_map), tf.errors.OpError)
        failing.clear()
        np.testing.assert_array_equal(mapped(init()), np.arange(12))
    finally:
        release()


def test_nothing_is_forked_and_the_thread_ends_with_the_release(
    loader: TensorflowDataLoader,
) -> None:
    def feeders() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hydrax-feeder"]

    assert not feeders()
    init, get_batch, release = random_reference_data(loader, 2, 8)
    jax.block_until_ready(scanned(get_batch, 3)(init()))
    assert not psutil.Process().children()
    assert len(feeders()) == 1
    release()
    assert not feeders()
    del init, get_batch, release
    init, get_batch, release = random_reference_data(loader, 2, 8)
    del init, get_batch, release  # forgotten
    gc.collect()
    assert not feeders()


def test_no_gpu_is_visible_to_tensorflow(loader: TensorflowDataLoader) -> None:
    assert tf.config.get_visible_devices("GPU") == []


def test_gpus_in_use_by_tensorflow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [f"{kind}:0"])
    with pytest.raises(RuntimeError, match="takes their memory from JAX"):
        TensorflowDataLoader(tf.data.Dataset.range(3))


@pytest.mark.slow
def test_memory_is_flat_over_fifty_passes_over_a_generator() -> None:
    """Each pass makes 2 MB of new arrays; none is read to its very end."""

    def generate() -> Iterator[np.ndarray[Any, Any]]:
        for number in range(64):
            yield np.full(8192, number, np.float32)

    pipeline = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec((8192,), tf.float32)
    )
    init, get_batch, release = random_reference_data(TensorflowDataLoader(pipeline), 2, 16)
    try:

        @jax.jit
        def one_pass(state: Any) -> Any:
            def step(state: Any, _: None) -> Any:
                state, batch = get_batch(state)
                return state, batch.sum()

            return jax.lax.scan(step, state, length=4)

        state, resident = init(seed=1), []
        for _ in range(50):
            state, sums = one_pass(state)
            assert sums.sum() == 8192 * 64 * 63 // 2
            resident.append(psutil.Process().memory_info().rss)
        assert max(resident[10:]) - resident[5] < 20e6
    finally:
        release()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorflowDataLoader([1, 2]), TypeError, "is list, expected a tf.data.Dataset"),
        (
            lambda: TensorflowDataLoader(tf.data.Dataset.range(3).repeat()),
            ValueError,
            r"endless.*repeat",
        ),
        (lambda: TensorflowDataLoader(tf.data.Dataset.range(0)), ValueError, "no elements"),
        (lambda: TensorflowDataLoader(numbered(3)), TypeError, r"string.*exclude_keys"),
        (
            lambda: TensorflowDataLoader(numbered(3), exclude_keys=["id", "no"]),
            ValueError,
            r"no \['no'\], only \['id', 'n', 'x'\]",
        ),
        (
            lambda: TensorflowDataLoader(numbered(3), exclude_keys=["id", "n", "x"]),
            ValueError,
            "leaves nothing",
        ),
        (
            lambda: TensorflowDataLoader(tf.data.Dataset.range(3), exclude_keys=["x"]),
            TypeError,
            "dictionaries",
        ),
        (
            lambda: TensorflowDataLoader(tf.data.Dataset.range(8).batch(3)),
            ValueError,
            r"shape is not known.*ensure_shape",
        ),
        (
            lambda: TensorflowDataLoader(tf.data.Dataset.range(3), shuffle_cache=0),
            ValueError,
            "shuffle_cache",
        ),
        (lambda: TensorflowDataLoader(tf.data.Dataset.range(3), 4), ValueError, "mini_batch_size"),
        (
            lambda: TensorflowDataLoader(tf.data.Dataset.range(9)).register_random_pipeline(
                1, 3, shuffle=True
            ),
            TypeError,
            "no option but seed",
        ),
        (
            lambda: random_reference_data(TensorflowDataLoader(tf.data.Dataset.range(9)), 1, 10),
            ValueError,
            r"10.*9",
        ),
    ],
)
def test_wrong_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
