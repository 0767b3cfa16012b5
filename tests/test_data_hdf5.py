"""HDF5Loader: files of any program and of jax_sgmc's collector, drawn from under jit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrax.data import full_data_mapper, full_reference_data, last_error, random_reference_data
from hydrax.data.hdf5_loader import HDF5Loader
from hydrax.data.numpy_loader import NumpyDataLoader

COLLECTED = Path(__file__).parent / "data" / "collector.h5"
Point = namedtuple("Point", "b a")
SAMPLE = {
    "w": np.zeros(3, np.float32),
    "sigma": np.float32(0),
    "layers": [np.zeros((2, 2), np.float32), np.int32(0)],
    "point": Point(np.float32(0), np.float32(0)),
    "long": [np.float32(0)] * 12,
}


def collected(k: Any) -> dict[str, Any]:
    """What was saved as sample k; with an array of numbers, several of them."""
    k = np.asarray(k)
    return {
        "w": np.repeat(k[..., None], 3, -1).astype(np.float32),
        "sigma": (2 * k).astype(np.float32),
        "layers": [
            np.broadcast_to(k[..., None, None], (*k.shape, 2, 2)).astype(np.float32),
            (-k).astype(np.int32),
        ],
        "point": Point((100 + k).astype(np.float32), (200 + k).astype(np.float32)),
        "long": [(1000 * j + k).astype(np.float32) for j in range(12)],
    }


def assert_equal(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.fixture
def measured(tmp_path: Path) -> str:
    """A file as other programs write them, of 1,000 rows that tell their number."""
    name = tmp_path / "measured.h5"
    with h5py.File(name, "w") as file:
        row = np.arange(1000)
        file["run/x"] = np.stack([row, -row], 1).astype(np.float32)
        file.create_dataset("run/y", data=row, chunks=(64,), compression="gzip")
        file["run/set/list_element_0"] = row * 2
        file["run/set/list_element_1"] = row % 2 == 0
    return str(name)


def rows_of(batch: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Numbers of the rows, after a look whether all data sets gave the same ones."""
    rows = np.asarray(batch["y"])
    np.testing.assert_array_equal(batch["x"], np.stack([rows, -rows], -1))
    np.testing.assert_array_equal(batch["set"]["list_element_0"], rows * 2)
    np.testing.assert_array_equal(batch["set"]["list_element_1"], rows % 2 == 0)
    return rows


def test_collected_samples_are_read_as_they_were_saved() -> None:
    loader = HDF5Loader(COLLECTED, sample=SAMPLE)
    assert loader.static_information == {"observation_count": 20}
    chain = loader.register_ordered_pipeline(cache_size=2, mb_size=3)
    for first in (0, 6, 12):
        batch, mask = loader.get_batches(chain)
        assert_equal(batch, collected(np.arange(first, first + 6).reshape(2, 3)))
        assert mask.all()
    batch, mask = loader.get_batches(chain)
    assert_equal(batch, collected([[18, 19, 0], [0, 1, 2]]))
    assert mask.tolist() == [[True, True, False], [True, True, True]]


def test_collected_samples_are_drawn_under_jit() -> None:
    loader = HDF5Loader(str(COLLECTED), sample=SAMPLE)
    init, get_batch, release = random_reference_data(loader, 2, 4)
    try:

        @jax.jit
        def draws(state: Any) -> Any:
            return jax.lax.scan(lambda state, _: get_batch(state), state, length=10)[1]

        batches = draws(init(seed=3, shuffle=True))
        assert_equal(batches, collected(np.asarray(batches["w"])[..., 0].astype(int)))
        assert sorted(np.asarray(batches["sigma"][:5]).ravel()) == [2 * k for k in range(20)]
    finally:
        release()


def test_mapped_function_sees_every_collected_sample_once() -> None:
    loader = HDF5Loader(COLLECTED, subdir="/chain~0/variables/long", sample=[0.0] * 12)
    mapper, release = full_data_mapper(loader, 2, 3)
    try:
        results, count = jax.jit(
            lambda: mapper(lambda batch, n: (batch[2] - batch[10], n + 1), jnp.int32(0))
        )()
        np.testing.assert_array_equal(results, np.full(20, -8000))
        assert count == 7
    finally:
        release()


def test_a_part_of_what_was_collected_is_addressed_by_subdir() -> None:
    loader = HDF5Loader(COLLECTED, subdir="/chain~0/likelihood")
    assert loader.initializer_batch(2).shape == (2,)
    point = HDF5Loader(COLLECTED, subdir="chain~0/variables/point", sample=Point(0, 0))
    chain = point.register_ordered_pipeline(1, 20)
    assert point.get_batches(chain)[0].b.tolist() == [[100 + k for k in range(20)]]
    with pytest.raises(ValueError, match=r"sample has 1 leaves, but 2 were collected.*/point/b"):
        HDF5Loader(COLLECTED, subdir="/chain~0/variables/point", sample=0)


