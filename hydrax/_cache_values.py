"""Additional results as bytes that hold no code: JSON, and behind it bytes and NumPy arrays.

Pure. What has another type is refused by name; what comes back equals what was given.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["decode_additional", "encode_additional"]

_HEAD = struct.Struct("<Q")  # bytes of the JSON text
_TAG = "$"  # key of an object that stands for something that JSON has not
# What bytes that are not those of encode_additional() make of decoding them.
_ERRORS = (
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_KINDS = "biufcSUMm"  # kinds of dtypes that bytes say everything about


class _Encoder:
    """Turns values into what JSON has; collects the bytes of the others."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._end = 0

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(entry) for entry in value]
        if kind is dict:
            return self._dict(value)
        if kind is tuple:
            return {_TAG: "tuple", "of": [self.encode(entry) for entry in value]}
        if kind is bytes:
            return {_TAG: "bytes", "at": self._keep(value), "nbytes": len(value)}
        if kind is np.ndarray:
            return self._array(value, "array")
        if isinstance(value, np.generic):
            return self._array(np.asarray(value), "scalar")
        raise TypeError(_name_of(kind))

    def _dict(self, value: dict[Any, Any]) -> Any:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"a dict with the key {key!r:.40}, which is no string")
        encoded = {key: self.encode(entry) for key, entry in value.items()}
        return {_TAG: "dict", "of": encoded} if _TAG in value else encoded

    def _array(self, value: np.ndarray[Any, Any], tag: str) -> Any:
        dtype = value.dtype
        if dtype.kind in _KINDS:
            name = dtype.str
        elif hasattr(ml_dtypes, dtype.name):
            name = dtype.name
        else:
            raise TypeError(f"a NumPy array of dtype {dtype}")
        return {_TAG: tag, "at": self._keep(value.tobytes()), "dtype": name, "shape": value.shape}

    def _keep(self, blob: bytes) -> int:
        start = self._end
        self.blobs.append(blob)
        self._end += len(blob)
        return start


def _name_of(kind: type[Any]) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def encode_additional(additional: Mapping[str, Sequence[Any]] | None) -> bytes:
    """Additional results as bytes; none as no bytes.

    Raises:
        TypeError: A value is none of what a cache holds; says which, and of which item.

    Example:
        >>> encode_additional({"when": [None, {1, 2}]})
        Traceback (most recent call last):
        ...
        TypeError: additional result 'when' of item 1 is or holds set; a cache holds ...
    """
    if not additional:
        return b""
    encoder = _Encoder()
    encoded: dict[str, list[Any]] = {}
    for key, values in additional.items():
        if type(key) is not str:
            raise TypeError(f"additional results have the key {key!r:.40}; a cache takes strings")
        entries = encoded[key] = []
        for item, value in enumerate(values):
            try:
                entries.append(encoder.encode(value))
            except (TypeError, RecursionError) as error:
                raise TypeError(
                    f"additional result {key!r} of item {item} is or holds {error}; a cache holds "
                    "what JSON has, tuples, bytes, and NumPy arrays and scalars without objects"
                ) from None
    text = json.dumps(encoded, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"".join([_HEAD.pack(len(text)), text, *encoder.blobs])


def decode_additional(data: bytes) -> dict[str, list[Any]] | None:
    """What :func:`encode_additional` was given.

    Raises:
        ValueError: The bytes are not what it returns.
    """
    if not data:
        return None
    try:
        (length,) = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        tree = json.loads(data[_HEAD.size : start].decode("utf-8", "surrogatepass"))
        decoded = {key: [_decode(entry, data, start) for entry in tree[key]] for key in tree}
    except _ERRORS as error:
        raise ValueError(f"additional results cannot be read: {error}") from error
    return decoded


def _decode(value: Any, data: bytes, start: int) -> Any:
    if isinstance(value, list):
        return [_decode(entry, data, start) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decode(entry, data, start) for key, entry in value.items()}
    if tag == "dict":
        return {key: _decode(entry, data, start) for key, entry in value["of"].items()}
    if tag == "tuple":
        return tuple(_decode(entry, data, start) for entry in value["of"])
    if tag == "bytes":
        return _blob(data, start + value["at"], value["nbytes"])
    if tag in ("array", "scalar"):
        return _decode_array(value, data, start, is_scalar=tag == "scalar")
    raise ValueError(f"there is no kind {tag!r}")


def _decode_array(value: dict[str, Any], data: bytes, start: int, *, is_scalar: bool) -> Any:
    dtype: np.dtype[Any] = np.dtype(value["dtype"])
    if dtype.kind not in _KINDS and not hasattr(ml_dtypes, dtype.name):
        raise ValueError(f"dtype {dtype}")
    shape = tuple(value["shape"])
    blob = _blob(data, start + value["at"], math.prod(shape) * dtype.itemsize)
    array = np.frombuffer(bytearray(blob), dtype, math.prod(shape)).reshape(shape)
    return array[()] if is_scalar else array


def _blob(data: bytes, start: int, nbytes: int) -> bytes:
    if start < 0 or nbytes < 0 or start + nbytes > len(data):
        raise ValueError("bytes outside of the file")
    return data[start : start + nbytes]
