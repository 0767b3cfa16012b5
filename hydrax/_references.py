"""Finding what keeps batches alive."""

from __future__ import annotations

import gc
import sys

from hydrax._batch import Batch
from hydrax._flow import entered_arenas
from hydrax._holders import describe_holders

__all__ = ["debug_batch_references"]


def debug_batch_references() -> None:
    """Print what still refers to batches and their arrays.

    For the moment at which a Dataloader waits although its workers are done: every slot is held by
    an array of an earlier batch. It prints what ``next`` logs after waiting so for two seconds, and
    also tells of batches whose memory is not in use by a Dataloader any more.

    Example:
        >>> debug_batch_references()
        no batch memory is referred to
    """
    gc.collect()
    batches = [obj for obj in gc.get_objects() if isinstance(obj, Batch)]
    lines = describe_holders(entered_arenas(), batches).lines
    sys.stdout.write("\n".join(lines or ["no batch memory is referred to"]) + "\n")
