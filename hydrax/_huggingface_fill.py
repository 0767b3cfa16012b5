"""How a column of a Hugging Face data set fills arrays, or becomes side data. Imports no JAX."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hydrax._arguments import check_int, check_number
from hydrax._huggingface_media import decode_audio, decoder_of
from hydrax._huggingface_memory import Column, Ints, IrregularError, Rows, numpy_dtype, storage_type
from hydrax._huggingface_values import Chunks, child_feature, stored_values
from hydrax._item_errors import about_item

__all__ = ["Filler", "SideData", "plan_column"]

Arrays = Mapping[str, np.ndarray[Any, Any]]
Spec = tuple[tuple[int, ...], np.dtype[Any], np.dtype[Any]]


def plan_column(
    name: str, chunked: pa.ChunkedArray, feature: Any, options: Mapping[str, Any]
) -> list[Filler | SideData]:
    """What becomes of a column; several things for one of dicts."""
    kind = type(feature).__name__
    pad_to = _option(options["pad_to"], name)
    decode = decoder_of(feature, name)
    if decode is not None:
        if kind == "Image" and options["image_size"] is not None:
            return [ImageFiller(name, chunked, options)]
        if kind == "Audio" and pad_to is not None:
            return [AudioFiller(name, chunked, feature, pad_to, options)]
        return [SideData(name, chunked, decode)]
    if pa.types.is_struct(chunked.type):
        return [
            plan
            for number, field in enumerate(chunked.type)
            for plan in plan_column(
                f"{name}.{field.name}",
                _field(chunked, number),
                child_feature(feature, field.name),
                options,
            )
        ]
    shape, dtype = _declared(chunked.type)
    if dtype is None:
        return [SideData(name, chunked, None)]
    if None not in shape:
        return [FixedFiller(name, chunked, shape, dtype, options)]
    if pad_to is not None:
        if None in shape[1:]:
            raise ValueError(
                f"column {name!r} has lists of any length in lists, which cannot be padded; leave "
                "it out of pad_to"
            )
        return [PaddedFiller(name, chunked, (pad_to, *shape[1:]), dtype, options)]
    return [SideData(name, chunked, None)]


def _field(chunked: pa.ChunkedArray, number: int) -> pa.ChunkedArray:
    """One field of a column of dicts; a null dict has null fields."""
    parts = [chunk.flatten()[number] for chunk in chunked.chunks]
    return pa.chunked_array(parts, chunked.type.field(number).type)


def _declared(kind: pa.DataType) -> tuple[tuple[int | None, ...], np.dtype[Any] | None]:
    """Shape of a row, with None for a dimension of any length, and dtype; no dtype if no array."""
    if isinstance(kind, pa.BaseExtensionType):
        shape = tuple(getattr(kind, "shape", ()))
        leaf = kind.storage_type
        for _ in shape:
            leaf = leaf.value_type
        return shape, numpy_dtype(leaf)
    if pa.types.is_fixed_size_list(kind):
        inner, dtype = _declared(kind.value_type)
        return (kind.list_size, *inner), dtype
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner, dtype = _declared(kind.value_type)
        return (None, *inner), dtype
    return (), numpy_dtype(kind)


def _option(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else value


class SideData:
    """A column that arrives in ``batch.additional``.

    Args:
        name: Of the column.
        chunked: The column.
        decode: What makes an array of a value, or None.
    """

    def __init__(self, name: str, chunked: pa.ChunkedArray, decode: Any) -> None:
        self.name = name
        self._chunks = Chunks(chunked)
        self._decode = decode
        leaf = storage_type(chunked.type)
        depth = 0
        while hasattr(leaf, "value_type"):
            leaf = storage_type(leaf.value_type)
            depth += 1
        self._is_numbers = depth == 1 and numpy_dtype(leaf) is not None
        if self._is_numbers:
            self._is_numbers = not any(array.values.null_count for array in self._chunks.arrays)

    def read(self, rows: range | Ints) -> list[Any]:
        """One value for each row."""
        array = self._chunks.take(rows)
        if self._is_numbers:
            return [
                None if row is None else row.values.to_numpy(zero_copy_only=False) for row in array
            ]
        values = stored_values(array)
        if self._decode is not None:
            return [None if value is None else self._decode(value) for value in values]
        return values


class Filler:
    """A column that fills arrays.

    Args:
        name: Of the column.
        chunked: The column.
        dtype: Of what it fills.
        options: What the user has chosen.

    Attributes:
        is_padded: Whether its rows are padded to one length.
    """

    is_padded: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        chunked: pa.ChunkedArray,
        dtype: np.dtype[Any],
        options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self._chunks = Chunks(chunked)
        self._dtype = dtype
        fill = options["nulls"].get(name)
        self._fill_null = None if fill is None else check_number(f"nulls[{name!r}]", fill, dtype)

    def _pad_value(self, options: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        value = _option(options["pad_value"], self.name)
        where = f"pad_value of column {self.name!r}"
        return check_number(where, 0 if value is None else value, self._dtype)

    def arrays(self) -> dict[str, Spec]:
        """Array name to shape, dtype and JAX dtype."""
        raise NotImplementedError

    def fill(self, rows: range | Ints, positions: Ints, arrays: Arrays) -> None:
        """Write rows to the beginning of the arrays.

        Args:
            rows: Rows of the table.
            positions: The same in the data set, for messages.
            arrays: By name.

        Raises:
            ValueError: A row does not fit; names it.
        """
        raise NotImplementedError

    def _refuse(self, positions: Ints, row: int, text: str) -> ValueError:
        """The error for one of the rows that are to be written."""
        error = ValueError(f"column {self.name!r}, row {positions[row]}: {text}")
        return about_item(error, row)

    def _null(self, positions: Ints, row: int) -> ValueError:
        return self._refuse(positions, row, f"it is null; give nulls={{{self.name!r}: value}}")


class FixedFiller(Filler):
    """Numbers, or arrays of numbers of one shape."""

    def __init__(
        self,
        name: str,
        chunked: pa.ChunkedArray,
        shape: tuple[int | None, ...],
        dtype: np.dtype[Any],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(name, chunked, dtype, options)
        self._shape: tuple[int, ...] = tuple(size or 0 for size in shape)
        self._column = Column(self._chunks.arrays)
        if self._fill_null is None and dtype.kind == "f":
            self._fill_null = np.asarray(np.nan, dtype)

    def arrays(self) -> dict[str, Spec]:
        return {self.name: (self._shape, self._dtype, self._dtype)}

    def fill(self, rows: range | Ints, positions: Ints, arrays: Arrays) -> None:
        target = arrays[self.name]
        start = 0
        for where in self._chunks.locate(rows):
            try:
                self._write(where, target, positions, start)
            except IrregularError:
                self._fill_singly(where, target, positions, start)
            start += where.total

    def _write(
        self, where: Rows, target: np.ndarray[Any, Any], positions: Ints, start: int
    ) -> None:
        """Write rows of one shape, from the row start of the target on."""
        values, valid = self._column.read(where)
        part = target[start : start + where.total]
        if values.shape != part.shape:
            raise IrregularError("not of the declared shape")
        if valid is not None:
            if self._fill_null is None:
                row = int(np.flatnonzero(~valid.reshape(len(valid), -1).all(axis=1))[0])
                raise self._null(positions, start + row)
            values = np.where(valid, values, self._fill_null)
        np.copyto(part, values)

    def _fill_singly(
        self, where: Rows, target: np.ndarray[Any, Any], positions: Ints, start: int
    ) -> None:
        """Rows of which some are null, or of a wrong shape."""
        present = self._column.valid(where)
        for row in range(where.total):
            if present is not None and not present[row]:
                if self._fill_null is None:
                    raise self._null(positions, start + row)
                target[start + row] = self._fill_null
                continue
            try:
                self._write(_one(where, row), target, positions, start + row)
            except IrregularError:
                raise self._refuse(
                    positions, start + row, f"it has not the declared shape {self._shape}"
                ) from None


def _one(where: Rows, row: int) -> Rows:
    """One of the rows."""
    stretch, step = divmod(row, where.length)
    return Rows(where.chunk[stretch : stretch + 1], where.start[stretch : stretch + 1] + step, 1)


class PaddedFiller(Filler):
    """Lists of any length, padded to one; their elements are numbers or have one shape."""

    is_padded: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        chunked: pa.ChunkedArray,
        shape: tuple[Any, ...],
        dtype: np.dtype[Any],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(name, chunked, dtype, options)
        self._capacity = check_int(f"pad_to of column {name!r}", shape[0], minimum=1)
        self._shape: tuple[int, ...] = (self._capacity, *shape[1:])
        self._column = Column(self._chunks.arrays)
        self._padding = self._pad_value(options)
        self._truncate = options["truncate"]

    def arrays(self) -> dict[str, Spec]:
        length = np.dtype(np.int32)
        return {
            self.name: (self._shape, self._dtype, self._dtype),
            f"{self.name}_length": ((), length, length),
        }

    def fill(self, rows: range | Ints, positions: Ints, arrays: Arrays) -> None:
        target = arrays[self.name]
        target[...] = self._padding
        counts = arrays[f"{self.name}_length"]
        row = 0
        for where in self._chunks.locate(rows):
            starts, lengths = self._column.lengths(where)
            chunks = np.repeat(where.chunk, where.length)
            present = self._column.valid(where)
            for index, (chunk, start, length) in enumerate(
                zip(chunks.tolist(), starts.ravel().tolist(), lengths.ravel().tolist(), strict=True)
            ):
                if length > self._capacity:
                    if not self._truncate:
                        raise self._refuse(
                            positions,
                            row,
                            f"it has {length} elements, and pad_to is {self._capacity}; raise "
                            "pad_to, or give truncate=True",
                        )
                    length = self._capacity
                if present is not None and not present[index] and self._fill_null is None:
                    raise self._null(positions, row)
                counts[row] = length
                if length:
                    place = Rows(np.array([chunk]), np.array([start]), length)
                    self._write(place, target, positions, row)
                row += 1

    def _write(self, place: Rows, target: np.ndarray[Any, Any], positions: Ints, row: int) -> None:
        """Write the elements of one row."""
        try:
            values, valid = self._column.child.read(place)
        except IrregularError:
            raise self._refuse(positions, row, "an element is null or has another shape") from None
        if values.shape[1:] != self._shape[1:]:
            raise self._refuse(positions, row, f"its elements have not the shape {self._shape[1:]}")
        if valid is not None:
            if self._fill_null is None and self._dtype.kind != "f":
                raise self._null(positions, row)
            fill = np.asarray(np.nan if self._fill_null is None else self._fill_null, self._dtype)
            values = np.where(valid, values, fill)
        target[row, : len(values)] = values


class ImageFiller(Filler):
    """Images of one size, in one mode."""

    def __init__(self, name: str, chunked: pa.ChunkedArray, options: Mapping[str, Any]) -> None:
        super().__init__(name, chunked, np.dtype(np.uint8), options)
        try:
            import hydrax.image
        except ImportError as error:
            raise ImportError(f"column {name!r} has images: {error}") from error
        self._open = hydrax.image.open_srgb
        self._write = hydrax.image.write_hwc
        self._size = options["image_size"]
        self._mode = options["image_mode"]
        self._resize = options["resize"]

    def arrays(self) -> dict[str, Spec]:
        channels = {"L": 1, "RGB": 3, "RGBA": 4}[self._mode]
        return {self.name: ((*self._size, channels), self._dtype, self._dtype)}

    def fill(self, rows: range | Ints, positions: Ints, arrays: Arrays) -> None:
        stored = self._chunks.take(rows)
        for row, value in enumerate(stored):
            target = arrays[self.name][row]
            if not value.is_valid:
                if self._fill_null is None:
                    raise self._null(positions, row)
                target[...] = self._fill_null
                continue
            content, path = value["bytes"], value["path"].as_py()
            source = io.BytesIO(content.as_buffer()) if content.is_valid else path
            try:
                image = self._open(source, mode=self._mode)
            except OSError as error:
                raise self._refuse(positions, row, str(error)) from error
            height, width = self._size
            if image.size != (width, height):
                if not self._resize:
                    raise self._refuse(
                        positions,
                        row,
                        f"the image has height {image.height} and width {image.width}, and "
                        f"image_size is {self._size}; give resize=True",
                    )
                image = image.resize((width, height))
            self._write(image, target)


class AudioFiller(Filler):
    """Sounds, padded to one number of samples."""

    is_padded: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        chunked: pa.ChunkedArray,
        feature: Any,
        capacity: int,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(name, chunked, np.dtype(np.float32), options)
        self._feature = feature
        self._capacity = check_int(f"pad_to of column {name!r}", capacity, minimum=1)
        self._padding = self._pad_value(options)
        self._truncate = options["truncate"]

    def arrays(self) -> dict[str, Spec]:
        integer = np.dtype(np.int32)
        return {
            self.name: ((self._capacity,), self._dtype, self._dtype),
            f"{self.name}_length": ((), integer, integer),
            f"{self.name}_sampling_rate": ((), integer, integer),
        }

    def fill(self, rows: range | Ints, positions: Ints, arrays: Arrays) -> None:
        for row, value in enumerate(self._chunks.take(rows).to_pylist()):
            if value is None:
                if self._fill_null is None:
                    raise self._null(positions, row)
                samples, rate = np.empty(0, np.float32), 0
            else:
                decoded = decode_audio(self._feature, value)
                samples, rate = decoded["array"], decoded["sampling_rate"]
            if len(samples) > self._capacity:
                if not self._truncate:
                    raise self._refuse(
                        positions,
                        row,
                        f"it has {len(samples)} samples, and pad_to is {self._capacity}; raise "
                        "pad_to, or give truncate=True",
                    )
                samples = samples[: self._capacity]
            target = arrays[self.name][row]
            target[: len(samples)] = samples
            target[len(samples) :] = self._padding
            arrays[f"{self.name}_length"][row] = len(samples)
            arrays[f"{self.name}_sampling_rate"][row] = rate
