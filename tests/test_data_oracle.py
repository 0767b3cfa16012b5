"""Programs written for jax_sgmc.data give the same results with nothing but the import changed."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_sgmc.data.numpy_loader", reason="jax-sgmc is not installed")

# What it warns of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def module_of(package: str, name: str = "") -> Any:
    return importlib.import_module(f"{package}.data{name}")


def results_of(program: Callable[..., Any], **arguments: Any) -> tuple[Any, Any]:
    """What a program gives with each of the packages."""
    with jax.numpy_dtype_promotion("standard"):  # jax_sgmc mixes dtypes
        both = []
        for package in ("jax_sgmc", "hydrax"):
            data, loaders = module_of(package), module_of(package, ".numpy_loader")
            both.append(jax.tree.map(np.asarray, program(data, loaders, **arguments)))
    return both[0], both[1]


def assert_equal(original: Any, ours: Any) -> None:
    # Information is a named tuple of each package's own.
    left, right = jax.tree.leaves(original), jax.tree.leaves(ours)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def arrays() -> dict[str, Any]:
    return {
        "x": np.arange(10),
        "y": np.arange(20.0).reshape(10, 2),
        "z": np.arange(10) % 2 == 0,
    }


def zero_batches(data: Any, loaders: Any) -> Any:
    x, y = np.arange(10), np.zeros((10, 4, 3))
    batches = []
    for loader_class in (loaders.NumpyDataLoader, loaders.DeviceNumpyDataLoader):
        loader = loader_class(name_for_x=x, name_for_y=y)
        batches += [loader.initializer_batch(4), loader.initializer_batch()]
        assert loader.static_information["observation_count"] == 10
    return batches


def random_draws(
    data: Any,
    loaders: Any,
    *,
    cache: int,
    mb_size: int,
    information: bool,
    **options: Any,
) -> Any:
    loader = loaders.NumpyDataLoader(**arrays())
    init, get_batch, release = data.random_reference_data(loader, cache, mb_size)
    states = [init(**options), init(**options)]

    @jax.jit
    def draws(state: Any) -> Any:
        return jax.lax.scan(
            lambda state, _: get_batch(state, information=information), state, None, length=12
        )

    results = []
    for number in (0, 1, 0):
        states[number], drawn = draws(states[number])
        results.append(drawn)
    release()
    return results


def full_map(
    data: Any, loaders: Any, *, cache: int, mb_size: int, masking: bool, information: bool
) -> Any:
    loader = loaders.NumpyDataLoader(**arrays())
    init, full_data_map, release = data.full_reference_data(loader, cache, mb_size)

    def fun(batch: Any, *rest: Any) -> Any:
        *mask, total = rest
        if information:
            batch, info = batch
            total = total + jnp.sum(info.mask)
        squares = batch["x"] ** 2
        if masking:
            return jnp.sum(squares * mask[0]), total + 1
        return {"squares": squares, "y": batch["y"]}, total + 1

    @jax.jit
    def mapped(state: Any, carry: Any) -> Any:
        return full_data_map(fun, state, carry, masking=masking, information=information)

    state, first = mapped(init(), 0)
    _, second = mapped(state, first[1])
    release()
    return first, second


def mapper(data: Any, loaders: Any, *, masking: bool, batched: bool, information: bool) -> Any:
    loader = loaders.NumpyDataLoader(**arrays())
    full_data_mapper, release = data.full_data_mapper(loader, 2, 3)

    def fun(power: Any, batch: Any, *rest: Any) -> Any:
        *mask, count = rest
        if information:
            batch, _ = batch
        powers = batch["x"] ** power
        return (jnp.sum(powers * mask[0]) if masking else powers), count

    @jax.jit
    def sum_of_powers(power: Any) -> Any:
        # What a function of a single observation carries, the original maps, too.
        carry = 0 if batched else None
        results, carry = full_data_mapper(
            partial(fun, power), carry, masking=masking, information=information, batched=batched
        )
        return results.sum(), carry

    results = [sum_of_powers(power) for power in range(3)]
    release()
    return results


def chain_numbers(data: Any, loaders: Any) -> Any:
    """Numbers of chains, which are the seeds of those that get none."""
    loader = loaders.NumpyDataLoader(**arrays())
    init, get_batch, release = data.random_reference_data(loader, 2, 3)
    numbers = [init().chain_id, get_batch(init())[0].chain_id]
    release()
    init, full_data_map, release = data.full_reference_data(loader, 2, 3)
    state = init()
    full_data_map(lambda batch, count: (batch["x"], count), state, 0)
    numbers.append(state.chain_id)
    release()
    full_data_mapper, release = data.full_data_mapper(loader, 2, 3)
    for _ in range(2):
        full_data_mapper(lambda batch, count: (batch["x"], count), 0)
    release()
    return [*numbers, loader.register_random_pipeline(1, 2)]


def test_chains_have_the_same_numbers() -> None:
    assert_equal(*results_of(chain_numbers))


def test_batches_of_zeros_are_the_same() -> None:
    assert_equal(*results_of(zero_batches))


@pytest.mark.parametrize(
    ("cache", "information", "options"),
    [
        (1, False, {}),
        (3, True, {"seed": 5}),
        (5, True, {"seed": 5, "shuffle": True}),
        (2, True, {"shuffle": True, "in_epochs": True}),
    ],
)
def test_random_draws_under_jit_are_the_same(
    cache: int, information: bool, options: dict[str, Any]
) -> None:
    assert_equal(
        *results_of(random_draws, cache=cache, mb_size=3, information=information, **options)
    )


def test_draws_on_the_device_are_the_same() -> None:
    def program(data: Any, loaders: Any) -> Any:
        loader = loaders.DeviceNumpyDataLoader(x=np.arange(10))
        init, get_batch, _ = data.random_reference_data(loader, 1, 3)
        drawn = []
        for state in (init(), init(key=jax.random.PRNGKey(7))):
            for _ in range(3):
                state, batch = get_batch(state)
                drawn.append(batch)
        return drawn

    assert_equal(*results_of(program))


@pytest.mark.parametrize(
    ("mb_size", "masking", "information"),
    [(3, False, True), (3, True, True), (5, True, False)],
)
def test_full_maps_are_the_same(mb_size: int, masking: bool, information: bool) -> None:
    original, ours = results_of(
        full_map, cache=2, mb_size=mb_size, masking=masking, information=information
    )
    assert_equal(original, ours)
    if masking:
        assert ours[0][0].sum() == 285


@pytest.mark.parametrize(
    ("masking", "batched", "information"),
    # Of a single observation with information the original makes an error.
    [(True, True, True), (False, False, False)],
)
def test_mapped_powers_are_the_same(masking: bool, batched: bool, information: bool) -> None:
    original, ours = results_of(mapper, masking=masking, batched=batched, information=information)
    assert_equal(original, ours)
    assert [int(total) for total, _ in ours] == [10, 45, 285]


def test_batches_outside_of_jit_are_the_same() -> None:
    def program(data: Any, loaders: Any) -> Any:
        loader = loaders.NumpyDataLoader(**arrays())
        chains = [
            loader.register_ordered_pipeline(2, 4),
            loader.register_random_pipeline(3, 4),
            loader.register_random_pipeline(2, 3, shuffle=True, in_epochs=True, seed=1),
        ]
        return [loader.get_batches(chain) for chain in chains for _ in range(4)]

    assert_equal(*results_of(program))


@contextlib.contextmanager
def names_that_jax_removed() -> Iterator[None]:
    """What jax_sgmc's HDF5 modules need to be imported and run on a current JAX."""
    import jax.experimental

    name = "jax.experimental.host_callback"
    stub = types.ModuleType(name)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, stub)
        patch.setattr(jax.experimental, "host_callback", stub, raising=False)
        for function in ("tree_map", "tree_structure", "tree_leaves", "tree_unflatten"):
            patch.setitem(vars(jax), function, getattr(jax.tree_util, function))
        yield
    for module in set(sys.modules) - before:
        if module.startswith("jax_sgmc"):
            del sys.modules[module]


