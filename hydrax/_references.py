"""Finding what keeps batches alive."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any, cast

from hydrax._batch import Batch
from hydrax._dataloader import entered_arenas

__all__ = ["debug_batch_references"]


def debug_batch_references() -> None:
    """Print what still refers to batches and their arrays.

    For the moment at which a Dataloader waits although its workers are done: every slot is held by
    an array of an earlier batch. Computations that JAX has not finished hold arrays too; those
    show no referrer here.

    Example:
        >>> debug_batch_references()
        no batch memory is referred to
    """
    gc.collect()
    lines: list[str] = []
    batches = list(filter(_is_batch, gc.get_objects()))
    ours = {id(batches), id(lines)}
    for batch in batches:
        lines.append(repr(batch))
        lines.extend(_describe_referrers(batch, ours))
    ours.update(id(batch) for batch in batches)
    ours.update(id(batch.arrays) for batch in batches)
    arrays = _arena_arrays()
    ours.add(id(arrays))
    for array in arrays:
        lines.append(f"array {array.dtype.name}{list(array.shape)}")
        lines.extend(_describe_referrers(array, ours))
    sys.stdout.write("\n".join(lines or ["no batch memory is referred to"]) + "\n")


def _is_batch(obj: Any) -> bool:
    return isinstance(obj, Batch)


def _arena_arrays() -> list[Any]:
    """All living jax.Arrays whose memory is an arena's."""
    ranges = [
        (arena.address, arena.address + memoryview(arena).nbytes) for arena in entered_arenas()
    ]
    if not ranges:
        return []
    import jax

    found = []
    for array in cast(Any, jax).live_arrays():
        try:
            address = array.unsafe_buffer_pointer()
        except Exception:  # sharded, deleted, or on a device without addresses
            continue
        if any(start <= address < stop for start, stop in ranges):
            found.append(array)
    return found


def _describe_referrers(obj: Any, ignored: set[int]) -> list[str]:
    lines = []
    for referrer in gc.get_referrers(obj):
        if id(referrer) in ignored:
            continue
        if isinstance(referrer, types.FrameType) and referrer.f_code.co_filename == __file__:
            continue
        if isinstance(referrer, types.FrameType):
            names = [name for name, value in referrer.f_locals.items() if value is obj]
            place = f"{referrer.f_code.co_filename}:{referrer.f_lineno}"
            lines.append(
                f"    held by {', '.join(names) or 'a temporary'} in "
                f"{referrer.f_code.co_name} ({place})"
            )
        elif isinstance(referrer, dict):
            keys = [repr(key) for key, value in referrer.items() if value is obj]
            lines.append(f"    held by a dict under {', '.join(keys)}")
        else:
            lines.append(f"    held by a {type(referrer).__name__}")
    return lines
