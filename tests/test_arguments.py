"""What the constructors take and refuse, and what a program for Hydrax 0.2.2 relies on."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import psutil
import pytest
from isolated.run import run_script

import hydrax
from hydrax import (
    ArenaMemoryError,
    DataGroup,
    Dataloader,
    TrainingBatch,
    ValidationBatch,
    bucket_by_length,
    length_mask,
    loaders,
    pack_sequences,
    process_share,
)
from hydrax.data.hdf5_loader import HDF5Loader

SPECS = {"x": ((4,), np.float32, np.float32)}
HUGE = 2**62


def fill(number, arrays, seed):
    arrays["x"][:] = number


def fill_plus(offset, number, arrays, seed):
    arrays["x"][:] = number + offset


def start_up():
    pass


class Filler:
    """A callable object that may hold something that cannot be pickled."""

    def __init__(self, held=None):
        self.held = held

    def __call__(self, number, arrays, seed):
        arrays["x"][:] = number

    def load(self, number, arrays, seed):
        arrays["x"][:] = number


def numbers(count=20, batch_size=5, **options):
    return DataGroup(batch_size, range(count), loader_arrays=SPECS, **options)


def with_spec(*spec):
    return lambda: DataGroup(2, range(4), loader_arrays={"image": spec})


BAD_GROUPS = {
    "batch_size 0": (lambda: DataGroup(0, [1], loader_arrays=SPECS), ValueError, "batch_size"),
    "batch_size -3": (lambda: DataGroup(-3, [1], loader_arrays=SPECS), ValueError, "batch_size"),
    "batch_size 2.0": (lambda: DataGroup(2.0, [1], loader_arrays=SPECS), TypeError, "batch_size"),
    "batch_size '2'": (lambda: DataGroup("2", [1], loader_arrays=SPECS), TypeError, "batch_size"),
    "batch_size True": (lambda: DataGroup(True, [1], loader_arrays=SPECS), TypeError, "batch_size"),
    "batch_size 2**40": (
        lambda: DataGroup(2**40, range(2**41), loader_arrays=SPECS),
        (ValueError, MemoryError), "batch_size"),
    "batch_size None": (lambda: DataGroup(None, [1], loader_arrays=SPECS), TypeError, "batch_size"),
    "no items": (lambda: DataGroup(2, [], loader_arrays=SPECS), ValueError, "data is empty"),
    "no rows": (lambda: DataGroup(2, np.zeros((0, 3)), loader_arrays=SPECS), ValueError, "data"),
    "empty generator": (lambda: DataGroup(2, iter(()), loader_arrays=SPECS), ValueError, "data"),
    "data is a number": (lambda: DataGroup(2, 5, loader_arrays=SPECS), TypeError, "data is int"),
    "data is None": (lambda: DataGroup(2, None, loader_arrays=SPECS), TypeError, "data"),
    "data is a scalar array": (
        lambda: DataGroup(2, np.array(5), loader_arrays=SPECS), (TypeError, ValueError), "data"),
    "data is a frame": (
        lambda: DataGroup(2, pd.DataFrame({"a": [1]}), loader_arrays=SPECS), TypeError, "RowData"),
    "data beyond any length": (
        lambda: DataGroup(2, range(2**63), loader_arrays=SPECS),
        (ValueError, TypeError, OverflowError), "data"),
    "no arrays given": (lambda: DataGroup(2, [1]), (TypeError, ValueError), "loader_arrays"),
    "no arrays": (lambda: DataGroup(2, [1], loader_arrays={}), ValueError, "loader_arrays"),
    "arrays are a list": (
        lambda: DataGroup(2, [1], loader_arrays=[("x", (4,), "f4")]), TypeError, "loader_arrays"),
    "array name 3": (
        lambda: DataGroup(2, [1], loader_arrays={3: SPECS["x"]}), TypeError, "loader_arrays.*3"),
    "array name None": (
        lambda: DataGroup(2, [1], loader_arrays={None: SPECS["x"]}), TypeError, "loader_arrays"),
    "array name bytes": (
        lambda: DataGroup(2, [1], loader_arrays={b"x": SPECS["x"]}), TypeError, "loader_arrays"),
    "spec of two": (with_spec((4,), np.float32), TypeError, "image"),
    "spec of four": (with_spec((4,), np.float32, np.float32, 1), TypeError, "image"),
    "shape 4": (with_spec(4, np.float32, np.float32), TypeError, "shape.*image"),
    "shape None": (with_spec(None, np.float32, np.float32), TypeError, "shape.*image"),
    "shape '44'": (with_spec("44", np.float32, np.float32), TypeError, "shape.*image"),
    "shape (4.0,)": (with_spec((4.0,), np.float32, np.float32), TypeError, "shape.*image"),
    "shape ('4',)": (with_spec(("4",), np.float32, np.float32), TypeError, "shape.*image"),
    "shape (True,)": (with_spec((True,), np.float32, np.float32), TypeError, "shape.*image"),
    "shape (None, 3)": (with_spec((None, 3), np.float32, np.float32), TypeError, "shape.*image"),
    "shape (-1,)": (with_spec((-1,), np.float32, np.float32), ValueError, "shape.*image"),
    "shape (3, -2)": (with_spec((3, -2), np.float32, np.float32), ValueError, "shape.*image"),
    "object dtype": (with_spec((4,), object, np.float32), TypeError, "numpy_dtype.*image"),
    "str dtype": (with_spec((4,), str, np.float32), TypeError, "numpy_dtype.*image"),
    "U8 dtype": (with_spec((4,), "U8", np.float32), TypeError, "numpy_dtype.*image"),
    "bytes dtype": (with_spec((4,), "S8", np.float32), TypeError, "numpy_dtype.*image"),
    "void dtype": (with_spec((4,), "V8", np.float32), TypeError, "numpy_dtype.*image"),
    "struct dtype": (with_spec((), [("a", "f4")], np.float32), TypeError, "numpy_dtype.*image"),
    "date dtype": (with_spec((4,), "datetime64[s]", np.float32), TypeError, "numpy_dtype.*image"),
    "long double": (with_spec((4,), np.longdouble, np.float32), TypeError, "numpy_dtype.*image"),
    "swapped bytes": (with_spec((4,), ">f4", np.float32), TypeError, "numpy_dtype.*image"),
    "numpy_dtype None": (with_spec((4,), None, np.float32), TypeError, "numpy_dtype.*image"),
    "numpy_dtype 'real'": (with_spec((4,), "real", np.float32), TypeError, "numpy_dtype.*image"),
    "jax_dtype object": (with_spec((4,), np.float32, object), TypeError, "jax_dtype.*image"),
    "jax_dtype None": (with_spec((4,), np.float32, None), TypeError, "jax_dtype.*image"),
    "complex to real": (with_spec((4,), np.complex64, np.float32), ValueError, "image"),
    "shuffle mode 'random'": (lambda: numbers(shuffle_later="random"), ValueError, "shuffle_later"),
    "shuffle mode None": (lambda: numbers(shuffle_later=None), ValueError, "shuffle_later"),
    "shuffle mode []": (
        lambda: numbers(shuffle_later=[]), (TypeError, ValueError), "shuffle_later"),
    "seed 1.5": (lambda: numbers(seed=1.5), TypeError, "seed"),
    "seed None": (lambda: numbers(seed=None), TypeError, "seed"),
    "seed 2**300": (lambda: numbers(seed=2**300), ValueError, "seed"),
    "shape of a set": (with_spec({3, 4}, np.float32, np.float32), TypeError, "shape.*image"),
    "shape of a dict": (with_spec({3: 4}, np.float32, np.float32), TypeError, "shape.*image"),
    "shape b'44'": (with_spec(b"44", np.float32, np.float32), TypeError, "shape.*image"),
    "64 dimensions": (
        with_spec((1,) * 64, np.float32, np.float32), ValueError, "shape.*image.*63"),
    "shuffle mode of arrays": (
        lambda: numbers(shuffle_later=np.array([0, 1])), ValueError, "shuffle_later"),
    "remainder of arrays": (lambda: numbers(remainder=np.array([0, 1])), ValueError, "remainder"),
    "shuffle_first 'False'": (lambda: numbers(shuffle_first="False"), TypeError, "shuffle_first"),
    "shuffle_first 'itemwise'": (
        lambda: numbers(shuffle_first="itemwise"), TypeError, "shuffle_first.*True or False"),
    "shuffle_first 2": (lambda: numbers(shuffle_first=2), TypeError, "shuffle_first"),
    "cache_readonly 'no'": (lambda: numbers(cache_readonly="no"), TypeError, "cache_readonly"),
    "cache_location 5": (lambda: numbers(cache_location=5), TypeError, "cache_location is 5"),
    "cache_location b'x'": (lambda: numbers(cache_location=b"x"), TypeError, "cache_location"),
}  # fmt: skip


def wrong_answers(cases, construct):
    """Case to what came instead of the wanted error, for the cases that got another answer."""
    wrong = {}
    for case, (given, wanted, names) in cases.items():
        try:
            construct(given)
            wrong[case] = "it was taken"
        except Exception as error:
            if not isinstance(error, wanted) or not re.search(names, str(error)):
                wrong[case] = repr(error)
    return wrong


def test_a_datagroup_refuses_bad_input_and_names_the_argument():
    assert wrong_answers(BAD_GROUPS, lambda make: make()) == {}


BAD_LOADERS = {
    "loader None": ({"loader_func": None}, TypeError, "loader_func"),
    "loader a string": ({"loader_func": "fill"}, TypeError, "loader_func"),
    "training None": ({"training": None}, TypeError, "training"),
    "training of numbers": ({"training": [1, 2]}, TypeError, "training"),
    "training empty": ({"training": []}, ValueError, "training"),
    "training a range": ({"training": range(3)}, TypeError, "training"),
    "validation a group": ({"validation": numbers()}, TypeError, "validation"),
    "validation of two": ({"validation": ("epoch", 1)}, TypeError, "validation"),
    "validation mode": ({"validation": ("step", 1, numbers())}, ValueError, "validation mode"),
    "validation mode []": ({"validation": ([], 1, numbers())}, ValueError, "validation mode"),
    "interval 0": ({"validation": ("epoch", 0, numbers())}, ValueError, "validation interval"),
    "interval -1": ({"validation": ("batch", -1, numbers())}, ValueError, "validation interval"),
    "interval 1.5": ({"validation": ("batch", 1.5, numbers())}, TypeError, "validation interval"),
    "no validation groups": ({"validation": ("epoch", 1, [])}, ValueError, "validation"),
    "validation data": ({"validation": ("epoch", 1, range(9))}, TypeError, "validation"),
    "depth 0": ({"depth": 0}, ValueError, "depth"),
    "depth -1": ({"depth": -1}, ValueError, "depth"),
    "depth 2.5": ({"depth": 2.5}, TypeError, "depth"),
    "depth '3'": ({"depth": "3"}, TypeError, "depth"),
    "depth None": ({"depth": None}, TypeError, "depth"),
    "loader_count -1": ({"loader_count": -1}, ValueError, "loader_count"),
    "loader_count 1.0": ({"loader_count": 1.0}, TypeError, "loader_count"),
    "loader_count None": ({"loader_count": None}, TypeError, "loader_count"),
    "loader_count 2**32 + 1": ({"loader_count": 2**32 + 1}, (ValueError, MemoryError), "loader_"),
    "loader_nice '5'": ({"loader_nice": "5"}, TypeError, "loader_nice"),
    "loader_nice 2**40": ({"loader_nice": 2**40}, ValueError, "loader_nice"),
    "cacher_count -1": ({"cacher_count": -1}, ValueError, "cacher_count"),
    "start_at 5": ({"start_at": 5}, TypeError, "start_at"),
    "start_at of one": ({"start_at": (1,)}, TypeError, "start_at"),
    "start_at negative": ({"start_at": (-1, 0)}, ValueError, "start_at"),
    "start_at (0, -1)": ({"start_at": (0, -1)}, ValueError, "start_at"),
    "start_at (0.5, 0)": ({"start_at": (0.5, 0)}, TypeError, "start_at"),
    "end_at 5": ({"end_at": 5}, TypeError, "end_at"),
    "end_at 'epoch'": ({"end_at": "epoch"}, TypeError, "end_at"),
    "end_at mode": ({"end_at": ("step", 5)}, ValueError, "end_at"),
    "end_at negative": ({"end_at": ("epoch", -1)}, ValueError, "end_at"),
    "end_at ('epoch', 1.0)": ({"end_at": ("epoch", 1.0)}, TypeError, "end_at"),
    "end_at before start_at": (
        {"start_at": (1, 0), "end_at": ("batch", 3)}, ValueError, "end_at.*start_at"),
    "end_at epoch before start_at": (
        {"start_at": (2, 0), "end_at": ("epoch", 1)}, ValueError, "end_at.*start_at"),
    "timeout_sec '9'": ({"timeout_sec": "9"}, TypeError, "timeout_sec"),
    "timeout_sec None": ({"timeout_sec": None}, TypeError, "timeout_sec"),
    "timeout_sec NaN": ({"timeout_sec": float("nan")}, ValueError, "timeout_sec"),
    "startup_func 3": ({"startup_func": 3}, TypeError, "startup_func"),
    "placement_func 3": ({"placement_func": 3}, TypeError, "placement_func"),
    "start_method 'thread'": ({"start_method": "thread"}, ValueError, "start_method"),
    "start_method None": ({"start_method": None}, ValueError, "start_method"),
    "start_method of arrays": ({"start_method": np.zeros(2)}, ValueError, "start_method"),
    "on_error of arrays": ({"on_error": np.zeros(2)}, ValueError, "on_error.*or a callable"),
    "end_at mode of arrays": ({"end_at": (np.zeros(2), 1)}, ValueError, "end_at"),
    "validation mode of arrays": (
        {"validation": (np.zeros(2), 1, numbers())}, ValueError, "validation"),
    "deterministic 'no'": ({"deterministic": "no"}, TypeError, "deterministic"),
    "interleave_groups [0, 1]": (
        {"interleave_groups": np.array([0, 1])}, TypeError, "interleave_groups"),
    "batched 'yes'": ({"batched": "yes"}, TypeError, "batched"),
    "debug 2": ({"debug": 2}, TypeError, "debug"),
}  # fmt: skip


def test_a_dataloader_refuses_bad_input_and_names_the_argument():
    def construct(changed):
        arguments = {"loader_func": fill, "training": numbers(), **changed}
        Dataloader(arguments.pop("loader_func"), arguments.pop("training"), **arguments)

    assert wrong_answers(BAD_LOADERS, construct) == {}


BAD_CALLS = {
    "bucket data": (lambda: bucket_by_length(5, [1], [2], 1, loader_arrays=dict), "data is int"),
    "bucket lengths": (
        lambda: bucket_by_length("ab", 5, [2], 1, loader_arrays=dict), "lengths is 5"),
    "bucket boundaries": (
        lambda: bucket_by_length("ab", [1, 1], 2, 1, loader_arrays=dict), "boundaries is 2"),
    "pack lengths": (lambda: pack_sequences(None, 8), "lengths is None"),
    "lengths of text": (lambda: pack_sequences("12", 8), "lengths is '12'"),
    "share data": (lambda: process_share(None, 0, 1), "data is NoneType"),
    "share of a frame": (lambda: process_share(pd.DataFrame({"a": [1]}), 0, 1), "RowData"),
    "mask lengths": (lambda: length_mask([1.5], 3), "lengths has dtype float64"),
    "mask lengths of text": (lambda: length_mask("3", 3), "lengths has dtype <U1"),
    "mask length": (lambda: length_mask([1], 3.0), "max_length is 3.0"),
    "parquet paths": (lambda: loaders.ParquetLoader(None), "paths is None"),
    "parquet path": (lambda: loaders.ParquetLoader([3]), "paths is 3"),
    "image root": (lambda: loaders.ImageFolder(None, 8), "root is None"),
    "HDF5 file": (lambda: HDF5Loader(3), "file is 3"),
}  # fmt: skip


def test_other_functions_and_loaders_name_the_argument_too():
    cases = {case: (make, TypeError, names) for case, (make, names) in BAD_CALLS.items()}
    assert wrong_answers(cases, lambda make: make()) == {}


def test_options_are_keyword_only_and_unknown_ones_are_refused():
    with pytest.raises(TypeError, match="positional"):
        Dataloader(fill, numbers(), None, 3)
    with pytest.raises(TypeError, match="positional"):
        DataGroup(5, range(20), SPECS)
    with pytest.raises(TypeError, match="workers"):
        Dataloader(fill, numbers(), workers=3)


def test_numbers_of_numpy_are_taken_where_numbers_are():
    group = DataGroup(np.int64(5), range(20), loader_arrays=SPECS, seed=np.int32(3))
    assert group.batch_size == 5
    dataloader = Dataloader(
        fill,
        group,
        depth=np.int8(2),
        loader_count=np.int64(1),
        timeout_sec=np.float64(5),
        start_at=(np.int64(0), np.int64(1)),
        end_at=("batch", np.int64(4)),
    )
    assert (dataloader.first_batch, dataloader.last_batch) == (1, 4)


@pytest.mark.parametrize("seconds", [np.float32(5), np.int64(5), Fraction(11, 2)], ids=repr)
def test_any_real_number_is_a_timeout(seconds):
    Dataloader(fill, numbers(), timeout_sec=seconds)
    with pytest.raises(TypeError, match="timeout_sec"):
        Dataloader(fill, numbers(), timeout_sec=True)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**31, 2**62])
def test_any_whole_number_is_a_seed(seed):
    with Dataloader(
        fill, numbers(seed=seed, shuffle_first=True), end_at=("epoch", 1), loader_count=0
    ) as dataloader:
        batches = [sorted(batch.indices) for batch in dataloader]
    assert sorted(index for batch in batches for index in batch) == list(range(20))


ENORMOUS = {
    "shape": lambda: DataGroup(4, range(10), loader_arrays={"x": ((2**40,), "f4", "f4")}),
    "shape near 2**64 bytes": lambda: DataGroup(
        4, range(10), loader_arrays={"x": ((HUGE,), "f4", "f4")}
    ),
    "shape a little over 2**64 bytes": lambda: DataGroup(
        1, range(10), loader_arrays={"x": ((2**64 + 4096,), "u1", "u1")}
    ),
    "shape of 2**126 bytes": lambda: DataGroup(
        4, range(10), loader_arrays={"x": ((HUGE, HUGE), "f4", "f4")}
    ),
    "batch_size": lambda: DataGroup(2**31 - 1, range(2**41), loader_arrays=SPECS),
    "batch_size of nothing": lambda: DataGroup(
        2**31 - 1, range(2**41), loader_arrays={"x": ((0,), "u1", "u1")}
    ),
}


@pytest.mark.parametrize("what", ENORMOUS)
def test_an_arena_larger_than_memory_is_refused_at_construction_with_the_sizes(what):
    group = ENORMOUS[what]()
    with pytest.raises(ArenaMemoryError, match=r"depth.*memory.*available"):
        Dataloader(fill, group)


def test_an_arena_a_little_larger_than_memory_gives_wanted_and_available_bytes():
    available = psutil.virtual_memory().available
    group = DataGroup(1, range(10), loader_arrays={"x": ((available,), np.uint8, np.uint8)})
    with pytest.raises(MemoryError, match="depth") as caught:
        Dataloader(fill, group, depth=2)
    wanted, there = (int(number) for number in re.findall(r"\d{8,}", str(caught.value)))
    assert 2 * available <= wanted < 2.1 * available
    assert there < 1.5 * available


@pytest.mark.parametrize("depth", [2**31, 2**32 + 1, 2**40, 2**64])
def test_a_depth_beyond_all_memory_is_refused_at_once(depth):
    result = run_script("oversized.py", str(depth), timeout_s=20)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(("ArenaMemoryError", "ValueError"))
    assert "depth" in result.stdout


def test_arena_nbytes_is_known_before_the_start_and_grows_with_depth():
    specs = {"x": ((1000,), np.float32, np.float32), "y": ((), np.int8, np.int8)}
    group = DataGroup(10, range(100), loader_arrays=specs)
    shallow, deep = (Dataloader(fill, group, depth=depth).arena_nbytes for depth in (1, 11))
    assert deep - shallow >= 10 * group.loader_size
    assert deep - shallow < 10 * (group.loader_size + 2 * 4096)


UNPICKLABLE = {
    "lambda": lambda file: lambda number, arrays, seed: None,
    "nested function": lambda file: make_nested(),
    "partial of a lambda": lambda file: functools.partial(lambda *args: None, 1),
    "bound method with a lock": lambda file: Filler(threading.Lock()).load,
    "callable with an open file": Filler,
}


def make_nested():
    def nested(number, arrays, seed):
        arrays["x"][:] = number

    return nested


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("what", UNPICKLABLE)
def test_a_loader_that_cannot_be_pickled_is_refused_in_one_line_by_the_constructor(
    what, start_method
):
    with (
        open(__file__) as file,
        pytest.raises(TypeError, match=r"loader_func.*pickle.*start_method='fork'") as caught,
    ):
        Dataloader(UNPICKLABLE[what](file), numbers(), start_method=start_method)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_startup_func_or_data_that_cannot_be_pickled_is_named(start_method):
    with pytest.raises(TypeError, match="startup_func"):
        Dataloader(fill, numbers(), startup_func=lambda: None, start_method=start_method)
    locks = DataGroup(1, [threading.Lock()], loader_arrays=SPECS)
    with pytest.raises(TypeError, match="data of group 1"):
        Dataloader(fill, [numbers(), locks], start_method=start_method)


def test_without_processes_nothing_need_be_picklable():
    with Dataloader(
        make_nested(), numbers(), start_method="spawn", loader_count=0, end_at=("epoch", 1)
    ) as dataloader:
        assert sum(1 for _ in dataloader) == 4


FORKABLE = {
    "lambda": lambda file: lambda number, arrays, seed: fill(number, arrays, seed),
    "nested function": lambda file: make_nested(),
    "partial": lambda file: functools.partial(fill_plus, 0),
    "bound method with a lock": lambda file: Filler(threading.Lock()).load,
    "callable with an open file": Filler,
    "callable class": lambda file: Filler(),
}


@pytest.mark.parametrize("what", FORKABLE)
def test_any_callable_is_a_loader_under_fork(what):
    with (
        open(__file__) as file,
        Dataloader(FORKABLE[what](file), numbers(), end_at=("epoch", 1)) as dataloader,
    ):
        assert [float(b.arrays["x"][0, 0]) for b in dataloader] == [0, 5, 10, 15]


def test_picklable_callables_are_loaders_under_spawn():
    for loader in (functools.partial(fill_plus, 0), Filler().load, Filler()):
        with Dataloader(
            loader, numbers(), end_at=("epoch", 1), start_method="spawn", startup_func=start_up
        ) as dataloader:
            assert [float(b.arrays["x"][0, 0]) for b in dataloader] == [0, 5, 10, 15]


@pytest.mark.parametrize(
    ("count", "wanted", "batch_size", "batch_count"),
    [(1, 10, 1, 1), (9, 10, 9, 1), (5, 1, 1, 5), (10, 16, 10, 1), (10, 3, 3, 3)],
)
def test_a_small_data_set_gives_batches_of_capped_size_never_none(
    count, wanted, batch_size, batch_count, caplog
):
    with caplog.at_level(logging.INFO, "hydrax"):
        group = numbers(count, wanted)
    assert (group.batch_size, group.batch_count) == (batch_size, batch_count)
    assert (str(wanted) in caplog.text and str(count) in caplog.text) == (wanted > count)
    with Dataloader(
        fill, numbers(), validation=("epoch", 1, group), end_at=("epoch", 2)
    ) as dataloader:
        validation = [len(batch) for batch in dataloader if batch.is_validation]
    assert validation == [batch_size] * batch_count * 2
    with Dataloader(fill, group, end_at=("epoch", 2)) as dataloader:
        assert [len(batch) for batch in dataloader] == [batch_size] * batch_count * 2


DATA = {
    "list": [3, 1, 2],
    "tuple": (3, 1, 2),
    "array": np.array([3, 1, 2]),
    "range": range(1, 4),
    "string": "abc",
    "series": pd.Series([3, 1, 2]),
}


@pytest.mark.parametrize("kind", DATA)
def test_a_sequence_stays_what_it_is_and_the_group_is_a_sequence_over_it(kind):
    data = DATA[kind]
    group = DataGroup(2, data, loader_arrays=SPECS)
    assert isinstance(group, Sequence)
    assert len(group) == 3
    assert group[0] == data[0]
    assert list(group) == list(data)
    assert group.data is data


@pytest.mark.parametrize("make", [lambda: iter([3, 1, 2]), lambda: {3: "a", 1: "b", 2: "c"}.keys()])
def test_another_finite_iterable_is_turned_into_a_list(make):
    group = DataGroup(2, make(), loader_arrays=SPECS)
    assert sorted(group) == [1, 2, 3]
    assert group[-1] == list(group)[-1]


@pytest.mark.parametrize("make", [set, frozenset])
def test_a_set_as_data_is_warned_of_since_its_order_is_no_ones(make):
    with pytest.warns(UserWarning, match="sorted") as caught:
        group = DataGroup(2, make(["a", "b", "c"]), loader_arrays=SPECS)
    assert sorted(group) == ["a", "b", "c"]
    assert caught[0].filename == __file__


def test_an_array_of_jax_as_data_is_read_as_one_of_numpy():
    def load(row, arrays, seed):
        assert type(row) is np.ndarray
        arrays["x"][:] = row

    rows = jnp.arange(12.0).reshape(4, 3)
    group = DataGroup(2, rows, loader_arrays={"x": ((3,), np.float32, np.float32)})
    with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        found = [batch.copy().arrays["x"] for batch in dataloader]
    assert np.array_equal(np.concatenate(found), rows)
    held = DataGroup(2, [{"key": jax.random.key(0)}, rows], loader_arrays=SPECS)
    assert held[1] is rows


def defaults_of(function):
    empty = inspect.Parameter.empty
    return {
        name: None if parameter.default is empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def test_the_parameters_of_0_2_2_are_there_with_their_defaults():
    assert defaults_of(DataGroup).items() >= {
        "loader_arrays": None, "cache_arrays": None, "cache_location": None,
        "cache_readonly": False, "seed": 0, "shuffle_first": False, "shuffle_later": "default",
    }.items()  # fmt: skip
    assert defaults_of(Dataloader).items() >= {
        "validation": None, "depth": 3, "loader_count": 1, "loader_nice": 0, "cacher_count": 1,
        "start_at": (0, 0), "end_at": None, "interleave_groups": True, "deterministic": True,
        "timeout_sec": 60, "startup_func": None, "placement_func": None,
    }.items()  # fmt: skip
    assert list(inspect.signature(DataGroup).parameters)[:2] == ["batch_size", "data"]
    assert list(inspect.signature(Dataloader).parameters)[:2] == ["loader_func", "training"]
    assert defaults_of(hydrax.Batch.cache) == {"persist": True}
    assert issubclass(hydrax.BatchTimeoutError, TimeoutError)
    assert not hydrax.is_worker()


def test_the_properties_of_0_2_2_give_what_they_gave():
    specs = {"x": ((4,), np.uint8, np.float32), "label": ((), np.int32, np.int32)}

    def load(number, arrays, seed):
        arrays["x"][:] = number
        arrays["label"][...] = number
        return {"seed": seed} | ({"even": True} if number % 2 == 0 else {})

    training = DataGroup(4, range(10), loader_arrays=specs, seed=1)
    held_out = DataGroup(3, range(100, 106), loader_arrays=specs)
    assert training.loader_layouts["label"][:4] == ((4,), np.int32, np.int32, 64)
    assert training.loader_layouts["x"][:3] == ((4, 4), np.uint8, np.float32)
    assert training.loader_layouts["x"][4] == 16
    assert training.loader_size == 64 + 16
    assert training.cache_layouts is training.cache_size is None
    with pytest.raises(TypeError):
        training.loader_layouts["x"] = 1
    dataloader = Dataloader(
        load, training, validation=("epoch", 1, held_out), start_at=(1, 1), end_at=("epoch", 3)
    )
    assert (dataloader.batches_per_epoch, dataloader.batches_per_validation) == (2, 2)
    assert (dataloader.first_batch, dataloader.last_batch) == (3, 6)
    assert dataloader.deterministic
    assert not dataloader.interrupted
    with dataloader:
        first = next(dataloader)
        assert type(first) is TrainingBatch
        assert first.is_training
        assert not first.is_validation
        assert len(first) == 4
        assert (first.epoch, first.epoch_batch, first.batch_num) == (1, 1, 3)
        assert first.group is training
        assert (first.group_index, first.group_number) == (1, 0)
        assert list(first.data) == list(first.indices) == first.arrays["label"].tolist()
        assert first.get_data(2) == first.data[2] == first.indices[2]
        assert first.get_array("x") is first.arrays["x"]
        assert first.arrays["x"].dtype == np.float32
        assert isinstance(first.arrays["x"], jax.Array)
        assert first.additional["seed"] == list(first.seeds)
        assert first.get_additional("seed", 1) == first.seeds[1]
        evens = [True if number % 2 == 0 else None for number in first.data]
        assert first.get_additional("even") == evens
        assert first.get_additional("odd") == [None] * 4
        assert first.get_additional("odd", 2, default=7) == 7
        assert first.layouts is training.loader_layouts
        assert 0 <= first.seed < 2**31
        with pytest.raises(TypeError):
            first.arrays["x"] = 1
        with pytest.raises(TypeError):
            first.additional["seed"] = 1
        with pytest.raises(KeyError, match="label"):
            first.get_array("y")
        del first
        rest = [batch.copy() for batch in dataloader]
    kinds = [ValidationBatch, ValidationBatch, *[TrainingBatch] * 2, *[ValidationBatch] * 2]
    assert [type(batch) for batch in rest] == kinds
    second = rest[1]
    assert second.is_validation
    assert not second.is_training
    assert (second.validation_epoch, second.validation_epoch_batch) == (1, 1)
    assert second.validation_batch_num == 3
    assert second.additional["seed"] == [None] * 3
    assert list(second.data) == [103, 104, 105]
    assert dataloader.idle_usec() >= 0
    assert dataloader.idle_usec() == 0


def test_batches_are_made_by_a_dataloader_only():
    for kind in (hydrax.Batch, TrainingBatch, ValidationBatch):
        with pytest.raises(TypeError, match="Dataloader"):
            kind()


def test_a_script_for_0_2_2_runs_unchanged():
    result = run_script("script_for_022.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["80", "40"]


def test_a_placement_func_gets_arrays_layouts_additional_and_group():
    seen = []

    def place(arrays, layouts, additional, group):
        seen.append((arrays["x"].copy(), layouts, dict(additional), group))
        return {"double": jax.device_put(arrays["x"] * 2)}

    def load(number, arrays, seed):
        arrays["x"][:] = number
        return {"number": number}

    group = numbers(10, 5)
    with Dataloader(load, group, placement_func=place, end_at=("epoch", 1)) as dataloader:
        doubles = [batch.arrays["double"][:, 0].tolist() for batch in dataloader]
    assert doubles == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
    assert seen[0][0][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert seen[1][2] == {"number": [5, 6, 7, 8, 9]}
    assert seen[0][1] is group.loader_layouts
    assert seen[0][3] is group


def test_what_a_placement_func_returns_must_be_a_dict():
    with (
        Dataloader(
            fill, numbers(), placement_func=lambda *args: [1], end_at=("epoch", 1)
        ) as dataloader,
        pytest.raises(TypeError, match=r"placement_func.*list"),
    ):
        next(dataloader)


def test_descriptors_of_any_kind_reach_the_loader_as_they_are():
    data = [
        None,
        3.5,
        "name" * 10_000,
        b"\x00" * 100_000,
        {"a": [1]},
        Decimal("1.1"),
        (1, (2,)),
        [],
    ]

    def load(descriptor, arrays, seed):
        arrays["x"][:] = 1
        return {"same": repr(descriptor)}

    group = DataGroup(4, data, loader_arrays=SPECS)
    with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        got = [text for batch in dataloader for text in batch.additional["same"]]
    assert got == [repr(descriptor) for descriptor in data]
