"""Batch arrays are the arena's memory, whatever their dtype; other dtypes are converted rightly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hydrax import (
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    LoaderError,
    ValueRangeError,
    _placement,
)

NARROW = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "float32", "bfloat16", "complex64"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]
PACKED = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
SHAPES = [(), (13,), (3,), (5,), (7, 3)]


def as_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


@pytest.fixture
def x64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def pattern(descriptor: int, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Any bits at all, also those of NaNs, as an array; a function of the arguments."""
    count = int(np.prod(shape)) * dtype.itemsize
    numbers = np.arange(count, dtype=np.int64) * 167 + descriptor * 7919 + len(name) * 31 + 5
    raw = (numbers ^ (numbers >> 3)).astype(np.uint8)
    if dtype.name == "bool":
        raw &= 1
    return raw.view(dtype).reshape(shape)


class Fill:
    """A loader function, per item or batched, that fills every array with its pattern."""

    def __init__(self, arrays: Mapping[str, tuple[Any, Any, Any]], *, batched: bool) -> None:
        self.arrays = arrays
        self.batched = batched

    def __call__(self, descriptor: Any, arrays: Mapping[str, np.ndarray], seed: Any) -> None:
        for name, (shape, dtype, _) in self.arrays.items():
            if self.batched:
                for place, number in enumerate(descriptor):
                    arrays[name][place, ...] = pattern(int(number), name, dtype, shape)
            else:
                arrays[name][...] = pattern(descriptor, name, dtype, shape)


def specs_of(names: list[str]) -> dict[str, tuple[Any, Any, Any]]:
    return {
        f"{name}{list(shape)}": (shape, as_dtype(name), as_dtype(name))
        for name in names
        for shape in SHAPES
    }