def test_a_sample_names_the_data_sets_of_other_files(measured: str) -> None:
    reverse = namedtuple("Reverse", "y x set")
    loader = HDF5Loader(measured, subdir="/run", sample=reverse(0, 0, (0, 0)))
    chain = loader.register_ordered_pipeline(1, 4)
    batch, _ = loader.get_batches(chain)
    assert batch.y.tolist() == [[0, 1, 2, 3]]
    assert batch.x[0, 1].tolist() == [1, -1]
    assert batch.set[0].tolist() == [[0, 2, 4, 6]]
    assert batch.set[1].tolist() == [[True, False, True, False]]
    part = HDF5Loader(measured, subdir="/", sample={"run": {"y": 0}})
    assert jax.tree.structure(part.initializer_batch()) == jax.tree.structure({"run": {"y": 0}})
    with pytest.raises(KeyError, match=r"no data set /run/z, which sample asks for.*/run/x"):
        HDF5Loader(measured, subdir="/run", sample={"x": 0, "z": 0})


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "in_epochs": True}])
def test_the_same_rows_are_drawn_as_from_arrays(measured: str, options: dict[str, bool]) -> None:
    drawn = []
    for loader in (HDF5Loader(measured, "/run"), NumpyDataLoader(y=np.arange(1000))):
        with h5py.File(measured) as file:  # open here when the processes begin
            assert file["run/y"][3] == 3
            init, get_batch, release = random_reference_data(loader, 3, 33, worker_count=8)
        try:

            @jax.jit
            def draws(state: Any, get_batch: Any = get_batch) -> Any:
                def step(state: Any, _: None) -> Any:
                    state, (batch, info) = get_batch(state, information=True)
                    return state, (batch, info.mask)

                return jax.lax.scan(step, state, length=70)

            state, first = draws(init(seed=8, **options))
            drawn.append((first, draws(state)[1]))
        finally:
            release()
    for (from_file, file_mask), (from_array, array_mask) in zip(*drawn, strict=True):
        np.testing.assert_array_equal(rows_of(from_file), from_array["y"])
        np.testing.assert_array_equal(file_mask, array_mask)


def test_all_rows_are_mapped_in_order(measured: str) -> None:
    loader = HDF5Loader(measured, "/run")
    init, full_data_map, release = full_reference_data(loader, 4, 96)
    try:

        @jax.jit
        def rows(state: Any) -> Any:
            return full_data_map(lambda batch, carry: (batch, carry), state, 0)

        for _ in range(2):
            _, (batch, _) = rows(init())
            np.testing.assert_array_equal(rows_of(batch), np.arange(1000))
    finally:
        release()


def test_a_state_saved_in_another_process_is_continued(measured: str, tmp_path: Path) -> None:
    loader = HDF5Loader(measured, "/run")
    chain = loader.register_random_pipeline(2, 30, seed=4, shuffle=True)
    loader.get_batches(chain)
    script = f"""
        import json
        from hydrax.data.hdf5_loader import HDF5Loader
        loader = HDF5Loader({measured!r}, "/run")
        chain = loader.register_random_pipeline(4, 30)
        loader.load_state(chain, json.load(open({str(tmp_path / "state")!r})))
        print(loader.get_batches(chain)[0]["y"].tolist())
    """
    import json

    state = loader.save_state(chain)
    (tmp_path / "state").write_text(json.dumps(state))
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    expected = [
        *loader.get_batches(chain)[0]["y"].tolist(),
        *loader.get_batches(chain)[0]["y"].tolist(),
    ]
    assert json.loads(output) == expected


@pytest.fixture
def draw_twice(measured: str) -> Iterator[Any]:
    """A compiled function that draws the next two mini-batches, and its first state."""
    init, get_batch, release = random_reference_data(HDF5Loader(measured, "/run"), 1, 10)

    @jax.jit
    def draw(state: Any) -> Any:
        return jax.lax.scan(lambda state, _: get_batch(state), state, length=2)

    yield draw, init, get_batch
    release()


def test_a_deleted_file_is_the_same_error_at_each_call_and_the_process_goes_on(
    measured: str, draw_twice: Any
) -> None:
    draw, init, get_batch = draw_twice
    _, good = draw(init(seed=1))
    os.rename(measured, measured + ".kept")
    texts = []
    for _ in range(2):
        # JAX makes a ValueError of it where it had compiled the program before.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
            # What was loaded ahead is still there; from another chain nothing is.
            jax.block_until_ready(draw(init(seed=2)))
        texts.append(str(caught.value))
        error = last_error(get_batch)
        assert isinstance(error, FileNotFoundError)
        assert error.filename == measured
    for text in texts:
        assert "FileNotFoundError" in text
        assert "No such file or directory; rows " in text
        assert "measured.h5" in text
    os.rename(measured + ".kept", measured)
    assert_equal(draw(init(seed=1))[1], good)
    state = init(seed=3)
    for _ in range(5):
        state, batch = draw(state)
        rows_of(batch)


