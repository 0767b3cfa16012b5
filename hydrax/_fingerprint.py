"""A number that tells data sets apart by a sample of their descriptors.

Pure. The same data give the same number in every process and version of Python.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hydrax import _core

__all__ = ["sample_fingerprint"]

_SAMPLES = 16


def sample_fingerprint(data: Sequence[Any]) -> str | None:
    """16 hexadecimal digits from up to 17 descriptors, or None where they tell nothing.

    They tell nothing if their text would not be the same in another process, as that of a plain
    object is not.

    Example:
        >>> sample_fingerprint(["a.jpg", "b.jpg"]) == sample_fingerprint(("a.jpg", "b.jpg"))
        True
        >>> sample_fingerprint([object()]) is None
        True
    """
    count = len(data)
    digest = count
    try:
        for index in sorted({count * part // _SAMPLES for part in range(_SAMPLES)} | {count - 1}):
            digest = _core.checksum(_plain(data[index]).encode("utf-8", "surrogatepass"), digest)
    except Exception:  # of any kind that a data set may raise
        return None
    return f"{digest:016x}"


def _plain(value: Any) -> str:
    """A text that says all about a value; TypeError for what there is none for."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic) and value.dtype.kind != "O":
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_plain, value)) + ")"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_plain(key)}:{_plain(value[key])}" for key in value) + "}"
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return f"{value.dtype.str}{value.shape}{_core.checksum(value.tobytes(), 0):016x}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(
            {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        )
    kind = type(value)
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "Series":
        return _plain(value.to_dict())
    raise TypeError