def assert_aliases(dataloader: Dataloader[Any], batch: Any) -> None:
    """Every array is at its place in one slot, on 64 bytes, and holds its bits."""
    assert dataloader._flow.loading is not None
    arena = dataloader._flow.loading.arena
    starts = set()
    for name, layout in batch.layouts.items():
        array = batch.arrays[name]
        assert array.dtype == layout.dtype, name
        assert array.shape == layout.shape, name
        assert not array.weak_type
        address = array.unsafe_buffer_pointer()
        assert address % 64 == 0, name
        starts.add(address - layout.offset - arena.address)
        expected = np.stack(
            [pattern(i, name, layout.dtype, layout.shape[1:]) for i in batch.indices]
        )
        assert np.asarray(array).tobytes() == expected.tobytes(), name
    assert batch.is_zero_copy
    (start,) = starts
    assert start % arena.slot_nbytes == 0
    assert 0 <= start // arena.slot_nbytes < len(arena.slot_states())


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("loader_count", "batch_size"), [(0, 3), (1, 1), (2, 3)])
def test_every_narrow_dtype_and_shape_lies_in_the_arena_with_x64_off(
    loader_count: int, batch_size: int, batched: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = specs_of(NARROW)
    group = DataGroup(batch_size, range(4 * batch_size), loader_arrays=specs)
    fill = Fill(specs, batched=batched)
    with Dataloader(
        fill, group, loader_count=loader_count, batched=batched, end_at=("epoch", 1)
    ) as dataloader:
        count = 0
        for batch in dataloader:
            assert_aliases(dataloader, batch)
            count += 1
            del batch
    assert count == 4
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.usefixtures("x64")
def test_every_dtype_lies_in_the_arena_with_x64_on(batched: bool) -> None:
    specs = specs_of(NARROW + WIDE)
    group = DataGroup(3, range(6), loader_arrays=specs)
    with Dataloader(
        Fill(specs, batched=batched), group, batched=batched, end_at=("epoch", 1)
    ) as dataloader:
        for batch in dataloader:
            assert_aliases(dataloader, batch)
            del batch


def test_jax_has_no_dtype_that_these_tests_leave_out() -> None:
    scalar_types = [value for value in vars(jnp).values() if isinstance(value, type(jnp.float32))]
    names = {np.dtype(value).name for value in scalar_types}
    assert names - {"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"} <= {*NARROW, *WIDE, *PACKED}
    assert len(names) >= 23


@pytest.mark.parametrize("loader_count", [0, 1])
def test_many_odd_sized_arrays_are_all_aligned_and_aliased(loader_count: int) -> None:
    specs = {
        f"a{i}": ((2 * i + 1,), as_dtype(name), as_dtype(name))
        for i, name in enumerate(["uint8", "float16", "bool", "float32"] * 25)
    }
    group = DataGroup(3, range(9), loader_arrays=specs)
    with Dataloader(
        Fill(specs, batched=False), group, loader_count=loader_count, end_at=("epoch", 1)
    ) as dataloader:
        for batch in dataloader:
            assert_aliases(dataloader, batch)
            del batch


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_arrays_without_elements_are_delivered(dtype: str) -> None:
    specs = {
        "none": ((0,), dtype, dtype),
        "some": ((2,), "uint8", "uint8"),
        "no": ((3, 0), "f4", "f4"),
    }

    def load(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        arrays["some"][:] = descriptor

    with Dataloader(load, DataGroup(2, range(4), loader_arrays=specs), end_at=("epoch", 1)) as dl:
        for batch in dl:
            assert batch.arrays["none"].shape == (2, 0)
            assert batch.arrays["no"].shape == (2, 3, 0)
            assert np.asarray(batch.arrays["some"]).tolist() == [[i, i] for i in batch.indices]
            del batch


@pytest.mark.parametrize("loader_count", [0, 2])
def test_packed_dtypes_arrive_right_by_copy(loader_count: int) -> None:
    specs = {name: ((5,), as_dtype(name), as_dtype(name)) for name in PACKED}

    def load(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        for array in arrays.values():
            array[...] = np.array([descriptor % 2, 1, 0, 1, descriptor // 2 % 2], np.float32)

    group = DataGroup(3, range(12), loader_arrays=specs)
    with Dataloader(load, group, loader_count=loader_count, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            expected = [[i % 2, 1, 0, 1, i // 2 % 2] for i in batch.indices]
            assert not batch.is_zero_copy
            for name in PACKED:
                assert batch.arrays[name].dtype == as_dtype(name)
                assert np.asarray(batch.arrays[name]).astype(np.int32).tolist() == expected, name
            del batch


@pytest.mark.parametrize("loader_count", [0, 1])
def test_packed_dtypes_give_the_slot_back_without_a_later_call_into_jax(loader_count: int) -> None:
    int4 = as_dtype("int4")

    def load(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        arrays["x"][...] = np.int8(descriptor % 8)

    group = DataGroup(2, range(20), loader_arrays={"x": ((3,), int4, int4)})
    with Dataloader(
        load, group, depth=1, loader_count=loader_count, end_at=("epoch", 1), timeout_sec=5
    ) as dataloader:
        count = 0
        for batch in dataloader:
            del batch
            count += 1
    assert count == 10


# --- conversion -----------------------------------------------------------------------------------


def load_values(
    values: np.ndarray, jax_dtype: Any, *, loader_count: int = 0, batched: bool = False
) -> np.ndarray:
    """One batch, in which item i is values[i] twice, as JAX gets it."""

    def load(descriptor: Any, arrays: Mapping[str, np.ndarray], seed: Any) -> None:
        chosen = values[descriptor]
        arrays["x"][...] = np.stack([chosen, chosen], axis=-1)
        arrays["before"][...] = 3

    specs = {
        "before": ((3,), "uint8", "uint8"),
        "x": ((2,), values.dtype, jax_dtype),
    }
    group = DataGroup(len(values), range(len(values)), loader_arrays=specs)
    with Dataloader(
        load, group, loader_count=loader_count, batched=batched, depth=1, end_at=("epoch", 1)
    ) as dataloader:
        (result,) = [
            (np.array(b.arrays["x"]), b.arrays["x"].unsafe_buffer_pointer()) for b in dataloader
        ]
        offset = result[1] - dataloader._flow.loading.arena.address  # type: ignore[union-attr]
    if np.dtype(jax_dtype).name not in PACKED:
        assert offset == 64, "what is converted in the loader process is aliased, too"
    assert (result[0][:, 0] == result[0][:, 1]).all()
    return result[0][:, 0]


CONVERSIONS: list[tuple[str, str, list[Any]]] = [
    ("int64", "int32", [-(2**31), 2**31 - 1, 7]),
    ("uint64", "uint32", [0, 2**32 - 1, 7]),
    ("float64", "float32", [0.1, -1e30, 2.5]),
    ("complex128", "complex64", [1 + 2j, -0.1j, 3]),
    ("uint8", "float32", [0, 255, 3]),
    ("uint8", "bfloat16", [0, 255, 3]),
    ("int32", "float16", [0, -2048, 3]),
    ("float32", "bfloat16", [0.1, -3e38, 1e-30]),
    ("float32", "float16", [0.1, -65504, 65519]),
    ("float32", "float8_e4m3fn", [0.1, -448, 2.5]),
    ("float32", "float8_e5m2", [0.1, -57344, 2.5]),
    ("float32", "float8_e8m0fnu", [1, 2, 0.25]),
    ("float32", "int8", [1.5, -128.0, 127.9]),
    ("float32", "uint8", [1.5, 0, 255]),
    ("float32", "int32", [1.5, -(2**31), 2**31 - 128]),
    ("float64", "int32", [1.5, -(2**31) - 0.5, 2**31 - 0.5]),
    ("float64", "uint32", [1.5, -0.5, 2**32 - 0.5]),
    ("bfloat16", "int32", [1.5, -300, 1e9]),
    ("bfloat16", "float32", [1.5, -300, 1e38]),
    ("float16", "int16", [1.5, -300, 32000]),
    ("int32", "int8", [-128, 127, 3]),
    ("int8", "uint8", [0, 127, 3]),
    ("uint16", "int32", [0, 65535, 3]),
    ("bool", "float32", [True, False, True]),
    ("bool", "int32", [True, False, True]),
    ("int32", "bool", [0, 256, -1]),
    ("float32", "bool", [0, 0.5, -1]),
    ("float32", "complex64", [0.5, -1e30, 2]),
    ("int32", "complex64", [5, -1, 2]),
    ("int32", "int4", [-8, 7, 0]),
    ("float32", "int4", [-8.0, 7.5, 0]),
    ("int4", "int32", [-8, 7, 0]),
    ("uint4", "float32", [0, 15, 3]),
    ("int4", "bfloat16", [-8, 7, 0]),
    ("float32", "float4_e2m1fn", [0.5, -6, 3]),
    ("float8_e4m3fn", "float32", [0.5, -448, 3]),
]


def wrongly_converted(
    conversions: Iterable[tuple[str, str, list[Any]]], **mode: Any
) -> list[tuple[str, str, list[Any], Any]]:
    """The conversions that do not give what Python's own numbers give."""
    wrong: list[tuple[str, str, list[Any], Any]] = []
    for source, target, values in conversions:
        loaded = np.array(values).astype(as_dtype(source))
        expected = loaded
        if "int" in target:
            expected = np.array([int(float(value)) for value in loaded])
        expected = expected.astype(as_dtype(target))
        try:
            got = load_values(loaded, as_dtype(target), **mode)
        except Exception as error:  # one that is refused is as wrong as one that is changed
            wrong.append((source, target, values, error))
        else:
            if got.dtype != expected.dtype or got.tobytes() != expected.tobytes():
                wrong.append((source, target, values, got))
    return wrong


@pytest.mark.parametrize("batched", [False, True])
def test_values_that_fit_are_converted_right(batched: bool) -> None:
    assert wrongly_converted(CONVERSIONS, batched=batched) == []


@pytest.mark.parametrize("batched", [False, True])
def test_values_that_fit_are_converted_right_in_loader_processes(batched: bool) -> None:
    conversions = [entry for entry in CONVERSIONS if entry[1] in ("int32", "bfloat16", "int4")]
    assert wrongly_converted(conversions, loader_count=2, batched=batched) == []


@pytest.mark.parametrize(
    ("source", "target", "values"),
    [
        ("float64", "uint64", [2.0**63, 1e19, 2.0**64 - 2048]),
        ("float64", "int64", [-(2.0**63), 2.0**63 - 1024, -0.5]),
        ("uint64", "int64", [2**63 - 1, 0, 5]),
        ("int64", "uint64", [2**63 - 1, 0, 5]),
        ("float32", "float64", [0.5, 1, 2]),
    ],
)
@pytest.mark.usefixtures("x64")
def test_values_at_the_ends_of_64_bits_are_converted_right(
    source: str, target: str, values: list[Any]
) -> None:
    loaded = np.array(values, source)
    expected = [int(value) if "int" in target else value for value in loaded.tolist()]
    assert load_values(loaded, target).tolist() == expected


MISFITS: list[tuple[str, str, float | complex]] = [
    ("int64", "int64", 2**31),
    ("int64", "int32", -(2**31) - 1),
    ("int64", "int64", 2**63 - 1),
    ("uint64", "uint64", 2**32),
    ("uint64", "uint64", 2**64 - 1),
    ("float64", "float64", 1e39),
    ("float64", "float64", -1e300),
    ("complex128", "complex128", 1e39j),
    ("float32", "float16", 65520.0),
    ("float32", "bfloat16", 3.4e38),
    ("float32", "float8_e4m3fn", 500.0),
    ("float32", "float8_e4m3", 300.0),
    ("float32", "float8_e5m2", -1e6),
    ("float32", "float8_e5m2fnuz", 1e6),
    ("float32", "float8_e8m0fnu", -1.0),
    ("bfloat16", "float16", 1e38),
    ("bfloat16", "float8_e4m3fn", 1000.0),
    ("float32", "float4_e2m1fn", 100.0),
    ("float32", "float4_e2m1fn", np.nan),
    ("float32", "float4_e2m1fn", np.inf),
    ("int32", "float8_e4m3fn", 1000),
    ("int64", "float16", 70000),
    ("float32", "int8", 128.0),
    ("float32", "int8", -129.0),
    ("float32", "uint8", -1.0),
    ("float32", "uint8", 256.0),
    ("float32", "int32", 2.0**31),
    ("float32", "int32", np.nan),
    ("float32", "int8", np.inf),
    ("float64", "uint32", 2.0**32),
    ("bfloat16", "int8", np.nan),
    ("int32", "int8", 128),
    ("int8", "uint8", -1),
    ("int32", "int4", 8),
    ("int4", "uint4", -1),
]


@pytest.mark.parametrize("batched", [False, True])
def test_a_value_that_does_not_fit_raises_instead_of_wrapping(batched: bool) -> None:
    wrong: list[Any] = []
    for source, target, value in MISFITS:
        loaded = np.ones(3, as_dtype(source))
        loaded[1] = value
        try:
            got = load_values(loaded, as_dtype(target), batched=batched)
        except LoaderError as error:
            is_told = isinstance(error.__cause__, ValueRangeError) and re.search(
                "'x'.*does not fit", str(error)
            )
            if not is_told or (error.index, error.descriptor) != (1, 1):
                wrong.append((source, target, value, error))
        except Exception as error:
            wrong.append((source, target, value, error))
        else:
            wrong.append((source, target, value, got))
    assert wrong == []


@pytest.mark.parametrize("batched", [False, True])
def test_a_value_that_does_not_fit_raises_out_of_a_loader_process_too(batched: bool) -> None:
    with pytest.raises(LoaderError, match=r"'x'.*2147483648 does not fit int32") as caught:
        load_values(np.array([1, 2, 2**31]), "int64", loader_count=2, batched=batched)
    assert isinstance(caught.value.__cause__, ValueRangeError)
    assert caught.value.index == 2


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float8_e5m2", "float64"])
def test_infinities_and_nan_stay_what_they_are_in_floats(target: str) -> None:
    got = load_values(np.array([np.inf, -np.inf, 1], np.float64), as_dtype(target))
    assert got.astype(np.float32).tolist() == [np.inf, -np.inf, 1]
    values = np.array([np.nan, 1.0])

    def load(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        arrays["x"][...] = values[descriptor]

    group = DataGroup(2, range(2), loader_arrays={"x": ((), "float64", as_dtype(target))})
    with Dataloader(load, group, loader_count=0, end_at=("epoch", 1)) as dataloader:
        (got,) = [np.array(batch.arrays["x"]).astype(np.float32) for batch in dataloader]
    assert np.isnan(got).tolist() == [True, False]


@pytest.mark.parametrize("batched", [False, True])
def test_converted_items_are_right_in_large_batches_with_runs_of_any_length(batched: bool) -> None:
    # Items of 4 KiB are converted some at a time; every one has to end up in its own place.
    def load(descriptor: Any, arrays: Mapping[str, np.ndarray], seed: Any) -> None:
        arrays["x"][...] = np.asarray(descriptor)[..., None] + np.arange(512) / 1024
        arrays["label"][...] = descriptor

    specs = {"label": ((), "int64", "int64"), "x": ((512,), "float64", "float32")}
    group = DataGroup(300, range(900), loader_arrays=specs, shuffle_first=True)
    with Dataloader(
        load, group, loader_count=2, batched=batched, depth=2, end_at=("epoch", 1)
    ) as dataloader:
        for batch in dataloader:
            indices = np.array(batch.indices)
            assert (np.asarray(batch.arrays["label"]) == indices).all()
            expected = (indices[:, None] + np.arange(512) / 1024).astype(np.float32)
            assert (np.asarray(batch.arrays["x"]) == expected).all()
            del batch


def test_x64_from_the_environment_gives_64_bit_arrays_in_the_arena() -> None:
    script = """
        import numpy as np
        from hydrax import DataGroup, Dataloader

        def load(i, arrays, seed):
            arrays["i"][...] = 2**40 + i
            arrays["f"][...] = 1 / 3

        specs = {"o": ((), "u1", "u1"), "i": ((), "int64", "int64"), "f": ((3,), "f8", "f8")}
        with Dataloader(load, DataGroup(3, range(3), loader_arrays=specs)) as dataloader:
            batch = next(dataloader)
            assert np.asarray(batch.arrays["i"]).tolist() == [2**40 + i for i in range(3)]
            assert (np.asarray(batch.arrays["f"]) == 1 / 3).all()
            for array in batch.arrays.values():
                arena = dataloader._flow.loading.arena
                offset = array.unsafe_buffer_pointer() - arena.address
                assert 0 <= offset < arena.slot_nbytes * 3 and offset % 64 == 0
    """
    run_script(script, JAX_ENABLE_X64="1")


def run_script(script: str, **environment: str) -> None:
    """Run a script in a fresh interpreter; it must say nothing and end well."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- placement ------------------------------------------------------------------------------------


def test_among_several_devices_arrays_alias_and_go_with_sharded_parameters() -> None:
    script = """
        import time
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from hydrax import DataGroup, Dataloader

        assert jax.device_count() == 2
        mesh = Mesh(np.array(jax.devices()), ("d",))
        weights = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P(None, "d")))
        step = jax.jit(lambda w, x: x @ w)

        def load(i, arrays, seed):
            arrays["odd"][...] = i
            arrays["x"][...] = i

        specs = {"odd": ((3,), "u1", "u1"), "x": ((4,), "f4", "f4")}
        group = DataGroup(2, range(40), loader_arrays=specs)
        with Dataloader(load, group, depth=1, end_at=("epoch", 1), timeout_sec=10) as dataloader:
            for batch in dataloader:
                x = batch.arrays["x"]
                offset = x.unsafe_buffer_pointer() - dataloader._flow.loading.arena.address
                assert offset == 64 and not x.committed
                result = step(weights, x)
                assert result.sharding.device_set == set(jax.devices())
                i = batch.indices
                assert (np.asarray(result) == 4 * np.array(i, np.float32)[:, None]).all()
                del batch, x
                # XLA's threads let go of their input soon, without a further call.
                deadline = time.monotonic() + 10
                while dataloader._flow.loading.arena.slot_states() == [4]:
                    assert time.monotonic() < deadline
    """
    run_script(script, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_a_step_is_compiled_once_for_new_parameters_and_for_its_own_results() -> None:
    def load(i: int, arrays: Mapping[str, Any], seed: Any) -> None:
        arrays["x"][...] = i

    @jax.jit
    def step(total: jax.Array, x: jax.Array) -> jax.Array:
        return total + x.sum()

    total = jnp.zeros(())
    group = DataGroup(2, range(8), loader_arrays={"x": ((4,), "f4", "f4")})
    with Dataloader(load, group, loader_count=0, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            assert not batch.arrays["x"].committed
            total = step(total, batch.arrays["x"])
            del batch
    assert total == 4 * 28
    assert step._cache_size() == 1  # type: ignore[attr-defined]


def test_arrays_go_to_the_default_device_that_is_set() -> None:
    script = """
        import jax, numpy as np
        from hydrax import DataGroup, Dataloader

        def load(i, arrays, seed):
            arrays["x"][...] = i

        jax.config.update("jax_default_device", jax.devices()[1])
        group = DataGroup(2, range(8), loader_arrays={"x": ((4,), "f4", "f4")})
        with Dataloader(load, group, depth=2, end_at=("epoch", 1), timeout_sec=10) as dataloader:
            for batch in dataloader:
                assert batch.arrays["x"].devices() == {jax.devices()[1]}
                assert np.asarray(batch.arrays["x"])[:, 0].tolist() == list(batch.indices)
                del batch
    """
    run_script(script, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def _refuse(*_: object) -> Callable[..., Any]:
    raise AttributeError("this JAX has no such function")


def test_the_public_importer_gives_the_same_arrays_in_the_same_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_placement, "_direct_importer", _refuse)
    specs = specs_of(NARROW)
    group = DataGroup(3, range(30), loader_arrays=specs)
    with Dataloader(
        Fill(specs, batched=False), group, depth=1, end_at=("epoch", 1), timeout_sec=10
    ) as dataloader:
        count = 0
        for batch in dataloader:
            assert_aliases(dataloader, batch)
            count += 1
            del batch
            assert dataloader._flow.loading is not None
            assert dataloader._flow.loading.arena.slot_states() != [4]
    assert count == 10


def test_the_direct_importer_works_with_this_jax() -> None:
    device = jax.local_devices()[0]
    chosen = _placement._choose_importer(device)
    assert chosen is not None
    assert chosen.__qualname__.startswith("_direct_importer")


def test_placement_func_gets_what_the_loader_filled_in_place() -> None:
    seen: dict[str, Any] = {}

    def place(arrays: Any, layouts: Any, additional: Any, group: Any) -> dict[str, jax.Array]:
        assert dict(additional) == {"twice": [2 * i for i in range(3)]}
        assert group.batch_size == 3
        seen["dtypes"] = {name: array.dtype for name, array in arrays.items()}
        seen["offsets"] = {
            name: array.__array_interface__["data"][0] for name, array in arrays.items()
        }
        assert dict(layouts) == dict(group.loader_layouts)
        with pytest.raises(TypeError):
            arrays["new"] = 1
        return {"x": jnp.asarray(arrays["x"].astype(np.float32)) + 1}

    def load(i: int, arrays: Mapping[str, np.ndarray], seed: int) -> dict[str, int]:
        arrays["odd"][...] = i
        arrays["x"][...] = i
        return {"twice": 2 * i}

    specs = {"odd": ((3,), "uint8", "float32"), "x": ((), "float64", "bfloat16")}
    group = DataGroup(3, range(3), loader_arrays=specs)
    with Dataloader(load, group, placement_func=place, end_at=("epoch", 1)) as dataloader:
        batch = next(dataloader)
        assert seen["dtypes"] == {"odd": np.uint8, "x": np.float64}
        assert dataloader._flow.loading is not None
        slot = (
            seen["offsets"]["odd"] - dataloader._flow.loading.arena.address
        ) // dataloader._flow.loading.arena.slot_nbytes
        assert 0 <= slot < 3
        assert seen["offsets"]["x"] - seen["offsets"]["odd"] == 64
        assert batch.arrays["x"].tolist() == [1, 2, 3]
        assert list(batch.arrays) == ["x"]
        del batch


@pytest.mark.parametrize(
    "transfer",
    [
        pytest.param(jnp.asarray, id="asarray"),
        pytest.param(jnp.array, id="array"),
        pytest.param(jax.device_put, id="device_put"),
        pytest.param(lambda x: jnp.asarray(x, x.dtype), id="asarray_dtype"),
    ],
)
def test_a_placement_func_that_uses_jax_does_not_stall_at_depth_1(
    transfer: Callable[[Any], jax.Array],
) -> None:
    def place(arrays: Any, layouts: Any, additional: Any, group: Any) -> dict[str, jax.Array]:
        return {name: transfer(array) for name, array in arrays.items()}

    def load(i: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        arrays["x"][...] = i

    group = DataGroup(2, range(40), loader_arrays={"x": ((16,), "f4", "f4")})
    count = 0
    with Dataloader(
        load, group, depth=1, placement_func=place, end_at=("epoch", 1), timeout_sec=5
    ) as dataloader:
        try:
            for batch in dataloader:
                count += 1
                del batch
        except BatchTimeoutError:
            pass
    assert count == 20
