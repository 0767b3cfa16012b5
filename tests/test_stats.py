import logging
import time

import numpy as np
import pytest

from hydrax import Batch, DataGroup, Dataloader, LoaderError

ARRAYS = {"x": ((), np.int32, np.int32)}


def load(number, arrays, seed):
    if number % 10 == 7:
        raise OSError(f"cannot read {number}")
    arrays["x"][...] = number


def group(items=40, size=4, **options):
    return DataGroup(size, range(items), loader_arrays=ARRAYS, **options)


def firsts(dataloader):
    return [int(batch.arrays["x"][0]) for batch in map(Batch.copy, dataloader)]


@pytest.mark.parametrize("loader_count", [0, 1, 3])
def test_a_dropped_batch_is_logged_with_its_cause_and_counted(loader_count, caplog):
    dataloader = Dataloader(
        load, group(), loader_count=loader_count, end_at=("epoch", 1), on_error="drop_batch"
    )
    with dataloader, caplog.at_level(logging.WARNING, "hydrax"):
        assert firsts(dataloader) == [0, 8, 12, 20, 28, 32]
        stats = dataloader.stats()
    assert (stats.batches_delivered, stats.items_delivered) == (6, 24)
    assert (stats.batches_dropped, stats.items_dropped) == (4, 16)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    for number, message in zip((7, 17, 27, 37), messages, strict=True):
        assert f"cannot read {number}" in message
        assert f"item {number} " in message


def test_the_counts_of_an_epoch_add_up_with_a_padded_last_batch():
    dataloader = Dataloader(
        load, group(items=39, remainder="pad"), end_at=("epoch", 2), on_error="drop_batch"
    )
    with dataloader:
        firsts(dataloader)
        stats = dataloader.stats()
    assert stats.items_delivered + stats.items_dropped == 2 * 39
    assert stats.batches_delivered + stats.batches_dropped == 2 * 10


def test_a_function_decides_about_each_error():
    seen = []

    def decide(error):
        seen.append(error.index)
        if error.index >= 17:
            raise error

    with Dataloader(load, group(), end_at=("epoch", 1), on_error=decide) as dataloader:
        assert int(next(dataloader).arrays["x"][0]) == 0
        assert int(next(dataloader).arrays["x"][0]) == 8
        assert int(next(dataloader).arrays["x"][0]) == 12
        with pytest.raises(LoaderError):
            next(dataloader)
    assert seen == [7, 17]


def test_kept_errors_of_dropped_batches_keep_no_slot():
    kept = []
    dataloader = Dataloader(
        load, group(items=400), depth=2, end_at=("epoch", 1), on_error=kept.append, timeout_sec=20
    )
    with dataloader:
        assert len(firsts(dataloader)) == 60
    assert len(kept) == 40


def test_an_unknown_on_error_is_refused():
    with pytest.raises(ValueError, match="on_error"):
        Dataloader(load, group(), on_error="skip")


def test_stats_name_a_slow_loader_as_the_cause_of_waiting():
    def slow(number, arrays, seed):
        time.sleep(0.02)
        arrays["x"][...] = number

    with Dataloader(slow, group(), loader_count=2, end_at=("epoch", 1)) as dataloader:
        firsts(dataloader)
        stats = dataloader.stats()
    assert stats.verdict.startswith("starved")
    assert "add workers" in stats.verdict
    assert sum(worker.item_count for worker in stats.workers) == 40
    assert all(worker.busy_sec > 0.1 for worker in stats.workers)


def test_stats_name_kept_batches_as_the_cause_of_waiting():
    def quick(number, arrays, seed):
        arrays["x"][...] = number

    with Dataloader(quick, group(), depth=1, end_at=("epoch", 1), timeout_sec=0.5) as dataloader:
        batch = next(dataloader)
        with pytest.raises(TimeoutError):
            next(dataloader)
        del batch
        assert dataloader.stats().verdict.startswith("blocked")


def test_stats_say_when_loading_keeps_up():
    def quick(number, arrays, seed):
        arrays["x"][...] = number

    with Dataloader(quick, group(), depth=8, end_at=("batch", 8)) as dataloader:
        for batch in dataloader:
            del batch
            time.sleep(0.05)
        stats = dataloader.stats()
    assert stats.verdict.startswith("keeping up")


def test_stats_are_for_inside_of_the_block():
    dataloader = Dataloader(load, group())
    with pytest.raises(RuntimeError, match="with block"):
        dataloader.stats()
