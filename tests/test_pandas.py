"""hydrax.pandas: rows by position, equal to iloc, without copies in forked processes."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pandas", reason="hydrax.pandas needs pandas")

import pandas as pd

from hydrax.pandas import RowData


def assert_same_row(actual: Any, expected: Any) -> None:
    """Equal in everything, the types of the cells and of the name included."""
    pd.testing.assert_series_equal(actual, expected, check_exact=True, check_names=False)
    assert type(actual.name) is type(expected.name)
    assert repr(actual.name) == repr(expected.name)  # NaN in a tuple is not equal to itself
    assert actual.index.equals(expected.index)
    for mine, theirs in zip(actual.array, expected.array, strict=True):
        assert type(mine) is type(theirs), (mine, theirs)
        if mine is None or mine is pd.NA or mine is pd.NaT:
            assert mine is theirs


def assert_rows_equal_iloc(frame: Any) -> None:
    rows = RowData(frame)
    restored = pickle.loads(pickle.dumps(rows))
    assert len(rows) == len(restored) == len(frame)
    for i in range(len(frame)):
        try:
            expected = frame.iloc[i]
        except ValueError:  # pandas 2 cannot put a missing category beside integers
            with pytest.raises(ValueError, match="NaN"):
                rows[i]
            continue
        assert_same_row(rows[i], expected)
        assert_same_row(rows[i - len(frame)], expected)
        # The types of cells are left out: a pickled SparseArray gives others than it gave before.
        pd.testing.assert_series_equal(restored[i], expected, check_exact=True, check_names=False)
    pd.testing.assert_frame_equal(restored.dataframe, frame)


N = 6
STAMPS = pd.to_datetime(["2020-02-01", None, "2021-05-05", "1999-12-31", None, "2030-01-01"])
COLUMNS: dict[str, Callable[[], Any]] = {
    "int64": lambda: np.arange(N),
    "int8": lambda: np.arange(N, dtype=np.int8),
    "uint64": lambda: np.arange(N, dtype=np.uint64) + 2**63,
    "float64": lambda: np.array([0.5, np.nan, -1.0, np.inf, 4.0, 5.0]),
    "float32": lambda: np.linspace(0, 1, N, dtype=np.float32),
    "bool": lambda: np.arange(N) % 2 == 0,
    "complex": lambda: np.arange(N) * 1j,
    "object strings": lambda: pd.Series(["a", "", "žluť", "😀", "\ud800", "x" * 500], dtype=object),
    "object missing": lambda: pd.Series(["a", None, np.nan, pd.NA, pd.NaT, b"\xff"], dtype=object),
    "object mixed": lambda: pd.Series(
        [1, 2.5, True, Decimal("1.1"), date(2020, 1, 2), 2**80], dtype=object
    ),
    "object containers": lambda: pd.Series(
        [[1, 2], (3, "x"), {"k": 1}, {4}, frozenset([5]), [None]], dtype=object
    ),
    "object numpy": lambda: pd.Series(
        [np.int64(3), np.float32(1), np.str_("s"), np.bool_(True), 7, 1j], dtype=object
    ),
    "object arrays": lambda: pd.Series([np.arange(k) for k in range(N)], dtype=object),
    "string python": lambda: pd.array(["a", pd.NA, "ü", "", "b", "c"], dtype="string[python]"),
    "inferred strings": lambda: pd.Series(["a", None, "ü", "", "b", "c"]),
    "categorical strings": lambda: pd.Categorical(["x", "y", None, "x", "ž", "y"]),
    "categorical ints": lambda: pd.Categorical([3, 1, 2, 1, None, 3], ordered=True),
    "Int64": lambda: pd.array([1, None, 3, 4, 5, 6], dtype="Int64"),
    "Float32": lambda: pd.array([1.5, None, 3, 4, 5, 6], dtype="Float32"),
    "boolean": lambda: pd.array([True, None, False, True, False, None], dtype="boolean"),
    "datetime": lambda: STAMPS,
    "datetime s": lambda: np.arange(N).astype("datetime64[s]"),
    "datetime tz": lambda: STAMPS.tz_localize("Europe/Prague"),
    "timedelta": lambda: pd.to_timedelta([1, None, 3, 4, 5, 6], unit="h"),
    "period": lambda: pd.period_range("2020-01", periods=N, freq="M"),
    "interval": lambda: pd.interval_range(0, N),
    "sparse": lambda: pd.arrays.SparseArray([0.0, 0, 1, 0, 2, 0]),
}


def test_rows_of_one_column_equal_iloc() -> None:
    for make in COLUMNS.values():
        assert_rows_equal_iloc(pd.DataFrame({"only": make()}))


def test_rows_of_two_equal_columns_equal_iloc() -> None:
    for make in COLUMNS.values():
        assert_rows_equal_iloc(pd.DataFrame({"one": make(), "two": make()}))


@pytest.mark.parametrize(
    "first",
    [
        "int64",
        "float32",
        "object missing",
        "categorical strings",
        "Int64",
        "datetime",
        "datetime tz",
        "string python",
    ],
)
def test_rows_of_mixed_columns_equal_iloc(first: str) -> None:
    for second in COLUMNS.values():
        assert_rows_equal_iloc(pd.DataFrame({"one": COLUMNS[first](), "two": second()}))


def test_rows_of_all_columns_together_equal_iloc() -> None:
    assert_rows_equal_iloc(pd.DataFrame({name: make() for name, make in COLUMNS.items()}))


def test_rows_of_arrow_columns_equal_iloc() -> None:
    pytest.importorskip("pyarrow", reason="Arrow columns need pyarrow")
    frame = pd.DataFrame(
        {
            "s": pd.array(["a", None, "ü"], dtype="string[pyarrow]"),
            "i": pd.array([1, None, 3], dtype="int64[pyarrow]"),
            "n": [1, 2, 3],
        }
    )
    for columns in (["s"], ["i"], ["s", "i"], ["i", "n"], ["s", "i", "n"]):
        assert_rows_equal_iloc(frame[columns])


INDICES: dict[str, Callable[[], Any]] = {
    "offset": lambda: pd.RangeIndex(100, 100 + 2 * N, 2),
    "duplicates": lambda: pd.Index([7, 7, 7, 0, 1, 7]),
    "reversed": lambda: pd.Index(range(N)[::-1]),
    "floats": lambda: pd.Index([0.5, np.nan, 2, 3, 4, 5]),
    "strings": lambda: pd.Index(["b", "a", "b", "ž", "", "c"], name="key"),
    "objects": lambda: pd.Index(["b", 1, None, 2.5, (1, 2), "b"], dtype=object),
    "dates": lambda: pd.date_range("2020", periods=N, freq="D", tz="UTC"),
    "categories": lambda: pd.CategoricalIndex(["x", "y", None, "x", "y", "x"]),
    "multi": lambda: pd.MultiIndex.from_product([["a", "b"], [1, 2, 3]], names=["s", None]),
    "multi missing": lambda: pd.MultiIndex.from_arrays(
        [["a", None, "b", "a", "b", "a"], STAMPS, pd.Categorical(list("xyxyxx"))]
    ),
}


@pytest.mark.parametrize("name", list(INDICES))
def test_rows_are_taken_by_position_whatever_the_index(name: str) -> None:
    frame = pd.DataFrame({"n": np.arange(N), "s": list("abcdef")}, index=INDICES[name]())
    assert_rows_equal_iloc(frame)
    assert_rows_equal_iloc(frame[["n"]])
    assert [row["n"] for row in RowData(frame)] == list(range(N))
    part = pickle.loads(pickle.dumps(RowData(frame)))[4:0:-2]
    pd.testing.assert_frame_equal(part.dataframe, frame.iloc[4:0:-2])


def test_columns_of_any_labels_equal_iloc() -> None:
    for columns in ([1, 1, "x"], pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)])):
        frame = pd.DataFrame([[1, "u", 2.0], [3, "v", 4.0]])
        frame.columns = columns
        assert_rows_equal_iloc(frame)


def test_frames_without_rows_or_columns() -> None:
    empty = RowData(pd.DataFrame({"a": [], "s": pd.Series([], dtype=object)}))
    assert len(empty) == 0
    assert list(empty) == []
    with pytest.raises(IndexError):
        empty[0]
    assert_rows_equal_iloc(pd.DataFrame(index=["x", "y"]))


def test_frame_of_several_blocks_of_one_dtype_equals_iloc() -> None:
    frame = pd.DataFrame({"a": np.arange(4.0)})
    for name in "bcd":
        frame[name] = np.arange(4.0) * 2
    assert_rows_equal_iloc(frame)
    assert_rows_equal_iloc(frame.iloc[::-2])


def test_rows_carry_the_attrs_of_the_frame() -> None:
    frame = pd.DataFrame({"a": [1, 2]})
    frame.attrs["source"] = "survey"
    assert RowData(frame)[1].attrs == frame.iloc[1].attrs == {"source": "survey"}


def test_a_row_can_be_changed_without_changing_the_frame() -> None:
    for frame in (pd.DataFrame(np.zeros((3, 2))), pd.DataFrame({"a": [0, 0], "s": ["x", "y"]})):
        rows = RowData(frame)
        row = rows[1]
        row.iloc[0] = 9
        assert frame.iloc[1].iloc[0] == 0
        assert rows[1].iloc[0] == 0


def test_numpy_integers_are_positions() -> None:
    rows = RowData(pd.DataFrame({"a": [10, 20, 30]}))
    for kind in (np.int64, np.uint8, np.int16):
        assert rows[kind(2)]["a"] == 30
    assert rows[np.int64(-1)]["a"] == 30


def test_out_of_range_and_labels_are_refused_with_words() -> None:
    rows = RowData(pd.DataFrame({"a": [1, 2, 3]}))
    for position in (3, -4):
        with pytest.raises(IndexError, match=rf"row {position} is out of range .* 3 rows"):
            rows[position]
    for label in ("a", 1.0, (0, "a"), None):
        with pytest.raises(TypeError, match="by position"):
            rows[label]  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"pandas\.DataFrame, not dict"):
        RowData({"a": [1]})


def test_slices_are_row_data_of_the_same_rows() -> None:
    frame = pd.DataFrame({"n": np.arange(10), "s": list("abcdefghij")})
    rows = RowData(frame)
    for key in (
        *(np.s_[2:5], np.s_[:], np.s_[::-1], np.s_[7:1:-3], np.s_[20:], np.s_[-3:], np.s_[5:2]),
        *(np.s_[::-1], np.s_[:-20:-1], np.s_[9::-9]),
    ):
        part = rows[key]
        assert isinstance(part, RowData)
        pd.testing.assert_frame_equal(part.dataframe, frame.iloc[key])
        assert [row["s"] for row in part] == list(frame["s"].iloc[key])
    twice = rows[::-1][2:4]
    assert [row["n"] for row in twice] == [7, 6]
    assert rows[::-1][10:].dataframe.empty
    assert [row["n"] for row in reversed(rows[:3])] == [2, 1, 0]


def test_dataframe_is_the_one_given_while_it_lives() -> None:
    frame = pd.DataFrame({"n": [1, 2], "s": pd.Series(["x", "y"], dtype=object)})
    rows = RowData(frame)
    assert rows.dataframe is frame
    numbers = frame[["n"]]
    assert RowData(numbers).dataframe is numbers
    assert RowData(pd.DataFrame({"n": [1]})).dataframe["n"].tolist() == [1]


def test_packed_frame_is_given_free_and_made_again_when_asked_for() -> None:
    class Cell:
        alive = 0

        def __init__(self) -> None:
            Cell.alive += 1

        def __del__(self) -> None:
            Cell.alive -= 1

        def __reduce__(self) -> Any:
            return str, ("cell",)

    rows = RowData(pd.DataFrame({"o": [Cell(), Cell()], "n": [1, 2]}))
    gc.collect()
    assert Cell.alive == 0
    assert rows[1].tolist() == ["cell", 2]
    assert rows.dataframe is rows.dataframe
    assert rows.dataframe["o"].tolist() == ["cell", "cell"]


def test_cell_that_cannot_be_pickled_leaves_its_column_and_is_logged(caplog: Any) -> None:
    frame = pd.DataFrame({"lock": [threading.Lock(), None], "s": pd.Series(["a", "b"], dtype="O")})
    with caplog.at_level(logging.WARNING, logger="hydrax.pandas"):
        rows = RowData(frame)
    assert "column 'lock' stays as Python objects" in caplog.text
    assert rows[0]["lock"] is frame["lock"].iloc[0]
    assert repr(rows) == "RowData(2 rows x 2 columns, packed: s)"


def test_large_cells_are_not_packed_and_shared_ones_only_once() -> None:
    large = pd.DataFrame({"b": [bytes([k]) * 100_000 for k in range(50)]})
    assert repr(RowData(large)) == "RowData(50 rows x 1 columns)"
    assert RowData(large)[3]["b"] is large["b"].iloc[3]
    shared = list(range(3000))
    frame = pd.DataFrame({"o": [shared] * 1000, "n": range(1000)})
    assert len(pickle.dumps(RowData(frame))) < 60_000
    assert RowData(frame)[999]["o"] == shared


def test_repr_names_size_and_packed_columns() -> None:
    frame = pd.DataFrame({"n": [1, 2], "s": pd.Series(["a", "b"], dtype=object)})
    assert repr(RowData(frame)) == "RowData(2 rows x 2 columns, packed: s)"
    assert repr(RowData(frame[["n"]])[:1]) == "RowData(1 rows x 1 columns)"
    keyed = frame[["n"]].set_index(frame["s"])
    assert repr(RowData(keyed)) == "RowData(2 rows x 1 columns, packed: index)"


def test_packing_keeps_every_string_across_chunks() -> None:
    count = 140_000  # more than two chunks; ASCII, not ASCII, and mixed with other objects
    cells: list[Any] = [f"row {i}" for i in range(count)]
    cells[70_000] = "ž" * 10
    cells[135_000] = None
    rows = RowData(pd.DataFrame({"s": pd.Series(cells, dtype=object)}))
    source = rows._table.sources[0]
    assert [source[i] for i in range(count)] == cells


# --- Memory ------------------------------------------------------------------------------------

MEMORY_SCRIPT = """
import gc, os, sys
import numpy as np
import pandas as pd
from hydrax.pandas import RowData

