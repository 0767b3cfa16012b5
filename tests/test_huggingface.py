"""Batches of Hugging Face data sets, against what the ``datasets`` package itself gives."""

from __future__ import annotations

import datetime
import decimal
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

datasets = pytest.importorskip("datasets")

import pyarrow as pa  # noqa: E402
import soundfile  # noqa: E402
from datasets import (  # noqa: E402
    Array2D,
    Array3D,
    Array4D,
    Array5D,
    Audio,
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    Sequence,
    Translation,
    TranslationVariableLanguages,
    Value,
)
from PIL import Image as PillowImage  # noqa: E402

import hydrax  # noqa: E402
from hydrax import Dataloader, LoaderError, ValueRangeError  # noqa: E402
from hydrax.huggingface import data_group, iter_batches, load_rows  # noqa: E402

RGB = np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7


def list_of(feature: Any) -> Any:
    return [feature]


def image(mode: str = "RGB", height: int = 3) -> dict[str, Any]:
    file = io.BytesIO()
    PillowImage.fromarray(RGB[:height]).convert(mode).save(file, "TIFF")
    return {"bytes": file.getvalue(), "path": None}


def sound(count: int, channels: int = 1, rate: int = 8000) -> dict[str, Any]:
    file = io.BytesIO()
    samples = np.linspace(-0.5, 0.5, count * channels).reshape(count, channels)
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return {"bytes": file.getvalue(), "path": None}


def dataset_of(values: list[Any], feature: Any = None) -> Dataset:
    features = None if feature is None else Features({"c": feature})
    return Dataset.from_dict({"c": values}, features=features)