def test_a_damaged_file_is_an_error_with_its_type_and_the_rows(tmp_path: Path) -> None:
    name = tmp_path / "x.h5"
    with h5py.File(name, "w") as file:
        data_set = file.create_dataset("x", data=np.arange(100), chunks=(10,), compression="gzip")
        damaged = data_set.id.get_chunk_info_by_coord((20,))
    with open(name, "r+b") as raw:
        raw.seek(damaged.byte_offset)
        raw.write(b"\xff" * damaged.size)
    init, get_batch, release = random_reference_data(HDF5Loader(name, "/x"), 1, 100)
    try:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"OSError: rows 20 to 29 of /x in .*x\.h5"
        ):
            jax.block_until_ready(jax.jit(get_batch)(init(shuffle=True)))
        assert isinstance(last_error(get_batch), OSError)
    finally:
        release()


def test_two_threads_get_right_rows_from_one_loader(measured: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    loader = HDF5Loader(measured, "/run")
    init, get_batch, release = random_reference_data(loader, 2, 16)

    @jax.jit
    def draws(state: Any) -> Any:
        return jax.lax.scan(lambda state, _: get_batch(state), state, length=50)

    def work(seed: int) -> int:
        chain = loader.register_random_pipeline(2, 16, seed=seed)
        state = init(seed=seed)
        for _ in range(3):
            state, batch = draws(state)
            rows_of(batch)
            rows_of(loader.get_batches(chain)[0])
        return seed

    try:
        with h5py.File(measured) as shared, ThreadPoolExecutor(2) as pool:
            assert shared["run/y"][5] == 5
            assert list(pool.map(work, [1, 2])) == [1, 2]
    finally:
        release()


@pytest.mark.slow
def test_data_larger_than_memory_take_as_much_memory_as_the_cache(tmp_path: Path) -> None:
    """64 GB with holes, in an HDF5 file and as a mapped array of NumPy."""
    with h5py.File(tmp_path / "large.h5", "w") as file:
        data_set = file.create_dataset("x", (2**26, 256), "f4")
        data_set[-1] = np.arange(256)
    with open(tmp_path / "large", "wb") as raw:
        raw.truncate(2**36)
    script = f"""
        import jax, mmap, numpy, psutil
        from pathlib import Path
        from hydrax.data import random_reference_data
        from hydrax.data.hdf5_loader import HDF5Loader
        from hydrax.data.numpy_loader import NumpyDataLoader

        def own_nbytes():
            this = psutil.Process()
            total = 0
            for process in [this, *this.children(recursive=True)]:
                text = Path(f"/proc/{{process.pid}}/smaps_rollup").read_text()
                total += int(text.split("Anonymous:")[1].split()[0]) * 1024
            return total

        def growth(loader):
            init, get_batch, release = random_reference_data(loader, 10, 32)

            @jax.jit
            def draws(state):
                def step(state, _):
                    state, batch = get_batch(state)
                    return state, batch["x"].sum()
                return jax.lax.scan(step, state, length=60)

            state, sums = draws(init(seed=1))
            before = own_nbytes()
            state, sums = draws(state)
            assert not numpy.asarray(sums).any()
            print(own_nbytes() - before)
            release()

        folder = Path({str(tmp_path)!r})
        growth(HDF5Loader(folder / "large.h5", "/"))
        with open(folder / "large", "rb") as raw:
            mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        growth(NumpyDataLoader(copy=False, x=numpy.frombuffer(mapped, "f4").reshape(-1, 256)))
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    for nbytes in output.split():
        assert int(nbytes) < 20e6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("none.h5",), FileNotFoundError, r"none\.h5"),
        ((COLLECTED, "/chain~1"), KeyError, r"no '/chain~1'; at its top there are \['chain~0'\]"),
        ((COLLECTED, "/chain~0", []), ValueError, "no leaves"),
        ((COLLECTED, "/chain~0", 1), ValueError, "1 leaves, but 19 were"),
        ((3,), TypeError, "file is 3"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HDF5Loader(*arguments)


def test_an_open_file_is_refused(measured: str) -> None:
    with h5py.File(measured) as file, pytest.raises(TypeError, match="expected its path"):
        HDF5Loader(file, "/run")


def test_sizes_are_checked_against_the_rows(measured: str) -> None:
    loader = HDF5Loader(measured, "/run")
    for sizes in ((1, 1001), (1, 0), (0, 3)):
        with pytest.raises(ValueError, match=r"1001.*1000|is 0"):
            random_reference_data(loader, *sizes)
