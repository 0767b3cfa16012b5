"""Items of unequal length: writing them, zeros behind them, and masks from their lengths.

Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from hydrax._arguments import check_int
from hydrax._convert import convert
from hydrax._item_errors import about_item
from hydrax._specs import length_name
from hydrax.errors import RaggedLengthError

if TYPE_CHECKING:
    import jax

__all__ = ["RaggedArray", "length_mask", "with_lengths"]

_NOT_SET = -1


class RaggedArray(np.ndarray[Any, np.dtype[Any]]):
    """The array of a ragged item, as a loader function gets it; a batched one: of several items."""

    # What write() needs to know: name, lengths, whether to cut off. Views of it have none.
    _spec: tuple[str, npt.NDArray[np.int32], bool] | None = None

    def write(self, values: Any) -> None:
        """Write an item's values to the beginning, and set its length.

        Args:
            values: Array-like of shape ``(length, *shape[1:])``; a batched loader function gives a
                sequence of those, one per item.

        Raises:
            RaggedLengthError: An item is longer than the array, and is not to be truncated.
            ValueError: The other dimensions differ, or there are not as many items.
            ValueRangeError: A value does not fit the array's dtype.
        """
        if self._spec is None:
            raise TypeError("only arrays that a loader function is given can be written so")
        name, lengths, truncate = self._spec
        plain = self.view(np.ndarray)
        if lengths.ndim == 0:
            lengths[...] = _write_item(name, plain, values, truncate, 0)
            return
        if len(values) != len(plain):
            raise ValueError(
                f"array {name!r} was given {len(values)} items to write; expected {len(plain)}"
            )
        for item, item_values in enumerate(values):
            try:
                lengths[item] = _write_item(name, plain[item], item_values, truncate, item)
            except ValueError as error:
                raise about_item(error, item)  # noqa: B904  # it is the same one


def _write_item(name: str, array: npt.NDArray[Any], values: Any, truncate: bool, item: int) -> int:
    """Write one item's values; returns its length."""
    source = np.asarray(values)
    if source.ndim == 1 and source.size == 0:
        return 0  # an empty list says nothing of the other dimensions
    if source.ndim != array.ndim or source.shape[1:] != array.shape[1:]:
        wanted = ", ".join(["length", *map(str, array.shape[1:])])
        raise ValueError(
            f"array {name!r} was given values of shape {source.shape}; expected ({wanted})"
        )
    length = len(source)
    if length > len(array):
        if not truncate:
            raise RaggedLengthError(
                f"array {name!r}: the item has length {length}, there is room for {len(array)}; "
                "raise max_shape, or truncate=True cuts items off",
                item=item,
            )
        length = len(array)
        source = source[:length]
    if source.dtype == array.dtype:
        array[:length] = source
    else:
        convert(name, source, array[:length])
    return length


def with_lengths(
    loader: Callable[..., Any], ragged: Mapping[str, bool], *, is_batched: bool
) -> Callable[..., Any]:
    """The loader function, for groups with ragged arrays.

    Args:
        loader: The user's loader function.
        ragged: Name of each ragged array to whether items that are too long are cut off.
        is_batched: Whether the arrays have a leading dimension for the items.
    """

    def load(descriptor: Any, arrays: Mapping[str, npt.NDArray[Any]], seed: Any) -> Any:
        given: dict[str, Any] = dict(arrays)
        for name, truncate in ragged.items():
            lengths = arrays[length_name(name)]
            lengths[...] = _NOT_SET  # rather than the length of an earlier item
            given[name] = arrays[name].view(RaggedArray)
            given[name]._spec = name, lengths, truncate
        result = loader(descriptor, MappingProxyType(given), seed)
        for name in ragged:
            lengths = arrays[length_name(name)]
            if is_batched:
                for item, length in enumerate(lengths.tolist()):
                    _clear_rest(name, arrays[name][item], length, item)
            else:
                _clear_rest(name, arrays[name], int(lengths), 0)
        return result

    return load


def _clear_rest(name: str, array: npt.NDArray[Any], length: int, item: int) -> None:
    """Zeros behind the values of an item: what is there belongs to an earlier batch."""
    if not 0 <= length <= len(array):
        if length == _NOT_SET:
            problem = f"the loader function set no length; arrays[{name!r}].write(values) does"
        else:
            problem = f"{length_name(name)} is {length}; there is room for {len(array)}"
        raise RaggedLengthError(f"array {name!r}: {problem}", item=item)
    array[length:] = 0


@overload
def length_mask(lengths: npt.NDArray[Any], max_length: int) -> npt.NDArray[np.bool_]: ...
@overload
def length_mask(lengths: jax.Array, max_length: int) -> jax.Array: ...
@overload
def length_mask(lengths: Sequence[int], max_length: int) -> npt.NDArray[np.bool_]: ...
def length_mask(lengths: Any, max_length: int) -> Any:
    """True where an item has values, False behind its end.

    Args:
        lengths: Integers of shape ``(...)``, such as ``batch.arrays["tokens_length"]``. With a
            jax.Array the result is one too, also under ``jit``.
        max_length: Size of the dimension that is masked; not traced.

    Returns:
        Bool array of shape ``(..., max_length)``.

    Raises:
        TypeError: The lengths or max_length are no integers.

    Example:
        >>> length_mask([2, 0, 3], 3)
        array([[ True,  True, False],
               [False, False, False],
               [ True,  True,  True]])
    """
    if not hasattr(lengths, "dtype"):
        lengths = np.asarray(lengths)
        if lengths.size == 0:
            lengths = lengths.astype(np.int32)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"lengths has dtype {lengths.dtype}; expected integers")
    if lengths.dtype.itemsize < 4:
        lengths = lengths.astype(np.int32)  # which holds every max_length
    size = check_int("max_length", max_length, minimum=0, maximum=2**31 - 1)
    return lengths[..., None] > np.arange(size, dtype=lengths.dtype)