def same(ours: Any, theirs: Any) -> None:
    """Values, dtypes, shapes and containers are the same."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, jax.Array):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            same(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


def check_weak_types(ours: Any, theirs: Any) -> None:
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    for one, other in leaves:
        if isinstance(one, jax.Array):
            assert one.weak_type == other.weak_type


def values_of(dataset: Any, batch_size: int = 3, **options: Any) -> list[Any]:
    options.setdefault("loader_count", 0)
    return [batch["c"] for batch in iter_batches(dataset, batch_size, **options)]


def check_against_datasets(dataset: Any, batch_size: int = 3, **options: Any) -> None:
    options.setdefault("loader_count", 0)
    ours = list(iter_batches(dataset, batch_size, **options))
    theirs = list(dataset.with_format("jax").iter(batch_size))
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
        if isinstance(dataset, Dataset):  # rows of some streams come from Python numbers
            check_weak_types(one, other)


NUMBERS = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bool"),
]
EYE = [[1, 0], [0, 1]]
CASES: dict[str, tuple[list[Any], Any]] = {
    **{name: ([1, 0, 1, 1], Value(name)) for name in NUMBERS},
    **{
        f"list of {name}": ([[1, 0], [1, 1], [0, 0], [1, 0]], list_of(Value(name)))
        for name in NUMBERS
    },
    "floats with nulls": ([1.5, None, 0.0, None], Value("float64")),
    "infinite floats": ([float("nan"), float("inf"), -float("inf")], Value("float64")),
    "text": (["a", "ä€", None, ""], Value("string")),
    "large text": (["a", "b", None], Value("large_string")),
    "bytes": ([b"a", b"\xff", None], Value("binary")),
    "large bytes": ([b"a", b"\xff", None], Value("large_binary")),
    "nothing but null": ([None, None, None, None], Value("null")),
    "undeclared null": ([None, None], None),
    "class label": ([1, 0, 1], ClassLabel(names=["a", "b"])),
    "unequal lists": ([[1, 2], [3], [4, 5], [6, 7], [8, 9], [10, 11], []], None),
    "empty lists": ([[], [], [], [1]], list_of(Value("int64"))),
    "null floats in lists": ([[1.0, None], [2.0], []], list_of(Value("float32"))),
    "null floats in equal lists": ([[1.0, None], [2.0, 3.0]], list_of(Value("float32"))),
    "lists of lists": ([EYE, EYE, EYE, EYE], None),
    "unequal lists of lists": ([[[1, 2], [3]], [[4, 5, 6], [7, 8]], EYE], None),
    "more rows of lists": ([EYE, [*EYE, [2, 2]], EYE, EYE], None),
    "empty lists of lists": ([[], [[1]], [], []], list_of(list_of(Value("int64")))),
    "lists of empty lists": ([[[], []], [[], []]], list_of(list_of(Value("int64")))),
    "null in lists of lists": ([[[1, 2], [3, 4]], []], list_of(list_of(Value("int64")))),
    "fixed lists": ([[1, 2], [3, 4], [5, 6], [7, 8]], Sequence(Value("int32"), length=2)),
    "lists of fixed lists": ([EYE, [[1, 2]]], list_of(Sequence(Value("int32"), length=2))),
    "lists of text": ([["a", "b"], ["c"], [], ["d", None]], list_of(Value("string"))),
    "lists of bytes": ([[b"a"], [b"c"]], list_of(Value("binary"))),
    "lists of null": ([[None], [None, None]], list_of(Value("null"))),
    "Array2D": ([np.eye(2)] * 4, Array2D((2, 2), "float32")),
    "Array2D of bool": ([np.eye(2, dtype=bool)] * 2, Array2D((2, 2), "bool")),
    "Array2D of int64": ([np.eye(2, dtype=np.int64)] * 2, Array2D((2, 2), "int64")),
    "Array2D with null": ([None, np.eye(2), None], Array2D((2, 2), "float32")),
    "Array2D of any length": (
        [np.eye(2, dtype=np.int32), np.zeros((3, 2), np.int32)] * 2,
        Array2D((None, 2), "int32"),
    ),
    "Array2D of any length without rows": (
        [np.zeros((0, 2)), np.ones((1, 2)), *[np.zeros((0, 2))] * 3],
        Array2D((None, 2), "float32"),
    ),
    "Array2D of no rows": ([np.zeros((0, 2))] * 2, Array2D((0, 2), "uint8")),
    "Array3D": ([np.ones((2, 1, 3))] * 2, Array3D((2, 1, 3), "float64")),
    "Array4D": ([np.ones((2, 1, 3, 1))] * 2, Array4D((2, 1, 3, 1), "int8")),
    "Array5D": ([np.ones((2, 1, 3, 1, 2))] * 2, Array5D((2, 1, 3, 1, 2), "uint8")),
    "lists of Array2D": ([[EYE], [EYE] * 2], list_of(Array2D((2, 2), "float32"))),
    "equal lists of Array2D": ([[EYE]] * 3, list_of(Array2D((2, 2), "float32"))),
    "dicts": (
        [{"a": 1, "b": "x", "c": 1.5, "d": True}, {"a": 2, "b": None, "c": None, "d": False}],
        None,
    ),
    "null dicts": (
        [{"a": 1.5, "b": "x"}, None, {"a": 2.5, "b": None}],
        {"a": Value("float64"), "b": Value("string")},
    ),
    "dicts of dicts": ([{"a": {"b": [1, 2], "c": b"x"}}, {"a": {"b": [3], "c": None}}], None),
    "dicts of arrays": ([{"a": np.eye(2)}] * 2, {"a": Array2D((2, 2), "float32")}),
    "lists of dicts of lists of dicts": (
        [[{"a": [{"b": 1, "c": [1.5]}, {"b": 2, "c": []}], "d": "x"}], []],
        list_of(
            {
                "a": list_of({"b": Value("int8"), "c": list_of(Value("float32"))}),
                "d": Value("string"),
            }
        ),
    ),
    "lists of labels": ([[0, 1], [1]], list_of(ClassLabel(names=["x", "y"]))),
    "equal lists of labels": ([[0, 1], [1, 1]], Sequence(ClassLabel(names=["x", "y"]))),
    "dicts of labels": ([{"a": 1}] * 2, {"a": ClassLabel(names=["x", "y"])}),
    "lists of dicts": ([[{"a": 1, "b": "x"}], [{"a": 2, "b": "y"}] * 2, []], None),
    "sequences of dicts": (
        [{"a": [1, 2], "b": ["x", "y"]}, {"a": [1], "b": ["x"]}],
        Sequence({"a": Value("int64"), "b": Value("string")}),
    ),
    "translation": ([{"en": "a", "fr": "b"}] * 2, Translation(["en", "fr"])),
    "translations": (
        [{"en": "a", "fr": ["b", "c"]}] * 2,
        TranslationVariableLanguages(languages=["en", "fr"]),
    ),
    "images": ([image()] * 4, Image()),
    **{
        f"images {mode}": ([image(mode)] * 2, Image())
        for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I", "F")
    },
    "images of two modes": ([image(), image("L"), image()], Image()),
    "images of two sizes": ([image(), image(height=2)], Image()),
    "images and none": ([image(), None, image()], Image()),
    "images with a mode": ([image("L")] * 2, Image(mode="RGB")),
    "images not decoded": ([image("L")] * 2, Image(decode=False)),
    "lists of images": ([[image("L")] * 2, [image("L")]], list_of(Image())),
    "dicts of images": ([{"i": image("L")}] * 2, {"i": Image()}),
}
# Releases of datasets before 5 fail on these.
CASES_SINCE_5: dict[str, tuple[list[Any], Any]] = {
    "null lists": ([[1, 2], None, [5, 6], [7, 8]], list_of(Value("int64"))),
    "null lists of floats": ([[1.0, 2.0], None], list_of(Value("float32"))),
    "null lists of lists": ([None, [[1, 2], None], EYE], list_of(list_of(Value("int64")))),
    "null lists of text": ([["a", None], None], list_of(Value("string"))),
    "null lists of Array2D": ([[EYE], None], list_of(Array2D((2, 2), "float32"))),
}
MAJOR_RELEASE = int(datasets.__version__.split(".")[0])
if MAJOR_RELEASE >= 5:
    CASES |= CASES_SINCE_5


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_the_jax_format(name: str) -> None:
    check_against_datasets(dataset_of(*CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_one_row_is_that_of_the_jax_format(name: str) -> None:
    check_against_datasets(dataset_of(*CASES[name]), 1)


@pytest.mark.parametrize(
    "name", ["unequal lists", "Array2D with null", "text", "null dicts", "bool"]
)
def test_rows_in_any_order_and_in_many_chunks_are_those_of_the_jax_format(name: str) -> None:
    values, feature = CASES[name]
    parts = [dataset_of(values, feature), dataset_of(values[1:], feature)]
    parts += [parts[0].select([2, 0]), parts[1].select(range(1, 2))]
    together = datasets.concatenate_datasets(parts * 2)
    check_against_datasets(together)
    check_against_datasets(together, 4)
    check_against_datasets(together.shuffle(seed=1), 4)
    check_against_datasets(together.select([5, 3, 3, 0, 8]), 2)
    check_against_datasets(together.filter(lambda _, i: i % 3 != 1, with_indices=True), 4)
    check_against_datasets(datasets.interleave_datasets([parts[0], together.shuffle(seed=2)]), 3)


def test_random_tables_are_those_of_the_jax_format(rng: np.random.Generator) -> None:
    """Lists of lists of any lengths, with bools and nulls, cut into chunks anywhere."""
    for _ in range(12):
        count = int(rng.integers(1, 40))
        lengths = rng.integers(0, 3, count)
        columns = {
            "ragged": [
                [rng.integers(0, 9, rng.integers(0, 3)).tolist() for _ in range(n)] for n in lengths
            ],
            "floats": [[None if x < 0.2 else x for x in rng.random(3)] for _ in range(count)],
            "flags": [rng.integers(0, 2, 5).astype(bool).tolist() for _ in range(count)],
            "number": [None if x < 0.3 else x for x in rng.random(count)],
        }
        features = Features(
            ragged=list_of(list_of(Value("int16"))),
            floats=Sequence(Value("float64"), length=3),
            flags=list_of(Value("bool")),
            number=Value("float32"),
        )
        whole = Dataset.from_dict(columns, features=features)
        cuts = np.sort(rng.integers(0, count + 1, 3))
        parts = [
            whole.select(range(low, high))
            for low, high in zip([0, *cuts], [*cuts, count], strict=True)
            if high > low
        ]
        together = datasets.concatenate_datasets(parts)
        check_against_datasets(together, int(rng.integers(1, 9)))
        check_against_datasets(together.shuffle(seed=3), int(rng.integers(1, 9)))


def test_tables_mapped_from_disk_and_joined_side_by_side(tmp_path: Path) -> None:
    first = Dataset.from_dict({"c": list(range(2500)), "x": np.arange(5000).reshape(-1, 2)})
    first.save_to_disk(tmp_path / "first", num_shards=3)
    mapped = datasets.load_from_disk(tmp_path / "first")
    assert mapped.cache_files
    check_against_datasets(mapped, 700)
    check_against_datasets(mapped.shuffle(seed=0), 700)
    beside = Dataset.from_dict({"text": [f"text {i}" for i in range(2500)]})
    check_against_datasets(datasets.concatenate_datasets([mapped, beside], axis=1), 900)


def test_columns_are_chosen_and_ordered() -> None:
    dataset = Dataset.from_dict({"a": [1], "b": [2], "c": ["x"]})
    (batch,) = iter_batches(dataset, 4, columns=["c", "a"])
    assert list(batch) == ["c", "a"]
    with pytest.raises(ValueError, match="columns has 'd'; the data set has a, b, c"):
        iter_batches(dataset, 4, columns=["d"])


def test_a_format_set_before_makes_no_difference() -> None:
    dataset = Dataset.from_dict({"a": [1, 2], "c": [3, 4]}).with_format("numpy", columns=["a"])
    (batch,) = iter_batches(dataset, 2)
    assert list(batch) == ["a", "c"]


def test_last_batch_is_short_or_dropped() -> None:
    dataset = Dataset.from_dict({"c": [1, 2, 3]})
    assert [len(value) for value in values_of(dataset, 2)] == [2, 1]
    assert [len(value) for value in values_of(dataset, 2, remainder="drop")] == [2]
    stream = dataset.to_iterable_dataset()
    assert [len(value) for value in values_of(stream, 2, remainder="drop")] == [2]


def test_arrays_stay_as_they_are_when_later_batches_come() -> None:
    dataset = Dataset.from_dict({"c": np.arange(1000.0).reshape(250, 4)})
    kept = [batch["c"] for batch in iter_batches(dataset, 10)]
    np.testing.assert_array_equal(np.concatenate(kept), np.arange(1000.0).reshape(250, 4))


def test_donating_a_batch_leaves_the_data_set_alone(tmp_path: Path) -> None:
    Dataset.from_dict({"c": np.ones((64, 16), np.float32)}).save_to_disk(tmp_path / "ones")
    dataset = datasets.load_from_disk(tmp_path / "ones")
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for _ in range(2):
        for batch in iter_batches(dataset, 64):
            assert float(double(batch["c"]).sum()) == 2048


@pytest.mark.parametrize("name", ["images of two modes", "dicts", "text", "unequal lists"])
def test_loader_processes_read_the_same_batches(name: str) -> None:
    dataset = dataset_of(*CASES[name])
    check_against_datasets(datasets.concatenate_datasets([dataset] * 4), 2, loader_count=2)


def test_leaving_early_ends_the_loader_processes() -> None:
    for _ in iter_batches(dataset_of([image()] * 20, Image()), 2, loader_count=2):
        break  # the fixture of all tests looks for what is left


# What is better than in the datasets package.


@pytest.mark.parametrize(
    ("values", "feature", "row", "what"),
    [
        ([1, 2, 2**32 + 5], Value("int64"), 2, "4294967301 does not fit int32"),
        ([1, -(2**31) - 1], Value("int64"), 1, "-2147483649 does not fit int32"),
        ([2**31], Value("uint32"), 0, "2147483648 does not fit int32"),
        (np.array([2**63], np.uint64), Value("uint64"), 0, "9223372036854775808 does not fit"),
        ([1.0, 1e300], Value("float64"), 1, "1e\\+300 does not fit float32"),
        ([[1], [2, 2**40]], list_of(Value("int64")), 1, "1099511627776 does not fit int32"),
        ([{"a": 1}, {"a": 2**40}], {"a": Value("int64")}, 1, "1099511627776 does not fit"),
        ([{"a": 1e300}], {"a": Value("float64")}, 0, "1e\\+300 does not fit float32"),
        ([1, None, 3], Value("int64"), 1, "null, which int32 cannot hold"),
        ([True, None], Value("bool"), 1, "null, which bool cannot hold"),
        ([0, None], ClassLabel(names=["a"]), 1, "null, which int32 cannot hold"),
        ([[1, 2], [None, 3]], list_of(Value("int8")), 1, "null, which int32 cannot hold"),
        ([EYE, None], Array2D((2, 2), "int32"), 1, "null, which int32 cannot hold"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused_by_column_and_row(
    values: Any, feature: Any, row: int, what: str
) -> None:
    table = (
        pa.table({"c": pa.array(values, Features({"c": feature}).arrow_schema.field(0).type)})
        if isinstance(values, np.ndarray)
        else None
    )
    dataset = dataset_of(values, feature) if table is None else Dataset(table)
    with pytest.raises(ValueRangeError, match=f"column 'c', row {row}: (?:there is a )?{what}"):
        values_of(dataset)


def test_nulls_are_filled_as_asked_for_and_leave_the_dtype_alone() -> None:
    dataset = dataset_of([1, None, 3, 4, 5], Value("int64"))
    filled, whole = values_of(dataset, nulls={"c": -1})
    assert filled.tolist() == [1, -1, 3]
    assert filled.dtype == whole.dtype == np.int32
    (flags,) = values_of(dataset_of([True, None], Value("bool")), nulls={"c": False})
    assert flags.tolist() == [True, False]
    (floats,) = values_of(dataset_of([[1.0, None]], list_of(Value("float32"))), nulls={"c": 0})
    assert floats.tolist() == [[1.0, 0.0]]
    with pytest.raises(ValueError, match="nulls has 'd'; the columns are c"):
        values_of(dataset, nulls={"d": 0})


def test_null_rows_of_fixed_lists_do_not_change_the_dtype() -> None:
    dataset = dataset_of([[1, 2], None, [5, 6]], Sequence(Value("int32"), length=2))
    ((first, second, third),) = values_of(dataset)
    assert second is None
    assert first.dtype == third.dtype == np.int32
    assert (first.tolist(), third.tolist()) == ([1, 2], [5, 6])


def test_integers_in_dicts_stay_integers_beside_nulls() -> None:
    ((first, none, last),) = values_of(dataset_of([{"a": 1}, None, {"a": None}]))
    assert (first["a"].dtype, first["a"].item()) == (np.int32, 1)
    assert none is None
    assert last == {"a": None}


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        (datetime.date(2020, 2, 29), Value("date32")),
        (datetime.date(2020, 2, 29), Value("date64")),
        (datetime.datetime(2020, 2, 29, 1, 2, 3), Value("timestamp[s]")),
        (datetime.datetime(2020, 2, 29, 1, 2, 3, 4), Value("timestamp[us]")),
        (datetime.time(1, 2, 3), Value("time32[s]")),
        (datetime.time(1, 2, 3, 4), Value("time64[us]")),
        (decimal.Decimal("1.25"), Value("decimal128(5,2)")),
        *(
            (datetime.timedelta(seconds=5), Value(f"duration[{unit}]"))
            for unit in ("s", "ms", "us")
        ),
    ],
)
def test_dates_times_durations_and_decimals_arrive_as_they_are(value: Any, feature: Any) -> None:
    assert values_of(dataset_of([value, None], feature)) == [[value, None]]
    assert values_of(dataset_of([[value]], list_of(feature))) == [[[value]]]
    assert values_of(dataset_of([{"a": value}], {"a": feature})) == [[{"a": value}]]


def test_a_duration_is_the_same_in_every_unit() -> None:
    five = datetime.timedelta(seconds=5)
    for unit in ("s", "ms", "us", "ns"):
        assert values_of(dataset_of([five], Value(f"duration[{unit}]"))) == [[five]]


def test_an_empty_data_set_gives_no_batches() -> None:
    empty = dataset_of([1, 2], Value("int64")).filter(lambda _: False)
    assert values_of(empty) == []
    assert values_of(empty, loader_count=1) == []


def test_64_bit_types_are_exact_where_jax_has_them() -> None:
    code = """if True:
        import jax
        jax.config.update("jax_enable_x64", True)
        import datasets, numpy as np
        from hydrax.huggingface import iter_batches
        table = {"i": [2**40], "f": [1e300], "s": np.array([1.5], np.float32), "u": [3]}
        features = datasets.Features(
            i=datasets.Value("int64"), f=datasets.Value("float64"),
            s=datasets.Value("float32"), u=datasets.Value("uint8"),
        )
        (batch,) = iter_batches(datasets.Dataset.from_dict(table, features=features), 1)
        print([(x.dtype.name, x.item()) for x in batch.values()])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = [("int64", 2**40), ("float64", 1e300), ("float32", 1.5), ("int64", 3)]
    assert done.stdout.strip() == str(expected)


