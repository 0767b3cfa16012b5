"""Which item of a batched call an exception is about. Imports nothing."""

from __future__ import annotations

from typing import Any, TypeVar, cast

__all__ = ["about_item", "item_of"]

E = TypeVar("E", bound=BaseException)


def about_item(error: E, item: int) -> E:
    """The exception, which now says which item of a call it is about, counted from 0."""
    cast(Any, error).item = item
    return error


def item_of(error: BaseException, count: int) -> int:
    """Which of the items of a call an exception is about; 0 if it does not say.

    Example:
        >>> item_of(about_item(ValueError("too long"), 3), 8), item_of(ValueError("too long"), 8)
        (3, 0)
    """
    try:
        item = getattr(error, "item", 0)
    except Exception:  # an exception of a user may refuse every attribute
        return 0
    return item if type(item) is int and 0 <= item < count else 0
