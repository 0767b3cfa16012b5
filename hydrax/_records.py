"""What the workers left with a batch: additional results, or why it has failed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hydrax import _core
from hydrax._datagroup import DataGroup
from hydrax._debug import Checksums, first_change
from hydrax._failures import STARTING_UP, LoadFailure, RunReport, describe_failure
from hydrax._item_loader import ItemLoader
from hydrax._memory import available_nbytes, format_nbytes
from hydrax._schedule import PlannedBatch
from hydrax.errors import ArenaMemoryError, ArrayChangedError, LoaderError

__all__ = [
    "BatchFailure",
    "BatchRecords",
    "describe_batch",
    "describe_item",
    "failure_of_all",
    "failure_of_change",
    "read_records",
]

Record = tuple[int, int, bytes]


class BatchRecords(NamedTuple):
    """What the workers left with a batch.

    Attributes:
        additional: Key to one value per item.
        skipped: Position in the batch to the error, in order, of each item that could not be
            loaded and was left out; without those that only pad the batch.
        checksums: Position to the checksums of what was loaded; only in debug mode.
    """

    additional: dict[str, list[Any]]
    skipped: dict[int, LoaderError]
    checksums: Checksums


class BatchFailure(NamedTuple):
    """A batch that has failed.

    It carries the error, which is not raised here, so that no traceback of it holds what the
    caller has yet to give back.

    Attributes:
        error: What to raise.
        item_count: Items of the batch, without those that only pad it.
        is_of_item: Whether it is about an item, so that the run may go on without it. Otherwise
            it is about the whole run: no memory, a start-up that failed, a call of sys.exit().
    """

    error: Exception
    item_count: int
    is_of_item: bool


def read_records(
    planned: PlannedBatch,
    group: DataGroup[Any],
    records: Sequence[Record],
    *,
    is_batched: bool,
    inline: ItemLoader | None,
) -> BatchRecords | BatchFailure:
    """What the workers left with a batch, or why it has failed.

    Args:
        planned: The batch.
        group: Its group.
        records: ``(kind, first item, bytes)`` of each run that left something.
        is_batched: Whether the loader function takes many items.
        inline: The loader in this process, if the batch was loaded here: it has the exception.
    """
    failures = [record for record in records if record[0] != _core.RECORD_ADDITIONAL]
    if failures:
        return _failure(planned, group, failures, is_batched=is_batched, inline=inline)
    additional: dict[str, list[Any]] = {}
    skipped: dict[int, LoadFailure] = {}
    checksums: Checksums = {}
    for _, first, payload in records:
        packed: bytes | None = payload
        try:
            results = pickle.loads(payload)
            if isinstance(results, RunReport):
                skipped.update(results.skipped)
                checksums.update(results.checksums)
                packed = results.results
                results = {} if packed is None else pickle.loads(packed)
        except Exception as error:  # the classes of the results may do anything
            # It may be any of the run: their results were pickled together.
            failure = describe_failure(error, "", "reading the result of")
            failed = _loader_error(planned, group, first, failure, error, is_of_run=True)
            return BatchFailure(failed, planned.valid_count, is_of_item=True)
        for key, values in results.items():
            whole = additional.setdefault(key, [None] * planned.item_count)
            whole[first : first + len(values)] = values
    errors = {
        item: _loader_error(
            planned, group, item, failure, _unpickle_exception(failure.exception), is_of_run=False
        )
        for item, failure in sorted(skipped.items())
        if item < planned.valid_count
    }
    return BatchRecords(additional, errors, checksums)


def failure_of_change(
    planned: PlannedBatch,
    group: DataGroup[Any],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    records: BatchRecords,
) -> BatchFailure | None:
    """The failure of a batch of which an item is no longer what was loaded, if there is one."""
    found = first_change(arrays, records.checksums)
    if found is None:
        return None
    item, name = found
    cause = ArrayChangedError(
        f"array {name!r}: its memory was written to after the loader function had returned"
    )
    failure = describe_failure(cause, "", "checking")._replace(traceback_text="")
    error = _loader_error(planned, group, item, failure, cause, is_of_run=False)
    return BatchFailure(error, planned.valid_count, is_of_item=True)


def failure_of_all(planned: PlannedBatch, records: BatchRecords) -> BatchFailure:
    """The failure of a batch of which every item was skipped."""
    first = next(iter(records.skipped.values()))
    error = LoaderError(
        f"none of the {planned.valid_count} items of {describe_batch(planned)} could be loaded",
        descriptor=first.descriptor,
        index=first.index,
        group_number=first.group_number,
        epoch=first.epoch,
        seed=first.seed,
        traceback_text=first.traceback_text,
    )
    return BatchFailure(error, planned.valid_count, is_of_item=True)


def _failure(
    planned: PlannedBatch,
    group: DataGroup[Any],
    records: Sequence[Record],
    *,
    is_batched: bool,
    inline: ItemLoader | None,
) -> BatchFailure:
    """The error of a batch that has failed: of its first item that has."""
    kind, item, payload = min(records, key=lambda record: record[1])
    if kind == _core.RECORD_NO_MEMORY:
        no_memory = ArenaMemoryError(
            f"the memory of a batch ({format_nbytes(group.loader_size or 0)}) could not be "
            f"reserved; {format_nbytes(available_nbytes())} are available; "
            "lower depth or batch_size"
        )
        return BatchFailure(no_memory, planned.valid_count, is_of_item=False)
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
    if failure.stage == STARTING_UP:
        return BatchFailure(_startup_error(failure, original), planned.valid_count, False)
    is_of_run = is_batched and failure.stage == "loading"
    error = _loader_error(planned, group, item, failure, original, is_of_run=is_of_run)
    return BatchFailure(error, planned.valid_count, is_of_item=not failure.is_exit)


def _startup_error(failure: LoadFailure, original: BaseException | None) -> LoaderError:
    """The error of a worker that can load nothing, as its start-up has failed."""
    error = LoaderError(
        f"startup_func failed: {failure.kind}: {failure.message}\n"
        f"In loader process {failure.pid}:\n{failure.traceback_text.rstrip()}",
        traceback_text=failure.traceback_text,
    )
    error.__cause__ = original
    return error


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
    is_of_run: bool,
) -> LoaderError:
    index = planned.plan.indices()[item]
    seed = planned.plan.seeds()[item] if planned.kind == _core.TRAINING else None
    descriptor, text = _descriptor(group, index)
    what = "items from" if is_of_run else "item"
    message = (
        f"{failure.stage} {what} {index} ({text}) of {_kind(planned)} group "
        f"{planned.group_of_kind} failed in epoch {planned.epoch}, batch {planned.epoch_batch}, "
        f"seed {seed}: {failure.kind}: {failure.message}"
    )
    if failure.arrays:
        message += f"\nThe item's arrays, to be filled in place: {failure.arrays}"
    if failure.traceback_text:
        where = (
            "the main process" if failure.pid == os.getpid() else f"loader process {failure.pid}"
        )
        message += f"\nIn {where}:\n{failure.traceback_text.rstrip()}"
    error = LoaderError(
        message,
        descriptor=descriptor,
        index=index,
        group_number=planned.group_of_kind,
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
        f"item {index} ({text}) of {_kind(planned)} group {planned.group_of_kind}, "
        f"{_kind(planned)} batch {planned.batch_num}"
    )


def describe_batch(planned: PlannedBatch) -> str:
    """Text that tells a batch from all others."""
    run = "epoch" if planned.kind == _core.TRAINING else "run"
    return (
        f"{_kind(planned)} batch {planned.batch_num} ({run} {planned.epoch}, batch "
        f"{planned.epoch_batch})"
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