# Sounds: the decoder of datasets is not among the packages for tests, so the file is the truth.


def sounds(values: list[Any], **options: Any) -> Dataset:
    table = pa.table(
        {"c": pa.array(values, pa.struct({"bytes": pa.binary(), "path": pa.string()}))}
    )
    return Dataset(table).cast(Features({"c": Audio(**options)}))


def test_sounds_are_arrays_with_their_rate() -> None:
    ((first, none, stereo),) = values_of(sounds([sound(5), None, sound(4, 2, 16000)]))
    assert none is None
    assert list(first) == ["array", "sampling_rate"]
    assert first["array"].dtype == np.float32
    np.testing.assert_array_equal(first["array"], np.linspace(-0.5, 0.5, 5, dtype=np.float32))
    assert (first["sampling_rate"].item(), stereo["sampling_rate"].item()) == (8000, 16000)
    assert first["sampling_rate"].dtype == np.int32
    mean = np.linspace(-0.5, 0.5, 8, dtype=np.float32).reshape(4, 2).mean(axis=1)
    np.testing.assert_array_equal(stereo["array"], mean)


def test_a_sound_of_another_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="8000 Hz, and the feature 16000 Hz"):
        values_of(sounds([sound(5)], sampling_rate=16000))


# Streams.


def test_streams_give_the_same_batches() -> None:
    columns = {
        "c": list(range(7)),
        "x": [[1.0] * (1 + i % 3) for i in range(7)],
        "t": list("abcdefg"),
    }
    stream = Dataset.from_dict(columns).to_iterable_dataset(num_shards=2)
    check_against_datasets(stream.filter(lambda row: row["c"] != 3), 2, loader_count=None)
    check_against_datasets(stream.shuffle(seed=0, buffer_size=4), 3, loader_count=None)


