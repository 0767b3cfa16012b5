"""A Hugging Face data set as the data of a DataGroup, and the loader function for it.

Which column is which array is worked out once, from the features; a run of rows is then written
from the memory of the table into the batch's slot. Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import datasets
import numpy as np

from hydrax._arguments import check_int
from hydrax._datagroup import DataGroup
from hydrax._huggingface_fill import Filler, SideData, plan_column
from hydrax._huggingface_memory import Ints, buffer_addresses
from hydrax._huggingface_table import Positions, check_columns
from hydrax._huggingface_values import Chunks, stored_values
from hydrax._mapped import MappedReads

__all__ = ["DatasetRows", "RowRun", "data_group", "load_rows"]


class DatasetRows(Sequence[dict[str, Any]]):
    """The rows of a data set by position: dicts of Python objects, images and sounds not decoded.

    ``__getitems__`` gives a :class:`RowRun`, from which :func:`load_rows` fills arrays. In forked
    processes the table is the same memory; pickled, it is what pickling the data set makes of it:
    tables that are mapped from files are mapped again.
    """

    def __init__(self, dataset: datasets.Dataset, columns: list[str], options: dict[str, Any]):
        self._made_of = (dataset, columns, options)
        self._positions = Positions(dataset)
        self._columns = columns
        self._chunks = {name: Chunks(self._positions.table.column(name)) for name in columns}
        plans = [
            plan
            for name in columns
            for plan in plan_column(
                name, self._positions.table.column(name), dataset.features[name], options
            )
        ]
        self.fillers = [plan for plan in plans if isinstance(plan, Filler)]
        self.side_data = [plan for plan in plans if isinstance(plan, SideData)]
        chunks = [chunk for name in columns for chunk in self._chunks[name].arrays]
        specs = [spec for filler in self.fillers for spec in filler.arrays().values()]
        self.reads = MappedReads(
            buffer_addresses(chunks),
            sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in specs),
        )

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        position = range(len(self))[index]
        if isinstance(position, range):
            return RowRun(self, np.array(position, np.int64))
        rows = self.table_rows(np.array([position]))
        return {name: stored_values(chunks.take(rows))[0] for name, chunks in self._chunks.items()}

    def __getitems__(self, positions: Sequence[int]) -> RowRun:
        return RowRun(self, np.asarray(positions, np.int64))

    def table_rows(self, positions: Ints) -> range | Ints:
        """Rows of the table at positions."""
        return self._positions.rows(positions)

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetRows, self._made_of

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {', '.join(self._columns)}>"


class RowRun(Sequence[dict[str, Any]]):
    """Some rows of a data set.

    Attributes:
        data: All its rows.
        positions: int64 of shape ``(rows,)``.
    """

    def __init__(self, data: DatasetRows, positions: Ints) -> None:
        self.data = data
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return RowRun(self.data, self.positions[index])
        return self.data[int(self.positions[index])]


def load_rows(
    rows: Sequence[Any], arrays: Mapping[str, np.ndarray[Any, Any]], seeds: Sequence[int] | None
) -> dict[str, list[Any]]:
    """Loader function of the groups that :func:`data_group` makes.

    Args:
        rows: Rows of such a group.
        arrays: One array for each of the columns that are arrays, with the rows in front.
        seeds: Not used.

    Returns:
        The other columns, as lists.

    Raises:
        TypeError: The rows are of another group.
        ValueError: A row does not fit its array; names the column and the row.
    """
    if not isinstance(rows, RowRun):
        raise TypeError("load_rows loads groups that hydrax.huggingface.data_group has made")
    data = rows.data
    wanted = data.table_rows(rows.positions)
    for filler in data.fillers:
        filler.fill(wanted, rows.positions, arrays)
    additional = {side.name: side.read(wanted) for side in data.side_data}
    data.reads.note(len(rows), is_random=not isinstance(wanted, range))
    return additional


load_rows.is_batched = True  # type: ignore[attr-defined]


@overload
def data_group(
    dataset: datasets.Dataset,
    batch_size: int,
    *,
    columns: Iterable[str] | None = ...,
    image_size: tuple[int, int] | None = ...,
    image_mode: str = ...,
    resize: bool = ...,
    pad_to: int | Mapping[str, int] | None = ...,
    pad_value: float | Mapping[str, float] = ...,
    truncate: bool = ...,
    nulls: Mapping[str, Any] | None = ...,
    **options: Any,
) -> DataGroup[dict[str, Any]]: ...
@overload
def data_group(  # type: ignore[overload-cannot-match, unused-ignore]  # datasets has no types
    dataset: datasets.DatasetDict,
    batch_size: int,
    *,
    columns: Iterable[str] | None = ...,
    image_size: tuple[int, int] | None = ...,
    image_mode: str = ...,
    resize: bool = ...,
    pad_to: int | Mapping[str, int] | None = ...,
    pad_value: float | Mapping[str, float] = ...,
    truncate: bool = ...,
    nulls: Mapping[str, Any] | None = ...,
    **options: Any,
) -> dict[str, DataGroup[dict[str, Any]]]: ...
def data_group(
    dataset: datasets.Dataset | datasets.DatasetDict,
    batch_size: int,
    *,
    columns: Iterable[str] | None = None,
    image_size: tuple[int, int] | None = None,
    image_mode: str = "RGB",
    resize: bool = False,
    pad_to: int | Mapping[str, int] | None = None,
    pad_value: float | Mapping[str, float] = 0,
    truncate: bool = False,
    nulls: Mapping[str, Any] | None = None,
    **options: Any,
) -> DataGroup[dict[str, Any]] | dict[str, DataGroup[dict[str, Any]]]:
    """The rows of a data set as a DataGroup for :func:`load_rows`.

    Which columns are arrays, and of what shape and dtype, follows from the data set's features and
    the arguments, never from the rows:

    - Numbers, bools and class labels are arrays of shape ``()``; lists of a fixed length and
      ``Array2D`` to ``Array5D`` have their shape. They keep their dtype, except that JAX gets
      64-bit types as 32-bit ones unless it has ``jax_enable_x64``; a value that does not fit is
      an error.
    - Lists of any length with ``pad_to`` are arrays of that length, followed by ``pad_value``;
      ``name_length`` has the number of elements, int32.
    - Images with ``image_size`` are uint8 of shape ``(height, width, channels)``.
    - Sounds with ``pad_to`` are float32 of that many samples, with ``name_length`` and
      ``name_sampling_rate``, int32.
    - Dicts are taken apart: the field ``b`` of a column ``a`` is a column ``a.b``.
    - All else arrives in ``batch.additional`` under the column's name, as Python objects: text,
      bytes, dates, times, durations and decimals; lists of numbers as NumPy arrays if none of
      the column's elements is null; images and sounds decoded to NumPy arrays.

    Args:
        dataset: The data set, or several in a ``DatasetDict``.
        batch_size: Rows per batch.
        columns: The columns that are wanted; None takes all.
        image_size: ``(height, width)`` of all images.
        image_mode: ``"RGB"``, ``"RGBA"`` or ``"L"``: what images are converted to, with 3, 4 or 1
            channels. Colours become sRGB and the orientation is applied, as by
            :func:`hydrax.image.open_srgb`.
        resize: Whether images of another size are resized; otherwise they are an error.
        pad_to: Length of all padded columns, or of each by its name.
        pad_value: What follows the elements of a row, in all columns or in each by its name.
        truncate: Whether rows that are longer than ``pad_to`` are cut; otherwise they are an error.
        nulls: Column to what stands in for its nulls. Elsewhere a null is an error in integers and
            bools, and NaN in other numbers.
        **options: Of the :class:`hydrax.DataGroup`: seed, shuffling, remainder and so on.

    Returns:
        The group, or for a ``DatasetDict`` one for each split, by its name.

    Raises:
        TypeError: An argument is of the wrong kind, such as a streamed data set.
        ValueError: No rows, no column that can be an array, or an argument that names none.

    Example:
        >>> import datasets, hydrax
        >>> table = {"x": [[1.0, 2.0], [3.0, 4.0]], "text": ["a", "b"]}
        >>> features = datasets.Features(
        ...     x=datasets.Sequence(datasets.Value("float32"), length=2),
        ...     text=datasets.Value("string"),
        ... )
        >>> group = data_group(datasets.Dataset.from_dict(table, features=features), 2)
        >>> with hydrax.Dataloader(load_rows, group, end_at=("epoch", 1)) as batches:
        ...     for batch in batches:
        ...         print(batch.arrays["x"].sum(), batch.additional["text"])
        10.0 ['a', 'b']
    """
    if isinstance(dataset, datasets.DatasetDict):
        groups = {}
        for split, part in dataset.items():
            if len(part) == 0:
                raise ValueError(f"the split {split!r} has no rows; leave it out")
            try:
                groups[str(split)] = data_group(
                    part,
                    batch_size,
                    columns=columns,
                    image_size=image_size,
                    image_mode=image_mode,
                    resize=resize,
                    pad_to=pad_to,
                    pad_value=pad_value,
                    truncate=truncate,
                    nulls=nulls,
                    **options,
                )
            except Exception as error:
                error.add_note(f"This is about the split {split!r}.")
                raise
        return groups
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"dataset is {type(dataset).__name__}; expected a datasets.Dataset or DatasetDict"
            + (
                ", as batches are drawn by position; hydrax.huggingface.iter_batches takes streams"
                if isinstance(dataset, datasets.IterableDataset)
                else ""
            )
        )
    if len(dataset) == 0:
        raise ValueError("the data set has no rows")
    names = check_columns(columns, dataset.column_names)
    fill_options = {
        "image_size": _checked_size(image_size),
        "image_mode": image_mode,
        "resize": bool(resize),
        "pad_to": pad_to,
        "pad_value": pad_value,
        "truncate": bool(truncate),
        "nulls": dict(nulls or {}),
    }
    if image_mode not in ("RGB", "RGBA", "L"):
        raise ValueError(f"image_mode is {image_mode!r}; expected 'RGB', 'RGBA' or 'L'")
    rows = DatasetRows(dataset, names, fill_options)
    loader_arrays: dict[str, Any] = {}
    for filler in rows.fillers:
        for name, spec in filler.arrays().items():
            if name in loader_arrays:
                raise ValueError(f"two columns would be the array {name!r}; rename one")
            loader_arrays[name] = spec
    padded = [filler.name for filler in rows.fillers if filler.is_padded]
    filled = [filler.name for filler in rows.fillers]
    for argument, values, known, what in (
        ("pad_to", pad_to, padded, "no column of lists or sounds"),
        ("pad_value", pad_value, padded, "no column that pad_to pads"),
        ("nulls", nulls, filled, f"none of the columns that become arrays: {', '.join(filled)}"),
    ):
        for column in values if isinstance(values, Mapping) else ():
            if column not in known:
                raise ValueError(f"{argument} has {column!r}, which is {what}")
    if not loader_arrays:
        raise ValueError(
            f"none of the columns {', '.join(names)} can be an array; give image_size for images, "
            "pad_to for lists and sounds"
        )
    return DataGroup(batch_size, rows, loader_arrays=loader_arrays, **options)


def _checked_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise TypeError(f"image_size is {size!r}; expected (height, width)")
    height, width = (check_int("a side of image_size", side, minimum=1) for side in size)
    return height, width
