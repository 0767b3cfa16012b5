"""Values from the dtype that a loader fills to the one that JAX gets, without silent damage."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hydrax.errors import ValueRangeError

__all__ = ["convert"]


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))


def _integer_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    info: Any = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)


def convert(name: str, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Copy source into target, whose dtype is another one.

    Fractions are rounded as NumPy does; only values that the target cannot hold are refused.

    Args:
        name: Name of the array, for messages.
        source: Loaded values of any shape; the first dimension counts items.
        target: Array of the same shape to write to.

    Raises:
        ValueRangeError: An integer is out of the target's range, or a finite number would become
            infinite or NaN. ``error.item`` is the position in the first dimension.

    Example:
        >>> target = np.empty(2, np.int32)
        >>> convert("x", np.array([1, 2**31]), target)
        Traceback (most recent call last):
        ...
        hydrax.errors.ValueRangeError: array 'x': 2147483648 does not fit int32; ...
    """
    source = _as_numbers(source)
    if _is_integer(target.dtype):
        bad = _outside(source, *_integer_range(target.dtype))
        if bad is None or not bad.any():
            np.copyto(target, source, casting="unsafe")
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(target, source, casting="unsafe")
        bad = None
        if target.dtype.kind != "b" and not np.can_cast(source.dtype, target.dtype, "safe"):
            bad = _changed_kind(source, _as_numbers(target), target.dtype)
    if bad is not None and bad.any():
        position = tuple(int(index) for index in np.argwhere(bad)[0])
        raise ValueRangeError(
            f"array {name!r}: {source[position]} does not fit {target.dtype.name}; "
            "choose a wider jax_dtype"
            + (", or set jax_enable_x64" if source.dtype.itemsize == 8 else ""),
            item=position[0],
        )


def _outside(source: np.ndarray[Any, Any], low: int, high: int) -> np.ndarray[Any, Any] | None:
    """Where source is outside [low, high] or no number, or None if it is nowhere so."""
    if source.size == 0:
        return None
    if source.dtype.kind == "b":
        source = source.view(np.uint8)
    if source.dtype.kind in "iu":
        if int(source.min()) >= low and int(source.max()) <= high:
            return None
        below = source < low if int(np.iinfo(source.dtype).min) < low else False
        above = source > high if int(np.iinfo(source.dtype).max) > high else False
        return np.asarray(below | above)
    # Fractions are cut off; in float64 low and high + 1 are exact, which high need not be.
    values = np.trunc(source.astype(np.float64))
    inside = (values >= low) & (values < high + 1)
    return np.asarray(~inside)


def _as_numbers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same values in a dtype that all of NumPy's functions know."""
    return values.astype(np.float64) if values.dtype.isbuiltin == 2 else values


def _changed_kind(
    before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], target: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Where a finite number, an infinity or NaN became something else, or hit the largest value."""
    bad = (np.isfinite(before) & ~np.isfinite(after)) | (np.isinf(before) & ~np.isinf(after))
    bad |= np.isnan(before) & ~np.isnan(after)
    if target.name.startswith("float4"):
        # These have no infinity: too large a number becomes the largest one.
        bad |= np.abs(before) > float(ml_dtypes.finfo(target).max)  # type: ignore[no-untyped-call]
    return np.asarray(bad)