def test_streamed_images_are_decoded() -> None:
    file = io.BytesIO()
    PillowImage.fromarray(RGB).save(file, "JPEG")
    jpeg = {"bytes": file.getvalue(), "path": None}
    stream = dataset_of([image(), jpeg, jpeg], Image()).to_iterable_dataset()
    check_against_datasets(stream, 2, loader_count=None)
    (whole,) = values_of(dataset_of([image(), jpeg, jpeg], Image()))
    if MAJOR_RELEASE < 4:
        return  # it makes JPEGs anew itself
    # What a function was given decoded must not become a JPEG a second time.
    (filtered,) = values_of(stream.filter(lambda row: True), loader_count=None)
    np.testing.assert_array_equal(filtered, whole)


def test_a_stream_without_features_gives_arrays_too() -> None:
    def rows() -> Any:
        for number in range(3):
            yield {"c": number, "x": [1.5] * number, "y": np.ones((2, 2), np.float32)}

    stream = datasets.IterableDataset.from_generator(rows)
    stream = stream.map(lambda row: row)
    first, last = iter_batches(stream, 2)
    assert first["c"].tolist() == [0, 1]
    assert [x.tolist() for x in first["x"]] == [[], [1.5]]
    assert first["y"].shape == (2, 2, 2)
    assert last["x"].shape == (1, 2)