def test_what_the_collector_writes_is_read_as_it_was_saved(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    from hydrax.data.hdf5_loader import HDF5Loader

    point = __import__("collections").namedtuple("Point", "b a")
    sample = {
        "a-b": np.float32(1),
        "a": {"x": np.float32(2), "B": (np.float32(3), np.float32(4))},
        "list": [np.float32(10 + number) for number in range(12)],
        "tuple": tuple(np.full(2, 30 + number, np.float32) for number in range(11)),
        "point": point(np.float32(50), point(np.float32(51), np.float32(52))),
    }
    name = tmp_path / "collected.h5"
    with names_that_jax_removed(), h5py.File(name, "w") as file:
        collector = importlib.import_module("jax_sgmc.io").HDF5Collector(file)
        static = types.SimpleNamespace(samples_collected=7)
        chain = collector.register_chain(
            init_sample={"likelihood": np.float32(0), "variables": sample},
            init_checkpoint=jnp.zeros(1),
            static_information=static,
        )
        for number in range(7):
            values = {"likelihood": np.float32(0), "variables": sample}
            collector.save(chain, [leaf + 100 * number for leaf in jax.tree.leaves(values)])
    loader = HDF5Loader(name, sample=sample)
    batch, mask = loader.get_batches(loader.register_ordered_pipeline(1, 7))
    assert mask.all()
    assert jax.tree.structure(batch) == jax.tree.structure(sample)
    for got, leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(sample), strict=True):
        np.testing.assert_array_equal(got[0], np.stack([leaf + 100 * k for k in range(7)]))
