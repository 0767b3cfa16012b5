"""The wrappers of hydrax.data: what they draw and map, for every kind of data loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hydrax
from hydrax import data
from hydrax.data import _host_draws
from hydrax.data._draws import Selection, random_chain
from hydrax.data.arena_loader import ArenaDataLoader
from hydrax.data.numpy_loader import DeviceNumpyDataLoader, NumpyDataLoader

COUNTS = [10, 1]


class UserLoader(data.HostDataLoader):
    """As a user of jax_sgmc would write one: forwards only, NumPy only."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.chains: list[dict[str, Any]] = []
        self.calls = 0

    @property
    def _format(self) -> Any:
        return {"x": jax.ShapeDtypeStruct(self.values.shape[1:], self.values.dtype)}

    @property
    def static_information(self) -> dict[str, Any]:
        return {"observation_count": len(self.values)}

    def _register(self, **chain: Any) -> int:
        self.chains.append(chain)
        return len(self.chains) - 1

    def register_random_pipeline(self, cache_size=1, mb_size=None, seed=0, **kwargs: Any) -> int:
        rng = np.random.default_rng(seed)
        return self._register(cache=cache_size, mb=mb_size, rng=rng)

    def register_ordered_pipeline(self, cache_size=1, mb_size=None, **kwargs: Any) -> int:
        return self._register(cache=cache_size, mb=mb_size, next=0)

    def get_batches(self, chain_id: int) -> Any:
        self.calls += 1
        chain = self.chains[chain_id]
        shape = chain["cache"], chain["mb"]
        if "rng" in chain:
            rows = chain["rng"].integers(len(self.values), size=shape)
            return {"x": self.values[rows]}, None
        batches = -(-len(self.values) // chain["mb"])
        rows, mask = np.empty(shape, int), np.empty(shape, bool)
        for line in range(chain["cache"]):
            positions = chain["next"] * chain["mb"] + np.arange(chain["mb"])
            rows[line] = positions % len(self.values)
            mask[line] = positions < len(self.values)
            chain["next"] = (chain["next"] + 1) % batches
        return {"x": self.values[rows]}, mask


class SavingUserLoader(UserLoader):
    def save_state(self, chain_id: int) -> Any:
        return self.chains[chain_id]["rng"].bit_generator.state

    def load_state(self, chain_id: int, data: Any) -> None:
        self.chains[chain_id]["rng"].bit_generator.state = data


def load_number(number: int, arrays: Any, seed: int | None) -> None:
    arrays["x"][...] = number


def arena_loader(values: np.ndarray) -> ArenaDataLoader:
    specs = {"x": (values.shape[1:], values.dtype, values.dtype)}

    def load(index: int, arrays: Any, seed: int | None) -> None:
        arrays["x"][...] = values[index]

    return ArenaDataLoader(load, hydrax.DataGroup(1, range(len(values)), loader_arrays=specs))


MAKERS = {
    "numpy": lambda values: NumpyDataLoader(x=values),
    "device": lambda values: DeviceNumpyDataLoader(x=values),
    "arena": arena_loader,
    "user": UserLoader,
}


@pytest.fixture(params=MAKERS)
def make_loader(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("mb_size", [1, 3, None])
def test_every_observation_is_mapped_once_and_in_order(make_loader, count, mb_size):
    if mb_size is not None and mb_size > count:
        pytest.skip("larger than the data set")
    values = np.arange(count, dtype=np.int32)
    mapper, release = data.full_data_mapper(make_loader(values), 2, mb_size)
    results, carry = jax.jit(lambda: mapper(lambda batch, n: (batch["x"] ** 2, n + 1), 0))()
    np.testing.assert_array_equal(results, values**2)
    assert int(carry) == -(-count // (mb_size or count))
    release()


def test_masked_maps_give_one_result_per_batch_and_carry_on(make_loader):
    init, full_data_map, release = data.full_reference_data(make_loader(np.arange(10)), 2, 3)
    seen = []

    def fun(batch: Any, mask: Any, carry: Any) -> Any:
        seen.append((batch["x"].shape, mask.shape, mask.dtype))
        return jnp.sum(batch["x"] ** 2, where=mask), carry + jnp.sum(mask)

    program = jax.jit(lambda state: full_data_map(fun, state, 0, masking=True))
    state = init()
    for _ in range(3):  # with the state that came back: again from the start
        state, (results, carry) = program(state)
        np.testing.assert_array_equal(results, [5, 50, 149, 81])
        assert int(carry) == 10
    assert seen[0] == ((3,), (3,), np.dtype(bool))
    release()


def test_maps_with_information_get_it_beside_the_batch(make_loader):
    init, full_data_map, release = data.full_reference_data(make_loader(np.arange(10)), 2, 3)

    def masked(given: Any, mask: Any, carry: Any) -> Any:
        batch, info = given
        assert (info.observation_count, info.batch_size) == (10, 3)
        return jnp.sum(batch["x"], where=info.mask), carry + jnp.sum(mask == info.mask)

    def unmasked(given: Any, carry: Any) -> Any:
        batch, info = given
        return batch["x"] / info.observation_count, carry

    _, (results, same) = full_data_map(masked, init(), 0, masking=True, information=True)
    assert results.tolist() == [3, 12, 21, 9]
    assert int(same) == 12
    _, (results, _) = full_data_map(unmasked, init(), None, information=True)
    np.testing.assert_allclose(results, np.arange(10) / 10)
    release()


def test_functions_of_one_observation_are_vectorised(make_loader):
    mapper, release = data.full_data_mapper(make_loader(np.arange(10)), 2, 3)

    def single(observation: Any, scale: Any) -> Any:
        assert observation["x"].shape == ()
        return {"square": scale * observation["x"] ** 2}, scale

    results, scale = jax.jit(lambda scale: mapper(single, scale, batched=False))(2)
    np.testing.assert_array_equal(results["square"], 2 * np.arange(10) ** 2)
    assert int(scale) == 2
    with_info, _ = mapper(
        lambda given, state: (given[0]["x"] + given[1].batch_size, state),
        None,
        batched=False,
        information=True,
    )
    np.testing.assert_array_equal(with_info, np.arange(10) + 3)
    with pytest.raises(ValueError, match="batched=True"):
        mapper(single, 2, batched=False, masking=True)
    release()


def test_a_result_that_is_not_one_per_observation_is_explained():
    mapper, release = data.full_data_mapper(NumpyDataLoader(x=np.arange(10)), 2, 3)
    with pytest.raises(ValueError, match="masking=True"):
        mapper(lambda batch, state: (batch["x"].sum(), state), None)
    release()


def test_a_map_without_results_carries_on(make_loader):
    mapper, release = data.full_data_mapper(make_loader(np.arange(10)), 2, 5)
    results, total = mapper(lambda batch, total: (None, total + batch["x"].sum()), 0)
    assert results is None
    assert int(total) == 45
    release()


def test_powers_are_mapped_under_vmap_and_grad():
    loader = NumpyDataLoader(x=np.arange(10))
    mapper, release = data.full_data_mapper(loader, 2, 3)

    def total(power: Any) -> jax.Array:
        return mapper(lambda batch, state: (batch["x"] ** power, state), None)[0].sum()

    assert jax.jit(jax.vmap(total))(jnp.arange(3)).tolist() == [10, 45, 285]
    assert jax.lax.map(total, jnp.arange(3)).tolist() == [10, 45, 285]

    def scaled(weight: Any) -> jax.Array:
        return mapper(lambda batch, s: (batch["x"].astype(jnp.float32) * weight, s), None)[0].sum()

    assert float(jax.grad(scaled)(2.0)) == 45
    release()


def test_in_epochs_each_observation_is_marked_once():
    loader = NumpyDataLoader(x=np.arange(10))
    init, get_batch, release = data.random_reference_data(loader, 2, 3)
    draw = jax.jit(lambda state: get_batch(state, information=True))
    state = init(seed=0, shuffle=True, in_epochs=True)
    for _ in range(3):
        rows: list[int] = []
        for number in range(4):
            state, (batch, info) = draw(state)
            rows.extend(np.asarray(batch["x"])[np.asarray(info.mask)])
            assert int(info.mask.sum()) == (1 if number == 3 else 3)
        assert sorted(rows) == list(range(10))
    release()


def test_sizes_are_checked_when_the_wrapper_is_made():
    loader = NumpyDataLoader(x=np.arange(10))
    for wrap in (
        data.random_reference_data,
        data.full_reference_data,
        data.full_data_mapper,
    ):
        with pytest.raises(ValueError, match=r"16.*10"):
            wrap(loader, 1, 16)
        with pytest.raises(ValueError, match=r"mb_size is 0.*at least 1"):
            wrap(loader, 1, 0)
        with pytest.raises(ValueError, match=r"cached_batches_count is 0"):
            wrap(loader, 0, 2)
        with pytest.raises(TypeError, match="data_loader"):
            wrap(None, 1, 2)
    with pytest.raises(ValueError, match=r"16.*10"):
        loader.register_random_pipeline(1, 16)
    with pytest.raises(ValueError, match=r"16.*10"):
        loader.register_ordered_pipeline(1, 16)


def test_a_cache_larger_than_the_data_set_draws_right():
    loader = NumpyDataLoader(x=np.arange(10))
    init, get_batch, release = data.random_reference_data(loader, 100, 3)
    state = init(seed=0, shuffle=True)
    rows = []
    for _ in range(10):
        state, batch = get_batch(state)
        rows.extend(batch["x"].tolist())
    assert sorted(rows) == sorted(list(range(10)) * 3)
    release()


def test_nested_observations_and_all_dtypes_are_drawn():
    rng = np.random.default_rng(0)
    arrays = {
        str(np.dtype(dtype)): rng.integers(0, 2, (20, 3)).astype(dtype)
        for dtype in (bool, np.int8, np.uint16, np.float16, np.float32, jnp.bfloat16, np.complex64)
    }
    arrays["empty"] = np.zeros((20, 0), np.float32)
    loader = NumpyDataLoader(row=np.arange(20), **arrays)
    init, get_batch, release = data.random_reference_data(loader, 3, 4)
    _, batch = jax.jit(get_batch)(init(seed=0))
    rows = np.asarray(batch["row"])
    for name, array in arrays.items():
        assert batch[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(batch[name]), array[rows])
    release()


def test_values_too_wide_for_jax_are_converted_or_refused():
    loader = NumpyDataLoader(x=np.array([1, 2, 3], np.int64), y=np.array([0.5, 1.5, 2.5]))
    init, get_batch, release = data.random_reference_data(loader, 1, 2)
    _, batch = get_batch(init(seed=0))
    assert batch["x"].dtype == jnp.int32
    assert batch["y"].dtype == jnp.float32
    np.testing.assert_array_equal(batch["y"], np.asarray(batch["x"]) - 0.5)
    release()
    wide = NumpyDataLoader(x=np.full(3, 2**40))
    init, get_batch, release = data.random_reference_data(wide, 1, 2)
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=r"array 'x'.* does not fit int32"
    ):
        jax.block_until_ready(get_batch(init()))
    release()


def test_arrays_of_jax_are_taken_once_and_drawn_from_on_the_host():
    values = jnp.arange(40 * 9.0).reshape(40, 3, 3)
    loader = NumpyDataLoader(copy=False, x=values)
    assert type(loader.reference_data["x"]) is np.ndarray
    init, get_batch, release = data.random_reference_data(loader, 10, 4)

    @jax.jit
    def total(state: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            state, total = carry
            state, batch = get_batch(state)
            return (state, total + batch["x"].sum()), None

        return jax.lax.scan(step, (state, 0.0), length=500)[0][1]

    assert np.isfinite(float(total(init(seed=0))))
    release()


def test_a_loader_of_the_users_runs_in_the_main_process_as_it_is():
    loader = UserLoader(np.arange(20, dtype=np.float32))
    init, get_batch, release = data.random_reference_data(loader, 3, 4)

    @jax.jit
    def run(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: (lambda r: (r[0], r[1]["x"]))(get_batch(s)), state,
                            length=8)  # fmt: skip

    state, rows = run(init(seed=5))
    rng = np.random.default_rng(5)
    expected = np.concatenate([rng.integers(20, size=(3, 4)) for _ in range(3)])[:8]
    np.testing.assert_array_equal(rows, expected)
    assert loader.calls == 3
    states = [init(seed=s) for s in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    _, rows = jax.jit(jax.vmap(run))(stacked)
    for number, seed in enumerate((1, 2)):
        rng = np.random.default_rng(seed)
        expected = np.concatenate([rng.integers(20, size=(3, 4)) for _ in range(3)])[:8]
        np.testing.assert_array_equal(rows[number], expected)
    release()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="released"):
        jax.block_until_ready(run(state)[1])


@pytest.mark.parametrize("cache_size", [1, 2, 3])
def test_all_data_of_a_loader_of_the_users_are_mapped_however_often(cache_size):
    loader = UserLoader(np.arange(10, dtype=np.int32))
    mapper, release = data.full_data_mapper(loader, cache_size, 3)
    program = jax.jit(lambda: mapper(lambda batch, n: (batch["x"] ** 2, n), 0)[0])
    for call in (program, program, program, program.__wrapped__, program):
        np.testing.assert_array_equal(call(), np.arange(10) ** 2)
    assert len(loader.chains) == 1
    release()


def test_a_loader_of_the_users_goes_back_where_it_saves_states():
    for kind, goes_back in ((SavingUserLoader, True), (UserLoader, False)):
        init, get_batch, release = data.random_reference_data(kind(np.arange(20.0)), 2, 4)
        draw = jax.jit(get_batch)
        first = state = init(seed=0)
        rows = []
        for _ in range(12):
            state, batch = draw(state)
            rows.append(np.asarray(batch["x"]))
        if goes_back:
            np.testing.assert_array_equal(draw(first)[1]["x"], rows[0])
            np.testing.assert_array_equal(draw(state)[1]["x"].shape, (4,))
        else:
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="goes forwards"):
                jax.block_until_ready(draw(first))
            assert isinstance(data.last_error(release), hydrax.StateError)
        release()


def test_what_a_loader_of_the_users_returns_is_checked():
    class Wrong(UserLoader):
        result: Any = None

        def get_batches(self, chain_id: int) -> Any:
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

    loader = Wrong(np.arange(20, dtype=np.int32))
    init, get_batch, release = data.random_reference_data(loader, 2, 4)
    draw = jax.jit(get_batch)
    for result, kind, text in (
        (({"x": np.zeros((2, 3), np.int32)}, None), ValueError, r"\(2, 3\).*\(2, 4\)"),
        (({"x": np.zeros((2, 4))}, None), TypeError, "float64"),
        (({"x": np.zeros((2, 4), np.int32), "y": np.zeros((2, 4))}, None), ValueError, "2 arrays"),
        (KeyError("gone"), KeyError, "gone"),
    ):
        loader.result = result
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=text):
            jax.block_until_ready(draw(init()))
        assert type(data.last_error(release)) is kind
    loader.result = {"x": np.zeros((2, 4), np.int32)}, None
    jax.block_until_ready(draw(init()))
    release()


def test_off_the_cpu_a_cache_in_the_state_is_filled_by_a_callback(monkeypatch):
    loader = NumpyDataLoader(x=np.arange(50))
    init, get_batch, release = data.random_reference_data(loader, 3, 4)

    def rows(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: (lambda r: (r[0], r[1]["x"]))(get_batch(s)), state,
                            length=10)[1]  # fmt: skip

    direct = jax.jit(rows)(init(seed=1))
    release()
    monkeypatch.setattr(_host_draws, "_is_supported_by_handler", lambda: False)
    init, get_batch, release = data.random_reference_data(loader, 3, 4)
    state = init(seed=1)
    assert state.cached_batches["x"].shape == (3, 4)
    np.testing.assert_array_equal(jax.jit(rows)(state), direct)
    mapper_init, full_data_map, mapper_release = data.full_reference_data(loader, 3, 4)
    _, (results, _) = full_data_map(lambda batch, s: (batch["x"], s), mapper_init(), None)
    np.testing.assert_array_equal(results, np.arange(50))
    release()
    mapper_release()


def test_states_of_a_loader_are_saved_and_loaded():
    loader = NumpyDataLoader(x=np.arange(10))
    for begin in (
        lambda: loader.register_random_pipeline(2, 3, seed=4, shuffle=True),
        lambda: loader.register_ordered_pipeline(2, 3),
    ):
        chain = begin()
        for _ in range(3):
            loader.get_batches(chain)
        saved = loader.save_state(chain)
        kept = json.dumps(saved)
        following = [loader.get_batches(chain) for _ in range(5)]
        other = NumpyDataLoader(x=np.arange(10))
        restored = (
            other.register_random_pipeline(2, 3)
            if "random" in saved
            else other.register_ordered_pipeline(2, 3)
        )
        other.load_state(restored, json.loads(kept))
        other.load_state(restored, saved)
        assert json.dumps(saved) == kept
        for batches, mask in following:
            again, again_mask = other.get_batches(restored)
            np.testing.assert_array_equal(batches["x"], again["x"])
            np.testing.assert_array_equal(mask, again_mask)
    with pytest.raises(hydrax.StateError, match="random"):
        loader.load_state(0, {"ordered": {"draws": 0, "mb_size": 3}})
    with pytest.raises(hydrax.StateError, match="observations"):
        loader.load_state(loader.register_ordered_pipeline(2, 4), saved)
    with pytest.raises(KeyError, match="no chain 99"):
        loader.get_batches(99)


def test_what_the_loaders_say_of_themselves():
    x, y = np.arange(10), np.zeros((10, 4, 3))
    for kind in (NumpyDataLoader, DeviceNumpyDataLoader):
        loader = kind(name_for_x=x, name_for_y=y)
        assert loader.static_information == {"observation_count": 10}
        batch = loader.initializer_batch(4)
        assert [(k, v.shape, v.dtype.name) for k, v in batch.items()] == [
            ("name_for_x", (4,), "int32"),
            ("name_for_y", (4, 4, 3), "float32"),
        ]
        assert loader.initializer_batch()["name_for_y"].shape == (4, 3)
        assert set(loader.reference_data) == {"name_for_x", "name_for_y"}
    struct, info = NumpyDataLoader(x=x).batch_format(2, mb_size=3)
    assert struct["x"].shape == (2, 3)
    assert (info.observation_count, info.batch_size, info.mask.tolist()) == (10, 3, [True] * 3)
    full = DeviceNumpyDataLoader(x=x).get_full_data()
    assert isinstance(full["x"], jax.Array)
    assert data.tree_index({"a": x}, 3)["a"] == 3
    assert data.tree_dtype_struct({"a": x})["a"].shape == (10,)


@pytest.mark.parametrize("kind", [NumpyDataLoader, DeviceNumpyDataLoader])
def test_data_that_cannot_be_observations_are_refused(kind):
    with pytest.raises(ValueError, match="no data"):
        kind()
    with pytest.raises(ValueError, match=r"a has 3.*b has 4"):
        kind(a=np.zeros(3), b=np.zeros(4))
    with pytest.raises(ValueError, match="scalar"):
        kind(a=1.0)
    with pytest.raises(ValueError, match="0 observations"):
        kind(a=np.zeros((0, 3)))
    with pytest.raises(TypeError, match="dtype"):
        kind(a={"b": np.zeros(3)})
    with pytest.raises(TypeError, match="dtype"):
        kind(a=np.array(["text"]))


def test_options_of_a_chain_are_taken_as_documented_and_others_refused():
    loader = NumpyDataLoader(x=np.arange(10))
    by_place = loader.register_random_pipeline(4, 3, True, True, seed=1)
    by_name = loader.register_random_pipeline(4, 3, shuffle=True, in_epochs=True, seed=1)
    rows, mask = loader.get_batches(by_place)
    assert mask.tolist()[-1] == [True, False, False]
    np.testing.assert_array_equal(rows["x"], loader.get_batches(by_name)[0]["x"])
    with pytest.raises(TypeError, match=r"no option seeed; .* seed, shuffle and in_epochs"):
        loader.register_random_pipeline(4, 3, seeed=1)


def test_reference_data_are_copied_unless_told_otherwise():
    values = np.arange(10)
    assert not np.shares_memory(NumpyDataLoader(x=values).reference_data["x"], values)
    assert np.shares_memory(NumpyDataLoader(copy=False, x=values).reference_data["x"], values)


def test_data_on_the_device_are_there_only_and_fit_its_dtypes():
    values = np.ones((2**18, 4), np.float32)  # so large that JAX would use its memory
    loader = DeviceNumpyDataLoader(x=values, y=np.arange(2.0**18))
    values[:] = -1
    full = loader.get_full_data()
    assert float(full["x"].min()) == 1
    assert full["y"].dtype == jnp.float32
    assert loader.reference_data["x"] is full["x"]
    kept = jnp.arange(10)
    assert DeviceNumpyDataLoader(copy=False, x=kept).get_full_data()["x"].tolist() == kept.tolist()
    with pytest.raises(hydrax.ValueRangeError, match=r"array 'x'.* does not fit int32"):
        DeviceNumpyDataLoader(x=np.full(3, 2**40))


def test_of_a_memory_map_random_draws_read_nothing_ahead(tmp_path: Path):
    path = tmp_path / "rows"
    np.arange(2**20, dtype=np.float32).tofile(path)
    loader = NumpyDataLoader(copy=False, x=np.memmap(path, np.float32).reshape(-1, 1024))
    init, get_batch, release = data.random_reference_data(loader, 10, 32, worker_count=1)
    (engine,) = loader._engines

    def is_read_at_random() -> bool:
        after = Path(f"/proc/{engine.pids[0]}/smaps").read_text().split(str(path))[1]
        flags = next(line for line in after.splitlines() if line.startswith("VmFlags:"))
        return "rr" in flags.split()

    assert not is_read_at_random()
    _, batch = get_batch(init(seed=0))
    rows, _ = Selection(random_chain(seed=0), 2**10, 32).indices(0)
    np.testing.assert_array_equal(batch["x"][:, 0], rows * 1024)
    assert is_read_at_random()
    release()


def test_the_arena_loader_draws_the_rows_of_the_numpy_loader_with_seeds_of_its_own():
    def load(number: int, arrays: Any, seed: int | None) -> None:
        arrays["x"][...] = number
        arrays["seed"][...] = -1 if seed is None else seed
        arrays["training"][...] = hydrax.loader_context().is_training
        arrays["noise"][...] = np.random.random()

    specs: dict[str, Any] = {
        "x": ((), np.int32, np.int32),
        "seed": ((), np.int32, np.int32),
        "training": ((), np.bool_, np.bool_),
        "noise": ((), np.float32, np.float32),
    }
    group = hydrax.DataGroup(1, range(20), loader_arrays=specs)
    numbers = NumpyDataLoader(x=np.arange(20, dtype=np.int32))
    init, get_batch, release = data.random_reference_data(numbers, 2, 3)
    drawn = []
    state = init(seed=1, shuffle=True)
    for _ in range(8):
        state, batch = get_batch(state)
        drawn.append(batch["x"].tolist())
    release()
    found: list[Any] = []
    for worker_count, cache_size in ((1, 1), (2, 5)):
        loader = ArenaDataLoader(load, group, worker_count=worker_count)
        init, get_batch, release = data.random_reference_data(loader, cache_size, 3)
        state = init(seed=1, shuffle=True)
        batches = []
        for _ in range(8):
            state, batch = get_batch(state)
            batches.append(jax.tree.map(lambda leaf: leaf.tolist(), batch))
        assert [batch["x"] for batch in batches] == drawn
        assert all(all(batch["training"]) for batch in batches)
        found.append(batches)
        release()
    assert found[0] == found[1]  # seeds and noise, too
    assert len({seed for batch in found[0] for seed in batch["seed"]}) == 24
    mapper, release = data.full_data_mapper(ArenaDataLoader(load, group), 2, 3)
    results, _ = mapper(lambda batch, s: (batch, s), None)
    assert results["x"].tolist() == list(range(20))
    assert set(results["seed"].tolist()) == {-1}
    assert not results["training"].any()
    release()


def test_a_batched_loader_function_draws_the_same_rows():
    def load(numbers: Any, arrays: Any, seeds: Any) -> None:
        arrays["x"][:] = numbers

    group = hydrax.DataGroup(1, range(100, 120), loader_arrays={"x": ((), "i4", "i4")})
    mapper, release = data.full_data_mapper(ArenaDataLoader(load, group, batched=True), 2, 3)
    results, _ = mapper(lambda batch, s: (batch["x"], s), None)
    assert results.tolist() == list(range(100, 120))
    release()
    with pytest.raises(TypeError, match="callable"):
        ArenaDataLoader(3, group)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="DataGroup"):
        ArenaDataLoader(load, range(3))  # type: ignore[arg-type]


