"""What the workers left with a batch: additional results, or why it has failed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hydrax import _core
from hydrax._datagroup import DataGroup
from hydrax._failures import LoadFailure, describe_failure
from hydrax._item_loader import ItemLoader
from hydrax._memory import available_nbytes, format_nbytes
from hydrax._schedule import PlannedBatch
from hydrax.errors import ArenaMemoryError, LoaderError

__all__ = ["describe_item", "read_records"]

Record = tuple[int, int, bytes]


def read_records(
    planned: PlannedBatch,
    group: DataGroup[Any],
    records: Sequence[Record],
    *,
    is_batched: bool,
    inline: ItemLoader | None,
) -> dict[str, list[Any]] | Exception:
    """The additional results of a batch, or the error of one that has failed.

    Args:
        planned: The batch.
        group: Its group.
        records: ``(kind, first item, bytes)`` of each run that left something.
        is_batched: Whether the loader function takes many items.
        inline: The loader in this process, if the batch was loaded here: it has the exception.

    Returns:
        Key to one value per item, or the error to raise. It is returned, so that no traceback of
        it holds what the caller has yet to give back.
    """
    failures = [record for record in records if record[0] != _core.RECORD_ADDITIONAL]
    if failures:
        return _failure(planned, group, failures, is_batched=is_batched, inline=inline)
    additional: dict[str, list[Any]] = {}
    for _, first, payload in records:
        try:
            results = pickle.loads(payload)
        except Exception as error:  # the classes of the results may do anything
            failure = describe_failure(error, "", "reading the result of")
            return _loader_error(planned, group, first, failure, error, is_batched=is_batched)
        for key, values in results.items():
            whole = additional.setdefault(key, [None] * planned.item_count)
            whole[first : first + len(values)] = values
    return additional


def _failure(
    planned: PlannedBatch,
    group: DataGroup[Any],
    records: Sequence[Record],
    *,
    is_batched: bool,
    inline: ItemLoader | None,
) -> Exception:
    """The error of a batch that has failed: of its first item that has."""
    kind, item, payload = min(records, key=lambda record: record[1])
    if kind == _core.RECORD_NO_MEMORY:
        return ArenaMemoryError(
            f"the memory of a batch ({format_nbytes(group.loader_size)}) could not be reserved; "
            f"{format_nbytes(available_nbytes())} are available; lower depth or batch_size"
        )
    if payload:
        failure = LoadFailure(*pickle.loads(payload))
    else:
        failure = LoadFailure(
            kind="an exception",
            message="it could not be described: no memory, or the loader closed Hydrax's files",
            traceback_text="",
            exception=None,
            arrays="",
            stage="loading",
            pid=0,
        )
    if inline is not None:
        original, inline.last_error = inline.last_error, None
        # Its own traceback is at hand.
        failure = failure._replace(traceback_text="")
    else:
        original = _unpickle_exception(failure.exception)
    return _loader_error(planned, group, item, failure, original, is_batched=is_batched)


def _unpickle_exception(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        original = pickle.loads(pickled)
    except KeyboardInterrupt:
        raise
    except BaseException:  # its class may do anything when it is rebuilt; the text says it all
        return None
    return original if isinstance(original, BaseException) else None


def _loader_error(
    planned: PlannedBatch,
    group: DataGroup[Any],
    item: int,
    failure: LoadFailure,
    original: BaseException | None,
    *,
    is_batched: bool,
) -> LoaderError:
    index = planned.plan.indices()[item]
    seed = planned.plan.seeds()[item] if planned.kind == _core.TRAINING else None
    descriptor, text = _descriptor(group, index)
    what = "items from" if is_batched and failure.stage == "loading" else "item"
    message = (
        f"{failure.stage} {what} {index} ({text}) of {_kind(planned)} group "
        f"{planned.group_index} failed in epoch {planned.epoch}, batch {planned.epoch_batch}, "
        f"seed {seed}: {failure.kind}: {failure.message}"
    )
    if failure.arrays:
        message += f"\nThe item's arrays: {failure.arrays}"
    if failure.traceback_text:
        message += f"\nIn loader process {failure.pid}:\n{failure.traceback_text.rstrip()}"
    error = LoaderError(
        message,
        descriptor=descriptor,
        index=index,
        group_index=planned.group_index,
        epoch=planned.epoch,
        seed=seed,
        traceback_text=failure.traceback_text,
    )
    error.__cause__ = original
    return error


def describe_item(planned: PlannedBatch, group: DataGroup[Any], item: int) -> str:
    """Text that tells an item of a batch from all others."""
    index = planned.plan.indices()[item]
    _, text = _descriptor(group, index)
    return (
        f"item {index} ({text}) of {_kind(planned)} group {planned.group_index}, "
        f"{_kind(planned)} batch {planned.batch_num}"
    )


def _kind(planned: PlannedBatch) -> str:
    return "training" if planned.kind == _core.TRAINING else "validation"


def _descriptor(group: DataGroup[Any], index: int) -> tuple[Any, str]:
    """An item's descriptor and its text, whatever the data set does when it is asked."""
    try:
        descriptor = group.data[index]
    except Exception:
        return None, "its descriptor cannot be had"
    try:
        return descriptor, f"{descriptor!r:.80}"
    except Exception:
        return descriptor, "its descriptor cannot be shown"
