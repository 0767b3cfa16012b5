"""Items of unequal length: zeros behind them, their lengths beside them, never stale data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrax import (
    Batch,
    DataGroup,
    Dataloader,
    LoaderError,
    Ragged,
    RaggedLengthError,
    ValueRangeError,
    length_mask,
)


def item_of(index, low=3, high=60):
    """Positions of the atoms of a structure, (atoms, 3) float32; another number for each."""
    rng = np.random.default_rng(index)
    return rng.normal(size=(rng.integers(low, high + 1), 3)).astype(np.float32)


def write(index, arrays, seed):
    arrays["atoms"].write(item_of(index))


def fill(index, arrays, seed):
    values = item_of(index)
    arrays["atoms"][: len(values)] = values
    arrays["atoms_length"][...] = len(values)


def write_many(indices, arrays, seeds):
    arrays["atoms"].write([item_of(index) for index in indices])


write_many.is_batched = True


def fill_many(indices, arrays, seeds):
    for place, index in enumerate(indices):
        values = item_of(index)
        arrays["atoms"][place, : len(values)] = values
        arrays["atoms_length"][place] = len(values)


fill_many.is_batched = True

LOADERS = [write, fill, write_many, fill_many]


def make(loader, spec=None, count=200, batch_size=10, **options):
    spec = spec or Ragged((64, 3), np.float32)
    group = DataGroup(batch_size, range(count), loader_arrays={"atoms": spec}, shuffle_first=True)
    return Dataloader(loader, group, **{"loader_count": 0, "end_at": ("epoch", 1)} | options)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("jax_dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("debug", [False, True])
def test_items_come_with_zeros_behind_them_and_their_length(loader, jax_dtype, debug):
    spec = Ragged((64, 3), np.float32, jax_dtype)
    # Depth 1: every batch is loaded over the one before.
    with make(loader, spec, depth=1, debug=debug, timeout_sec=10) as dataloader:
        for batch in map(Batch.copy, dataloader):
            assert batch.arrays["atoms"].shape == (10, 64, 3)
            assert batch.arrays["atoms"].dtype == jax_dtype
            assert batch.arrays["atoms_length"].dtype == np.int32
            for index, array, length in zip(
                batch.indices,
                np.asarray(batch.arrays["atoms"]),
                batch.arrays["atoms_length"].tolist(),
                strict=True,
            ):
                expected = item_of(index).astype(jax_dtype)
                assert length == len(expected)
                np.testing.assert_array_equal(array[:length], expected)
                assert not array[length:].astype(np.float32).any()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_worker_processes_load_ragged_items(start_method):
    with make(write, loader_count=2, start_method=start_method) as dataloader:
        totals = {}
        for batch in map(Batch.copy, dataloader):
            sums = np.asarray(batch.arrays["atoms"]).sum(axis=(1, 2))
            totals |= dict(zip(batch.indices, sums.tolist(), strict=True))
    assert totals == pytest.approx({i: float(item_of(i).sum()) for i in range(200)}, abs=1e-3)


def test_masked_sums_equal_those_of_numpy_with_one_compilation():
    traces = []

    @jax.jit
    def mean_position(atoms, lengths):
        traces.append(atoms.shape)
        mask = length_mask(lengths, atoms.shape[1])
        total = jnp.where(mask[..., None], atoms, 0).sum(axis=1)
        return total / lengths[:, None].astype(np.float32)

    with make(write, count=1000, batch_size=50) as dataloader:
        for batch in map(Batch.copy, dataloader):
            means = mean_position(batch.arrays["atoms"], batch.arrays["atoms_length"])
            for index, mean in zip(batch.indices, np.asarray(means), strict=True):
                np.testing.assert_allclose(mean, item_of(index).mean(axis=0), atol=1e-5)
    assert len(traces) == 1


def large(index):
    return np.ones((70, 3), np.float32) if index == 150 else item_of(index)


def write_large(index, arrays, seed):
    arrays["atoms"].write(large(index))


def write_many_large(indices, arrays, seeds):
    arrays["atoms"].write([large(index) for index in indices])


write_many_large.is_batched = True


@pytest.mark.parametrize("loader", [write_large, write_many_large])
@pytest.mark.parametrize("loader_count", [0, 1])
def test_an_item_that_is_too_long_is_an_error_that_names_it_and_both_sizes(loader, loader_count):
    with (
        pytest.raises(LoaderError) as caught,
        make(loader, loader_count=loader_count) as dataloader,
    ):
        list(map(type, dataloader))
    error = caught.value
    assert (error.index, error.descriptor) == (150, 150)
    assert isinstance(error.__cause__, RaggedLengthError)
    assert "'atoms': the item has length 70, there is room for 64" in str(error)


@pytest.mark.parametrize("loader", [write_large, write_many_large])
def test_an_item_that_is_too_long_is_cut_off_if_asked(loader):
    spec = Ragged((64, 3), np.float32, truncate=True)
    with make(loader, spec) as dataloader:
        for batch in map(Batch.copy, dataloader):
            if 150 in batch.indices:
                place = list(batch.indices).index(150)
                assert batch.arrays["atoms_length"][place] == 64
                assert (np.asarray(batch.arrays["atoms"])[place] == 1).all()


def problem(loader, spec=None):
    with make(loader, spec, debug=False) as dataloader, pytest.raises(LoaderError) as caught:
        next(dataloader)
    return caught.value.__cause__


def test_a_loader_that_sets_no_length_is_told_so():
    def load(index, arrays, seed):
        arrays["atoms"][:] = 1

    error = problem(load)
    assert isinstance(error, RaggedLengthError)
    assert "set no length" in str(error)


@pytest.mark.parametrize("length", [65, -2])
def test_a_length_without_room_is_refused(length):
    def load(index, arrays, seed):
        arrays["atoms_length"][...] = length

    error = problem(load)
    assert isinstance(error, RaggedLengthError)
    assert f"atoms_length is {length}; there is room for 64" in str(error)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 4), (1, 5, 3), ()])
def test_values_of_another_shape_are_refused_rather_than_broadcast(shape):
    def load(index, arrays, seed):
        arrays["atoms"].write(np.zeros(shape, np.float32))

    error = problem(load)
    assert isinstance(error, ValueError)
    assert f"values of shape {shape}; expected (length, 3)" in str(error)


def test_a_batched_loader_writes_as_many_items_as_it_was_given():
    def load(indices, arrays, seeds):
        arrays["atoms"].write([item_of(0)])

    load.is_batched = True
    assert "given 1 items to write; expected 10" in str(problem(load))


def test_a_value_that_the_dtype_cannot_hold_is_refused():
    def load(index, arrays, seed):
        arrays["atoms"].write([1, 40_000])

    error = problem(load, Ragged((4,), np.int16))
    assert isinstance(error, ValueRangeError)
    assert "40000 does not fit int16" in str(error)


@pytest.mark.parametrize("bad", [np.zeros((2, 4), np.int64), np.full((2, 3), 2**40)])
def test_the_item_of_a_batched_call_that_cannot_be_written_is_named(bad):
    def load(indices, arrays, seeds):
        arrays["atoms"].write([bad if i == 17 else np.zeros((2, 3), np.int16) for i in indices])

    load.is_batched = True
    group = DataGroup(10, range(30), loader_arrays={"atoms": Ragged((4, 3), np.int16)})
    with Dataloader(load, group, loader_count=0) as dataloader:
        next(dataloader)
        with pytest.raises(LoaderError) as caught:
            next(dataloader)
    assert caught.value.index == 17


def test_an_exception_of_a_batched_call_may_say_which_item_it_is_about():
    def load(indices, arrays, seeds):
        error = OSError("not there")
        error.item = {0: 3, 5: "x", 10: 99}[int(indices[0])]
        raise error

    load.is_batched = True
    group = DataGroup(5, range(15), loader_arrays={"x": ((), np.int32, np.int32)})
    found = []
    with Dataloader(
        load,
        group,
        loader_count=0,
        on_error=lambda error: found.append(error.index),
        end_at=("epoch", 1),
    ) as dataloader:
        assert list(dataloader) == []
    assert found == [3, 5, 10]  # what is no item of the call is not heeded


def test_lists_and_empty_items_are_written():
    def load(index, arrays, seed):
        arrays["atoms"].write([] if index % 2 else [[1, 2, 3]] * (index // 10))

    with make(load, count=40, batch_size=40) as dataloader:
        batch = next(dataloader)
        lengths = batch.arrays["atoms_length"].tolist()
        assert lengths == [0 if index % 2 else index // 10 for index in batch.indices]


def test_only_the_array_that_was_given_can_be_written():
    def load(index, arrays, seed):
        arrays["atoms"][:5].write(item_of(index))

    assert isinstance(problem(load), TypeError)


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({"x": Ragged((), np.int32)}, ValueError, "no length to vary"),
        ({"x": Ragged((3,), np.int32), "x_length": ((), "i4", "i4")}, ValueError, "'x_length'"),
        ({"x": Ragged(3, np.int32)}, TypeError, "shape"),
        ({"x": Ragged((3,), str)}, TypeError, "numpy_dtype"),
        ({"x": Ragged((-3,), np.int32)}, ValueError, "negative"),
        ({"x": "ragged"}, TypeError, "or a Ragged"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(arrays, error, words):
    with pytest.raises(error, match=words):
        DataGroup(1, range(3), loader_arrays=arrays)


@pytest.mark.parametrize("make_array", [np.asarray, jnp.asarray, list])
def test_masks_come_from_lengths(make_array):
    mask = length_mask(make_array([[1, 0], [3, 2]]), 3)
    assert mask.tolist() == [[[1, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 0]]]
    assert mask.dtype == bool


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_mask_may_be_longer_than_the_dtype_of_the_lengths_can_say(dtype, place):
    mask = length_mask(place(np.array([0, 100], dtype)), 300)
    assert type(mask) is type(place(np.zeros(1)))
    assert np.asarray(mask).sum(axis=1).tolist() == [0, 100]