DEVICES = """
    import time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from hydrax import data
    from hydrax.data.numpy_loader import NumpyDataLoader

    assert jax.device_count() == 4
    loader = NumpyDataLoader(x=np.arange(50.0))
    init, get_batch, release = data.random_reference_data(loader, 3, 4)

    def rows(state):
        def step(state, _):
            state, batch = get_batch(state, device_count=4)
            return state, batch["x"]
        return jax.lax.scan(step, state, length=10)[1]

    seeds = range(4)
    single = np.stack([jax.jit(rows)(init(seed=seed)) for seed in seeds])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[init(seed=seed) for seed in seeds])

    np.testing.assert_array_equal(jax.pmap(rows)(stacked), single)
    same = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), init(seed=0))
    np.testing.assert_array_equal(jax.pmap(rows)(same), np.stack([single[0]] * 4))

    mesh = Mesh(jax.devices(), ("chains",))
    def per_device(states):
        return jax.vmap(rows)(states)
    mapped = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P("chains"),
                                   out_specs=P("chains"), check_vma=False))
    np.testing.assert_array_equal(mapped(stacked), single)

    # Arguments that are sharded: one draw, which every device gets.
    weights = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("chains")))
    @jax.jit
    def sharded(state, weights):
        state, batch = get_batch(state)
        return weights[:, None] * batch["x"]
    np.testing.assert_array_equal(
        sharded(init(seed=0), weights), np.arange(8.0)[:, None] * single[0][0])

    # A callback that releases does not wait for the program that waits for it.
    def let_go(number):
        time.sleep(0.1)  # until the results are held
        release()
        return number
    @jax.jit
    def released(state, weights):
        def step(state, number):
            state, batch = get_batch(state)
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            return state, batch["x"].sum() + jax.pure_callback(let_go, shape, number)
        return jax.lax.scan(step, state, jnp.arange(8.0))[1], 2 * weights
    try:
        results = released(init(seed=0), weights)
        jax.block_until_ready(results)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert "has been released" in str(error)
        print("done")
"""