def test_a_stream_names_the_row_that_does_not_fit() -> None:
    stream = dataset_of([1, 2, 3, 2**40], Value("int64")).to_iterable_dataset()
    with pytest.raises(ValueRangeError, match="column 'c', row 3: 1099511627776"):
        values_of(stream, 2, loader_count=None)
    with pytest.raises(ValueError, match="a streamed data set is read in this process"):
        values_of(stream, loader_count=2)


# Devices.


def test_device_can_be_a_device_its_string_or_a_sharding() -> None:
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    dataset = Dataset.from_dict({"c": [1, 2]})
    for chosen in (None, device, str(device), sharding):
        for source in (dataset, dataset.to_iterable_dataset()):
            (value,) = values_of(source, device=chosen, loader_count=None)
            assert value.devices() == {device}
            assert value.tolist() == [1, 2]
    with pytest.raises(ValueError, match="device is 'TPU_7'; there are '"):
        iter_batches(dataset, 2, device="TPU_7")
    with pytest.raises(
        TypeError, match=r"device is 0; expected a jax\.Device, a Sharding, the string"
    ):
        iter_batches(dataset, 2, device=0)  # type: ignore[arg-type]


def test_batches_are_spread_over_a_sharding_and_a_column_that_cannot_be_is_named() -> None:
    code = """if True:
        import datasets, jax
        from hydrax.huggingface import iter_batches
        mesh = jax.make_mesh((2,), ("batch",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        dataset = datasets.Dataset.from_dict({"x": [1, 2, 3], "t": ["a", "b", "c"]})
        batches = iter_batches(dataset, 2, device=sharding)
        print(len(next(batches)["x"].sharding.device_set))
        try:
            next(batches)
        except ValueError as error:
            print(str(error)[:52])
        print([d["x"].devices() for d in iter_batches(dataset, 3, device=str(jax.devices()[1]))])
        print([d["x"].committed for d in iter_batches(dataset, 3)])
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2",
        "the sharding does not fit column 'x' in this batch: ",
        "[{CpuDevice(id=1)}]",
        "[False]",
    ]


# Groups of a Dataloader.


def table_of(count: int) -> Dataset:
    features = Features(
        number=Value("int64"),
        x=Sequence(Value("float32"), length=4),
        grid=Array2D((2, 2), "uint8"),
        flag=Value("bool"),
        tokens=list_of(Value("int32")),
        label=ClassLabel(names=["even", "odd"]),
        text=Value("string"),
        meta={"count": Value("int16"), "note": Value("string")},
    )
    columns = {
        "number": list(range(count)),
        "x": [[float(i)] * 4 for i in range(count)],
        "grid": [np.full((2, 2), i % 256) for i in range(count)],
        "flag": [i % 3 == 0 for i in range(count)],
        "tokens": [list(range(i % 6)) for i in range(count)],
        "label": [i % 2 for i in range(count)],
        "text": [f"row {i}" for i in range(count)],
        "meta": [{"count": -i, "note": f"note {i}"} for i in range(count)],
    }
    return Dataset.from_dict(columns, features=features)


def check_rows(batch: Any, numbers: list[int] | None = None) -> list[int]:
    """The batch holds the rows that it says; returns them."""
    rows = batch.arrays["number"].tolist() if numbers is None else numbers
    arrays = {name: np.asarray(array) for name, array in batch.arrays.items()}
    for i, row in enumerate(rows):
        assert arrays["x"][i].tolist() == [row] * 4
        assert arrays["grid"][i].tolist() == [[row % 256] * 2] * 2
        assert arrays["flag"][i] == (row % 3 == 0)
        assert arrays["label"][i] == row % 2
        assert arrays["meta.count"][i] == -row
        assert arrays["tokens_length"][i] == row % 6
        assert arrays["tokens"][i].tolist() == [*range(row % 6), *[-1] * (8 - row % 6)]
        assert batch.additional["text"][i] == f"row {row}"
        assert batch.additional["meta.note"][i] == f"note {row}"
        assert batch.data[i]["number"] == row
        assert batch.data[i]["text"] == f"row {row}"
    return rows


PADDED: dict[str, Any] = {"pad_to": {"tokens": 8}, "pad_value": -1}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_dataloader_trains_on_a_data_set_with_validation(tmp_path: Path, start_method: Any) -> None:
    whole = table_of(150)
    whole.save_to_disk(tmp_path / "rows", num_shards=3)
    mapped = datasets.load_from_disk(tmp_path / "rows")
    splits = DatasetDict(train=mapped.shuffle(seed=1).select(range(100)), test=whole.select([7, 5]))
    groups = data_group(splits, 8, shuffle_first=True, remainder="short", **PADDED)
    assert list(groups) == ["train", "test"]
    with Dataloader(
        load_rows,
        groups["train"],
        validation=("epoch", 1, groups["test"]),
        loader_count=2,
        start_method=start_method,
        end_at=("epoch", 2),
    ) as batches:
        seen: list[int] = []
        validated: list[int] = []
        for batch in batches:
            (seen if batch.is_training else validated).extend(check_rows(batch))
            assert batch.is_zero_copy
    train = splits["train"]["number"]
    assert sorted(seen) == sorted([*train, *train])
    assert seen[:100] != seen[100:]
    assert validated == [7, 5, 7, 5]


def test_dtypes_and_shapes_follow_from_the_features_alone() -> None:
    group = data_group(table_of(3), 2, **PADDED)
    layouts = {
        name: (layout.shape[1:], layout.dtype.name) for name, layout in group.loader_layouts.items()
    }
    assert layouts == {
        "number": ((), "int64"),
        "x": ((4,), "float32"),
        "grid": ((2, 2), "uint8"),
        "flag": ((), "bool"),
        "tokens": ((8,), "int32"),
        "tokens_length": ((), "int32"),
        "label": ((), "int64"),
        "meta.count": ((), "int16"),
    }
    with Dataloader(load_rows, group, loader_count=0, end_at=("epoch", 1)) as batches:
        assert {name: array.dtype.name for name, array in next(batches).arrays.items()} == {
            name: {"int64": "int32"}.get(dtype, dtype) for name, (_, dtype) in layouts.items()
        }


def test_a_run_goes_on_where_it_was_left() -> None:
    def loader() -> Dataloader[Any]:
        group = data_group(table_of(40), 4, shuffle_first=True, **PADDED)
        return Dataloader(load_rows, group, loader_count=1, end_at=("epoch", 2))

    with loader() as batches:
        whole = [batch.arrays["number"].tolist() for batch in batches]
    with loader() as batches:
        for _ in range(7):
            next(batches)
        state = batches.get_state()
    again = loader()
    again.set_state(state)
    with again:
        assert [batch.arrays["number"].tolist() for batch in again] == whole[7:]


def load_group(group: Any, **options: Any) -> Any:
    with Dataloader(load_rows, group, loader_count=0, end_at=("epoch", 1), **options) as batches:
        return next(batches).copy()


@pytest.mark.parametrize(
    ("values", "feature", "options", "message"),
    [
        ([1, 2**32 + 5], Value("int64"), {}, "4294967301 does not fit int32"),
        ([1.0, 1e300], Value("float64"), {}, r"1e\+300 does not fit float32"),
        ([1, None], Value("int64"), {}, "column 'c', row 1: it is null; give nulls="),
        ([True, None], Value("bool"), {}, "column 'c', row 1: it is null; give nulls="),
        ([[1, 2], None], Sequence(Value("int32"), length=2), {}, "column 'c', row 1: it is null"),
        ([[1], [1, 2, 3]], list_of(Value("int8")), {"pad_to": 2}, "row 1: it has 3 elements, and"),
        ([[1], [None]], list_of(Value("int8")), {"pad_to": 2}, "column 'c', row 1: it is null"),
        ([[1], None], list_of(Value("int8")), {"pad_to": 2}, "column 'c', row 1: it is null"),
        ([image(), image(height=2)], Image(), {"image_size": (3, 4)}, "row 1: the image"),
        ([image(), {"bytes": b"GIF", "path": None}], Image(), {"image_size": (3, 4)}, "row 1: "),
        ([image(), None], Image(), {"image_size": (3, 4)}, "column 'c', row 1: it is null"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_its_array_is_named(
    values: Any, feature: Any, options: Any, message: str
) -> None:
    with pytest.raises(LoaderError, match=message):
        load_group(data_group(dataset_of(values, feature), 2, **options))


def test_nulls_and_long_rows_are_taken_if_asked_for() -> None:
    features = Features(
        a=Value("int64"),
        b=Value("float64"),
        c=list_of(Value("int16")),
        d=Sequence(Value("int8"), length=2),
        e=Value("bool"),
        f=Array2D((1, 2), "float32"),
    )
    table = {
        "a": [1, None],
        "b": [None, 2.5],
        "c": [[1, None, 3, 4], None],
        "d": [None, [1, 2]],
        "e": [None, True],
        "f": [None, [[1.0, 2.0]]],
    }
    nulls = {"a": -1, "c": 9, "d": 7, "e": False}
    group = data_group(
        Dataset.from_dict(table, features=features), 2, pad_to=3, truncate=True, nulls=nulls
    )
    arrays = {name: np.asarray(array).tolist() for name, array in load_group(group).arrays.items()}
    assert arrays["a"] == [1, -1]
    assert np.isnan(arrays["b"][0])
    assert arrays["c"] == [[1, 9, 3], [0, 0, 0]]
    assert arrays["c_length"] == [3, 0]
    assert arrays["d"] == [[7, 7], [1, 2]]
    assert arrays["e"] == [False, True]
    assert np.isnan(arrays["f"][0]).all()
    assert arrays["f"][1] == [[1.0, 2.0]]


def test_lists_of_arrays_are_padded_too() -> None:
    dataset = dataset_of(
        [[[1, 2]], [], [[3, 4], [5, 6]]], list_of(Sequence(Value("int32"), length=2))
    )
    batch = load_group(data_group(dataset, 3, pad_to=2))
    assert batch.arrays["c"].tolist() == [[[1, 2], [0, 0]], [[0, 0], [0, 0]], [[3, 4], [5, 6]]]
    assert batch.arrays["c_length"].tolist() == [1, 0, 2]
    points = dataset_of([np.ones((1, 2)), np.ones((2, 2))], Array2D((None, 2), "float32"))
    assert load_group(data_group(points, 2, pad_to=3)).arrays["c"].sum(axis=(1, 2)).tolist() == [
        2,
        4,
    ]


def test_large_rows_in_any_order(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 256, (12, 3, 80, 80)).astype(np.uint8)
    dataset = dataset_of(list(rows), Array3D((3, 80, 80), "uint8")).shuffle(seed=0)
    group = data_group(dataset, 12, shuffle_first=True)
    batch = load_group(group)
    expected = dataset.with_format("numpy")[list(batch.indices)]["c"]
    np.testing.assert_array_equal(batch.arrays["c"], expected)


def test_images_are_brought_to_one_mode_and_size() -> None:
    modes = ("RGB", "L", "LA", "P", "RGBA", "CMYK", "1")
    dataset = dataset_of([image(mode) for mode in modes], Image())
    for mode, channels in (("RGB", 3), ("L", 1), ("RGBA", 4)):
        batch = load_group(data_group(dataset, 7, image_size=(3, 4), image_mode=mode))
        assert batch.arrays["c"].shape == (7, 3, 4, channels)
        assert batch.arrays["c"].dtype == np.uint8
        if mode == "RGB":
            np.testing.assert_array_equal(batch.arrays["c"][0], RGB)
            grey = np.asarray(batch.arrays["c"][1])
            assert (grey == grey[:, :, :1]).all()
    smaller = dataset_of([image(), image(height=2)], Image())
    batch = load_group(data_group(smaller, 2, image_size=(2, 2), resize=True))
    assert batch.arrays["c"].shape == (2, 2, 2, 3)


def test_images_without_a_size_are_side_data() -> None:
    table = {"c": [image(), image("L")], "n": [1, 2]}
    dataset = Dataset.from_dict(table, features=Features(c=Image(), n=Value("int8")))
    colour, grey = load_group(data_group(dataset, 2)).additional["c"]
    np.testing.assert_array_equal(colour, RGB)
    assert grey.shape == (3, 4)


def test_sounds_are_padded_with_their_length_and_rate() -> None:
    batch = load_group(data_group(sounds([sound(5), sound(3, 1, 16000)]), 2, pad_to={"c": 6}))
    assert batch.arrays["c"].shape == (2, 6)
    np.testing.assert_array_equal(
        batch.arrays["c"][0, :5], np.linspace(-0.5, 0.5, 5, dtype=np.float32)
    )
    assert batch.arrays["c"][0, 5] == 0
    assert batch.arrays["c_length"].tolist() == [5, 3]
    assert batch.arrays["c_sampling_rate"].tolist() == [8000, 16000]
    with pytest.raises(LoaderError, match="row 0: it has 5 samples, and pad_to is 4"):
        load_group(data_group(sounds([sound(5)]), 1, pad_to=4))


def test_what_cannot_be_an_array_arrives_in_additional() -> None:
    day = datetime.date(2020, 2, 29)
    table = {
        "n": [1, 2],
        "day": [day, None],
        "long": [datetime.timedelta(seconds=5)] * 2,
        "ragged": [[1, 2], [3]],
        "holes": [[1, None], []],
        "deep": [[[1], [2, 3]], []],
        "objects": [[{"a": 1, "b": "x"}], []],
        "raw": [b"\x00", None],
    }
    batch = load_group(data_group(Dataset.from_dict(table), 2))
    assert list(batch.arrays) == ["n"]
    assert batch.additional["day"] == [day, None]
    assert batch.additional["long"] == [datetime.timedelta(seconds=5)] * 2
    assert [row.tolist() for row in batch.additional["ragged"]] == [[1, 2], [3]]
    assert batch.additional["ragged"][0].dtype == np.int64
    assert batch.additional["holes"] == [[1, None], []]
    assert batch.additional["deep"] == [[[1], [2, 3]], []]
    assert batch.additional["objects"] == [[{"a": 1, "b": "x"}], []]
    assert batch.additional["raw"] == [b"\x00", None]


def test_wrong_arguments_are_named() -> None:
    dataset = Dataset.from_dict({"n": [1], "text": ["x"]})
    with pytest.raises(ValueError, match="the split 'test' has no rows; leave it out"):
        data_group(DatasetDict(train=dataset, test=dataset.filter(lambda _: False)), 1)
    with pytest.raises(ValueError, match="the data set has no rows"):
        data_group(dataset.filter(lambda _: False), 1)
    with pytest.raises(TypeError, match=r"IterableDataset; .*iter_batches takes streams"):
        data_group(dataset.to_iterable_dataset(), 1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="none of the columns text can be an array"):
        data_group(dataset, 1, columns=["text"])
    split = DatasetDict(train=dataset, test=dataset.remove_columns("text"))
    with pytest.raises(ValueError, match="columns has 'text'; the data set has n") as caught:
        data_group(split, 1, columns=["n", "text"])
    assert caught.value.__notes__ == ["This is about the split 'test'."]
    with pytest.raises(TypeError, match=r"DatasetDict; expected .* choose one of its splits"):
        iter_batches(DatasetDict(train=dataset), 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="column 'v' has the feature Video, which cannot be brought"
    ):
        iter_batches(
            datasets.IterableDataset.from_generator(
                lambda: iter(()), features=Features(v=datasets.Video())
            ),
            1,
        )
    with pytest.raises(LoaderError, match=r"load_rows loads groups that .*data_group has made"):
        load_group(hydrax.DataGroup(1, [1], loader_arrays={"n": ((), "i4", "i4")}))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pad_to": {"text": 4}}, ValueError, "pad_to has 'text', which is no column of lists"),
        ({"pad_to": {"n": 4}}, ValueError, "pad_to has 'n', which is no column of lists or so"),
        ({"pad_to": 4, "pad_value": {"n": 4}}, ValueError, "pad_value has 'n', which is no col"),
        ({"pad_to": 4, "pad_value": 300}, ValueError, "pad_value of column 't' is 300, which int8"),
        ({"pad_to": 4, "pad_value": 0.5}, ValueError, "pad_value of column 't' is 0.5, which in"),
        ({"pad_to": 4, "pad_value": "x"}, TypeError, "pad_value of column 't' is 'x'; expected a"),
        ({"nulls": {"n": 0.5}}, ValueError, r"nulls\['n'\] is 0.5, which int64 cannot hold"),
        ({"nulls": {"text": 0}}, ValueError, "nulls has 'text', which is none of the columns th"),
    ],
)
def test_fillings_that_would_not_arrive_as_they_are_are_refused(
    options: Any, error: type[Exception], message: str
) -> None:
    table = {"n": [1, None], "t": [[1], [1, 2]], "text": ["x", None]}
    features = Features(n=Value("int64"), t=list_of(Value("int8")), text=Value("string"))
    dataset = Dataset.from_dict(table, features=features)
    with pytest.raises(error, match=message):
        data_group(dataset, 1, **options)
    if "pad_to" not in options:
        message = message.partition(", which is none")[0]
        with pytest.raises(error, match=message):
            iter_batches(dataset, 1, **options)
        with pytest.raises(error, match=message):
            iter_batches(dataset.to_iterable_dataset(), 1, **options)


@pytest.mark.parametrize("number", [3, 6])
def test_the_error_is_laid_to_the_row_that_does_not_fit(number: int) -> None:
    short: Any = {"l": [1], "f": [1, 2], "a": EYE, "i": image()}
    for name, bad in (("l", [1] * 5), ("l", None), ("f", None), ("a", None), ("i", image("L", 2))):
        rows = [{**short, **({name: bad} if row == number else {})} for row in range(8)]
        features = Features(
            l=list_of(Value("int8")),
            f=Sequence(Value("int8"), length=2),
            a=Array2D((2, 2), "int8"),
            i=Image(),
        )
        table = {key: [row[key] for row in rows] for key in short}
        dataset = Dataset.from_dict(table, features=features).select([*range(1, 8), 0])
        with pytest.raises(LoaderError) as caught:
            load_group(data_group(dataset, 8, pad_to=4, image_size=(3, 4)))
        assert caught.value.index == number - 1
        assert f"column '{name}', row {number - 1}: " in str(caught.value)


def test_rows_are_pickled_as_where_they_lie(tmp_path: Path) -> None:
    Dataset.from_dict({"n": np.arange(100_000)}).save_to_disk(tmp_path / "rows")
    group = data_group(datasets.load_from_disk(tmp_path / "rows"), 8)
    packed = pickle.dumps(group.data)
    assert len(packed) < 20_000
    assert pickle.loads(packed)[99_999] == {"n": 99_999}


def test_loading_needs_no_jax() -> None:
    code = "import sys, hydrax._huggingface_rows as rows; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