way, ROWS, CHILDREN = sys.argv[1], int(sys.argv[2]), 4
TEXT = " of a text of some length" * int(sys.argv[3])


def pss_kb():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))


def column(name, dtype):
    cells = [f"{name} {i:09d}{TEXT}" for i in range(ROWS)]
    if name == "mixed":
        cells = [cell if i % 3 else (i, cell) for i, cell in enumerate(cells)]
    return pd.Series(cells, dtype=dtype)


frame = pd.DataFrame(
    {
        "text": column("text", object),
        "mixed": column("mixed", object),
        "string": column("string", "string[python]"),
    }
)
frame.index = pd.Index([f"label {i}" for i in range(ROWS)], dtype=object)
frame_kb = int(frame.memory_usage(deep=True).sum()) // 1024
rows = RowData(frame)
if way == "packed":
    read = rows.__getitem__
else:  # what a RowData without packing would read, so that the test is known to see copies
    arrays = [frame[name].to_numpy(dtype=object) for name in frame]
    read = lambda i: [array[i] for array in arrays]
gc.collect()
gc.freeze()

# Each child reads its part of a shuffled epoch; all measure while all live.
order = np.random.default_rng(0).permutation(ROWS)
children, grown = [], 0
for k in range(CHILDREN):
    (go_r, go_w), (out_r, out_w) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        read(0)
        os.write(out_w, b"s")
        os.read(go_r, 1)
        before = pss_kb()
        os.write(out_w, b"m")
        os.read(go_r, 1)
        for i in order[k::CHILDREN].tolist():
            read(i)
        os.write(out_w, b"r")
        os.read(go_r, 1)
        os.write(out_w, b"%012d" % (pss_kb() - before))
        os.read(go_r, 1)
        os._exit(0)
    children.append((pid, go_w, out_r))
for step in range(4):
    for _, _, out_r in children:
        grown += int(os.read(out_r, 12)) if step == 3 else 0 * len(os.read(out_r, 1))
    for _, go_w, _ in children:
        os.write(go_w, b"g")
for pid, _, _ in children:
    os.waitpid(pid, 0)
print(grown, frame_kb)
"""


def measured_growth(way: str) -> float:
    """How much four forked readers grew together, as a part of the frame's size (60 MB)."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, way, "30000", "24"],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    grown_kb, frame_kb = map(int, result.stdout.split())
    return grown_kb / frame_kb


needs_smaps = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the kernel has no smaps_rollup"
)


@needs_smaps
def test_forked_readers_do_not_copy_columns_of_objects() -> None:
    assert measured_growth("packed") < 0.2


@needs_smaps
def test_columns_that_are_not_packed_would_be_copied() -> None:
    assert measured_growth("unpacked") > 0.5
