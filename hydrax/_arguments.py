"""Arguments of a Dataloader, checked at the door; every error names the argument."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = [
    "check_bool",
    "check_choice",
    "check_end",
    "check_int",
    "check_number",
    "check_start",
    "check_timeout",
]


def check_int(name: str, value: Any, *, minimum: int, maximum: int = 2**62) -> int:
    """Value as an int within [minimum, maximum], or an error that names the argument.

    Example:
        >>> check_int("depth", 3, minimum=1)
        3
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; expected an int")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an int") from None
    if number < minimum:
        raise ValueError(f"{name} is {number}; it must be at least {minimum}")
    if number > maximum:
        raise ValueError(f"{name} is {number}; it must be at most {maximum}")
    return number


def check_number(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Value, a number or an array of them, in a dtype that holds it; floats may lose digits.

    Example:
        >>> check_number("pad_value", 255, np.dtype(np.uint8))
        array(255, dtype=uint8)
    """
    given = np.asarray(value)
    if given.dtype.kind not in "biuf":
        raise TypeError(f"{name} is {value!r:.80}; expected a number")
    with np.errstate(over="ignore", invalid="ignore"):
        number = given.astype(dtype)
    fits = np.isfinite(number) == np.isfinite(given) if dtype.kind == "f" else number == given
    if not fits.all():
        raise ValueError(f"{name} is {value!r:.80}, which {dtype} cannot hold")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Value as a bool: one, or None, 0 or 1 in its place; "False" from a command line is none.

    Example:
        >>> check_bool("shuffle_first", "False")
        Traceback (most recent call last):
        TypeError: shuffle_first is 'False'; expected True or False
    """
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} is {value!r:.80}; expected True or False")


def check_choice(name: str, value: Any, choices: Sequence[str], *, otherwise: str = "") -> None:
    """Make sure that value is one of the words; otherwise says what else could be given.

    Example:
        >>> check_choice("remainder", "keep", ("drop", "pad"))
        Traceback (most recent call last):
        ValueError: remainder is 'keep'; expected one of drop, pad
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} is {value!r:.80}; expected one of {', '.join(choices)}{otherwise}"
        )


def check_path(name: str, value: Any) -> str:
    """Value, a string or a path, as a string.

    Example:
        >>> check_path("root", None)
        Traceback (most recent call last):
        TypeError: root is None; expected a string or a path
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is {value!r:.80}; expected a string or a path")
    return os.fsdecode(value)


def check_several(name: str, value: Any, expected: str) -> None:
    """Make sure that value can be iterated over and is no text; expected says what is to come.

    Example:
        >>> check_several("lengths", 3, "one integer for each item")
        Traceback (most recent call last):
        TypeError: lengths is 3; expected one integer for each item
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r:.80}; expected {expected}")


def check_start(start_at: Any) -> tuple[int, int]:
    """start_at as (epoch, batches), both at least 0; as a list if it comes from a file."""
    if not isinstance(start_at, (tuple, list)) or len(start_at) != 2:
        raise TypeError(f"start_at is {start_at!r}; expected (epoch, batches)")
    return (
        check_int("the epoch of start_at", start_at[0], minimum=0),
        check_int("the batches of start_at", start_at[1], minimum=0),
    )


def check_end(end_at: Any) -> tuple[str, int] | None:
    """end_at as (mode, number), or None; as a list if it comes from a file."""
    if end_at is None:
        return None
    if not isinstance(end_at, (tuple, list)) or len(end_at) != 2:
        raise TypeError(f"end_at is {end_at!r}; expected ('epoch' or 'batch', number)")
    if not isinstance(end_at[0], str) or end_at[0] not in ("epoch", "batch"):
        raise ValueError(f"end_at begins with {end_at[0]!r}; expected 'epoch' or 'batch'")
    return end_at[0], check_int("the number of end_at", end_at[1], minimum=0)


def check_timeout(timeout_sec: Any) -> float | None:
    """timeout_sec in seconds; None waits for ever."""
    if isinstance(timeout_sec, bool) or not isinstance(timeout_sec, numbers.Real):
        raise TypeError(f"timeout_sec is {timeout_sec!r}; expected a number of seconds")
    seconds = float(timeout_sec)
    if seconds != seconds:
        raise ValueError("timeout_sec is NaN; expected a number of seconds")
    return seconds if 0 < seconds < 1e9 else None
