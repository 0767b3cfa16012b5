"""Array specs: what a loader fills, what JAX gets, and where both lie in a slot.

Pure: no memory is touched here, and no JAX is imported.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = [
    "ALIGNMENT",
    "ArrayLayout",
    "ArraySpec",
    "Ragged",
    "lay_out",
    "length_name",
    "parse_specs",
    "placed_specs",
]

ALIGNMENT = 64
"""Start of each array in bytes: XLA aliases host memory only at multiples of 64."""

_MAX_DIMS = 63

# DLPack type codes (DLDataTypeCode in the specification) of the dtypes that XLA takes through
# DLPack. The others reach JAX by one copy.
_DLPACK_CODES = {
    "bool": 6,
    "int8": 0,
    "int16": 0,
    "int32": 0,
    "int64": 0,
    "uint8": 1,
    "uint16": 1,
    "uint32": 1,
    "uint64": 1,
    "float16": 2,
    "float32": 2,
    "float64": 2,
    "bfloat16": 4,
    "complex64": 5,
    "complex128": 5,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
# Dtypes that JAX has but XLA packs or cannot import: they are copied.
_COPIED_DTYPES = frozenset(
    name
    for name in (
        "int1",
        "int2",
        "int4",
        "uint1",
        "uint2",
        "uint4",
        "float4_e2m1fn",
    )
    if hasattr(ml_dtypes, name)
)


class ArrayLayout(NamedTuple):
    """Where one array lies in a batch.

    Attributes:
        shape: With the batch dimension in front.
        dtype: NumPy dtype that the loader fills.
        jax_dtype: Dtype in which JAX gets it.
        offset: Bytes from the start of the batch, a multiple of 64.
        element_count: Elements of the whole batch.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    jax_dtype: np.dtype[Any]
    offset: int
    element_count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch's array."""
        return self.element_count * self.dtype.itemsize


@dataclass(frozen=True)
class Ragged:
    """Spec of an array of which each item has its own length, in the place of the usual three.

    Batches get the array at its full length, with zeros behind each item's values, and beside it
    ``<name>_length``, an int32 array of shape ``(batch,)``. The loader function writes with
    ``arrays[name].write(values)``; or fills the beginning of ``arrays[name]`` itself and sets
    ``arrays["<name>_length"][...]``. Where loader functions are batched, ``write`` takes a
    sequence with the values of each item. An item that says no length is an error.

    Args:
        max_shape: Shape of the longest item, whose first dimension is the one that varies.
        dtype: NumPy dtype that the loader function fills.
        jax_dtype: Dtype in which JAX gets it; None is the same.
        truncate: Whether ``write`` cuts off what is too long. Otherwise that is a
            :class:`~hydrax.errors.RaggedLengthError`.

    Example:
        >>> import numpy as np
        >>> from hydrax import DataGroup, Dataloader
        >>> def load(word, arrays, seed):
        ...     arrays["letters"].write(np.frombuffer(word, np.uint8))
        >>> spec = {"letters": Ragged((4,), np.uint8)}
        >>> group = DataGroup(2, [b"to", b"be", b"or", b"not"], loader_arrays=spec)
        >>> with Dataloader(load, group, start_at=(0, 1), end_at=("epoch", 1)) as dataloader:
        ...     batch = next(dataloader).copy()
        >>> batch.arrays["letters"].tolist()
        [[111, 114, 0, 0], [110, 111, 116, 0]]
        >>> batch.arrays["letters_length"].tolist()
        [2, 3]
    """

    max_shape: tuple[int, ...]
    dtype: Any
    jax_dtype: Any = None
    truncate: bool = False


def length_name(name: str) -> str:
    """Name of the array with the lengths of a ragged one."""
    return f"{name}_length"