def run_script(text: str, *arguments: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:hydrax", "-c", textwrap.dedent(text),
         *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_draws_on_several_devices_are_those_of_the_states():
    flags = "--xla_force_host_platform_device_count=4"
    assert run_script(DEVICES, XLA_FLAGS=flags) == "done\n"


RESTORED = """
    import sys
    import jax, numpy as np
    import orbax.checkpoint as ocp
    from hydrax import data
    from hydrax.data.numpy_loader import NumpyDataLoader

    loader = NumpyDataLoader(x=np.arange(50))
    init, get_batch, release = data.random_reference_data(loader, 7, 4)
    template = init(seed=99)  # only the shapes matter
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(sys.argv[1], jax.tree.map(np.asarray, template))
    for _ in range(5):
        state, batch = jax.jit(get_batch)(state)
        print(*batch["x"].tolist())
    release()
"""


def test_a_state_restored_in_a_fresh_process_goes_on_exactly(tmp_path: Path):
    ocp = pytest.importorskip("orbax.checkpoint")
    loader = NumpyDataLoader(x=np.arange(50))
    init, get_batch, release = data.random_reference_data(loader, 3, 4)
    draw = jax.jit(get_batch)
    state = init(seed=7, shuffle=True, in_epochs=True)
    for _ in range(11):
        state, _ = draw(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    expected = ""
    for _ in range(5):
        state, batch = draw(state)
        expected += " ".join(map(str, batch["x"].tolist())) + "\n"
    release()
    assert run_script(RESTORED, str(tmp_path / "state")) == expected


def test_the_documented_names_are_there():
    names = """
        random_reference_data full_reference_data full_data_mapper GetBatchFunction
        FullDataMapFunction FullDataMapperFunction MaskedMappedFunction UnmaskedMappedFunction
        MiniBatchInformation CacheState DataLoader DeviceDataLoader HostDataLoader tree_index
        tree_dtype_struct last_error
    """
    for name in names.split():
        assert name in data.__all__
        assert getattr(data, name) is getattr(data.core, name)
    assert data.CacheState() == (None,) * 8
    assert data.MiniBatchInformation._fields == ("observation_count", "mask", "batch_size")


def test_chains_that_were_given_up_do_not_stop_loading_ahead():
    loader = NumpyDataLoader(x=np.arange(1000, dtype=np.float32))
    init, get_batch, release = data.random_reference_data(loader, 4, 8)
    for seed in range(100):
        init(seed=seed)
    (engine,) = loader._engines
    draw = jax.jit(lambda state: jax.lax.scan(lambda s, _: get_batch(s), state, length=400))
    state = init(seed=1000)
    before = engine.blocks_requested
    for _ in range(3):
        state, _ = jax.block_until_ready(draw(state))
    ahead = engine.blocks_requested - before - 3 * 400 // engine.block_draws
    release()
    assert ahead >= 3


def test_the_arena_loader_asks_for_many_items_at_a_time_where_the_data_offers_it():
    class Squares:
        def __len__(self):
            return 50

        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            return [index * index for index in indices]

    def load(squares, arrays, seeds):
        arrays["x"][:] = squares

    spec = {"x": ((), np.int32, np.int32)}
    group = hydrax.DataGroup(1, Squares(), loader_arrays=spec)
    loader = ArenaDataLoader(load, group, batched=True)
    init, get_batch, release = data.random_reference_data(loader, 4, 8)
    _, batch = jax.jit(get_batch)(init(seed=3))
    roots = np.sqrt(np.asarray(batch["x"]))
    release()
    np.testing.assert_array_equal(roots, np.round(roots))