@dataclass(frozen=True)
class ArraySpec:
    """One named array of an item.

    Attributes:
        name: Key in the loader's and the batch's mapping.
        shape: Without the batch dimension; ``()`` is a scalar per item.
        dtype: NumPy dtype that the loader fills.
        jax_dtype: Dtype in which JAX gets it.
        ragged: Whether the first dimension is that of the longest item; the length of each is in
            the array that follows.
        truncate: Whether a ragged item that is too long is cut off.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    jax_dtype: np.dtype[Any]
    ragged: bool = False
    truncate: bool = False


def dlpack_code(dtype: np.dtype[Any]) -> int | None:
    """DLPack type code of a dtype, or None where XLA cannot take it through DLPack."""
    return _DLPACK_CODES.get(dtype.name)


def _parse_dtype(argument: str, value: Any) -> np.dtype[Any]:
    if value is None:
        raise TypeError(f"{argument} is None; give a dtype such as numpy.float32")
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except TypeError as error:
        raise TypeError(f"{argument} is {value!r}, which is no dtype") from error
    if dtype.name in _DLPACK_CODES or dtype.name in _COPIED_DTYPES:
        if not dtype.isnative:
            raise TypeError(
                f"{argument} is {dtype.str!r}, in the byte order of other machines; "
                f"use {dtype.newbyteorder('=').str!r} and let the loader convert"
            )
        return dtype
    raise TypeError(
        f"{argument} is {dtype}, which cannot be an array of JAX; return such data from the "
        "loader function as additional results instead"
    )


def _parse_shape(argument: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Set, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{argument} is {value!r}; expected a tuple of ints, () for a scalar")
    dims = []
    for dim in value:
        try:
            if isinstance(dim, (bool, np.bool_)):
                raise TypeError
            dims.append(operator.index(dim))
        except TypeError:
            raise TypeError(f"{argument} has the dimension {dim!r}; expected an int") from None
    if any(dim < 0 for dim in dims):
        raise ValueError(f"{argument} is {tuple(dims)}; dimensions cannot be negative")
    if len(dims) > _MAX_DIMS:
        raise ValueError(
            f"{argument} has {len(dims)} dimensions; it can have {_MAX_DIMS}, as NumPy takes one "
            "more, that of the batch"
        )
    return tuple(dims)


def parse_specs(argument: str, specs: Any) -> tuple[ArraySpec, ...]:
    """Check array specs as a user gives them, ``{name: (shape, numpy_dtype, jax_dtype)}``.

    In the place of the three there may be a :class:`Ragged`, which makes two arrays.

    Args:
        argument: Name of the argument, for messages.
        specs: What the user gave.

    Returns:
        The specs in the user's order.

    Raises:
        TypeError: Not a mapping, a name that is no string, or a shape or dtype of the wrong kind.
        ValueError: No arrays, a negative dimension, or a conversion that loses an imaginary part.
    """
    if not isinstance(specs, Mapping):
        raise TypeError(
            f"{argument} is {type(specs).__name__}; expected "
            "{'name': (shape, numpy_dtype, jax_dtype)}"
        )
    if not specs:
        raise ValueError(f"{argument} is empty; name at least one array")
    parsed = []
    for name, spec in specs.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument} has the array name {name!r}; expected a string")
        where = f"{argument}[{name!r}]"
        ragged = truncate = False
        if isinstance(spec, Ragged):
            ragged, truncate = True, bool(spec.truncate)
            jax_dtype = spec.dtype if spec.jax_dtype is None else spec.jax_dtype
            spec = (spec.max_shape, spec.dtype, jax_dtype)
        if not isinstance(spec, (tuple, list)) or len(spec) != 3:
            raise TypeError(
                f"{where} is {spec!r}; expected (shape, numpy_dtype, jax_dtype) or a Ragged"
            )
        shape = _parse_shape(f"the shape of {where}", spec[0])
        dtype = _parse_dtype(f"the numpy_dtype of {where}", spec[1])
        jax_dtype = _parse_dtype(f"the jax_dtype of {where}", spec[2])
        if dtype.kind == "c" and jax_dtype.kind != "c":
            raise ValueError(
                f"{where} would convert {dtype} to {jax_dtype} and lose the imaginary part; "
                "use a complex jax_dtype, or two arrays"
            )
        parsed.append(ArraySpec(name, shape, dtype, jax_dtype, ragged, truncate))
        if ragged:
            if not shape:
                raise ValueError(f"{where} has the max_shape (); a scalar has no length to vary")
            if length_name(name) in specs:
                raise ValueError(
                    f"{argument}[{length_name(name)!r}] is the name for the lengths of the ragged "
                    f"array {name!r}; choose another one"
                )
            int32 = np.dtype(np.int32)
            parsed.append(ArraySpec(length_name(name), (), int32, int32))
    return tuple(parsed)


def placed_specs(
    specs: Iterable[ArraySpec], canonical: Mapping[np.dtype[Any], np.dtype[Any]]
) -> tuple[ArraySpec, ...]:
    """Specs of what JAX gets: every array in its JAX dtype.

    Args:
        specs: Specs of what the loader fills.
        canonical: JAX's own replacement of a dtype, for those that it replaces; with 64-bit types
            switched off that is ``{float64: float32, ...}``.
    """
    return tuple(
        ArraySpec(spec.name, spec.shape, placed, placed)
        for spec in specs
        for placed in [canonical.get(spec.jax_dtype, spec.jax_dtype)]
    )


def lay_out(specs: Iterable[ArraySpec], batch_size: int) -> tuple[Mapping[str, ArrayLayout], int]:
    """Place the arrays of one batch behind each other.

    Args:
        specs: The arrays of an item, in order.
        batch_size: Items per batch, at least 1.

    Returns:
        Array name to :class:`ArrayLayout` (read-only), and the bytes of the whole batch.

    Source:
        XLA aliases host buffers at 64-byte multiples only; ``tests/test_zero_copy.py`` pins it.

    Example:
        >>> specs = parse_specs("arrays", {"x": ((3,), "uint8", "uint8"), "y": ((), "f4", "f4")})
        >>> layouts, nbytes = lay_out(specs, 2)
        >>> layouts["y"].offset, layouts["y"].shape, nbytes
        (64, (2,), 72)
    """
    layouts = {}
    end = 0
    for spec in specs:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        shape = (batch_size, *spec.shape)
        count = int(np.prod(shape, dtype=object))
        layouts[spec.name] = ArrayLayout(shape, spec.dtype, spec.jax_dtype, offset, count)
        end = offset + layouts[spec.name].nbytes
    return MappingProxyType(layouts), end
