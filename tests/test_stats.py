import dataclasses
import logging
import time

import numpy as np
import pytest

from hydrax import Batch, DataGroup, Dataloader, LoaderError, LoaderStats, WorkerStats

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
    # On a machine that is busy with other things the workers are not.
    assert "add workers" in stats.verdict or "wait for processors" in stats.verdict
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
        time.sleep(0.4)  # so that the start is no part of it
        for batch in dataloader:
            del batch
            time.sleep(0.05)
        stats = dataloader.stats()
    assert stats.verdict.startswith("keeping up")


def test_stats_begin_with_the_block_and_stay_after_it():
    dataloader = Dataloader(load, group(), on_error="drop_batch", end_at=("epoch", 1))
    with pytest.raises(RuntimeError, match="with block"):
        dataloader.stats()
    with dataloader:
        firsts(dataloader)
        inside = dataloader.stats()
    after = dataloader.stats()
    assert after == dataloader.stats()
    assert after.items_delivered == inside.items_delivered == 24
    assert [worker.pid for worker in after.workers] == [worker.pid for worker in inside.workers]


@pytest.mark.parametrize("policy", ["raise", "drop_batch", "skip_item"])
@pytest.mark.parametrize("loader_count", [0, 2])
def test_every_planned_item_is_in_one_of_the_counts_at_any_time(loader_count, policy):
    training = group(items=39, remainder="pad")
    validation = DataGroup(5, range(17), loader_arrays=ARRAYS, remainder="short")
    dataloader = Dataloader(
        load,
        training,
        validation=("epoch", 1, validation),
        end_at=("epoch", 2),
        loader_count=loader_count,
        on_error=policy,
    )
    totals = []
    with dataloader:
        while True:
            try:
                next(dataloader)
            except LoaderError:
                pass
            except StopIteration:
                break
            stats = dataloader.stats()
            totals.append(
                stats.items_delivered
                + stats.items_dropped
                + stats.items_skipped
                + stats.items_pending
            )
    assert totals[-1] == 2 * (39 + 17)
    assert totals == sorted(totals)
    assert stats.items_pending == 0
    assert stats.batches_delivered + stats.batches_dropped == 2 * (10 + 4)
    assert (stats.items_retried, stats.worker_restarts) == (0, 0)


def test_ready_batches_can_be_read():
    def quick(number, arrays, seed):
        arrays["x"][...] = number

    with Dataloader(quick, group(), depth=4) as dataloader:
        batch = next(dataloader)
        deadline = time.monotonic() + 10
        while dataloader.stats().batches_ready < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert dataloader.stats().batches_ready == 3
        assert batch.batch_num == 0


@pytest.mark.parametrize("loader_count", [1, 3])
def test_waiting_for_a_slot_is_told_from_having_nothing_to_do(loader_count):
    def quick(number, arrays, seed):
        arrays["x"][...] = number

    options = {"depth": 2, "loader_count": loader_count, "end_at": ("epoch", 1)}
    with Dataloader(quick, group(), **options) as dataloader:
        next(dataloader)
        time.sleep(0.6)  # both slots are ready; nobody can load
        stats = dataloader.stats()
        assert stats.slot_wait_sec > 0.4 * loader_count
        assert stats.slot_wait_sec == pytest.approx(
            sum(worker.slot_wait_sec for worker in stats.workers)
        )
        firsts(dataloader)
        before = dataloader.stats().slot_wait_sec
        time.sleep(0.3)  # everything is loaded; nobody has to
        assert dataloader.stats().slot_wait_sec == before


@pytest.mark.parametrize("loader_count", [0, 2])
def test_loading_time_counts_a_run_that_goes_on(loader_count):
    def slow(number, arrays, seed):
        time.sleep(0.5 if number == 4 else 0.02)
        arrays["x"][...] = number

    with Dataloader(slow, group(items=8), loader_count=loader_count) as dataloader:
        next(dataloader)
        if loader_count:
            time.sleep(0.3)
            assert max(worker.busy_sec for worker in dataloader.stats().workers) > 0.2
        next(dataloader)
        stats = dataloader.stats()
    assert 0.6 < stats.loading_sec < stats.elapsed_sec * max(loader_count, 1)
    assert stats.idle_sec == stats.starved_sec + stats.blocked_sec
    assert stats.idle_sec <= stats.elapsed_sec


def figures(**given):
    """Statistics with some figures given."""
    names = [field.name for field in dataclasses.fields(LoaderStats)]
    return LoaderStats(**{**dict.fromkeys(names, 0), "workers": (), "elapsed_sec": 10.0, **given})


def busy(*shares):
    return tuple(
        WorkerStats(pid=n, item_count=0, busy_sec=10 * share, slot_wait_sec=0, busy_share=share)
        for n, share in enumerate(shares)
    )


@pytest.mark.parametrize(
    ("stats", "verdict"),
    [
        (figures(starved_sec=0.1), "keeping up: waited 1% of the time"),
        (
            figures(starved_sec=5.0, workers=busy(0.99, 0.97)),
            "starved 50% of the time: workers busy 98%, add workers or make the loader faster",
        ),
        (
            figures(starved_sec=5.0, workers=busy(0.3, 0.3), slot_wait_sec=8.0),
            "starved 50% of the time: workers busy 30%, without a free slot 40%, a larger depth "
            "may help",
        ),
        (
            figures(starved_sec=5.0),
            "starved 50% of the time: loading in the main process; use workers",
        ),
        (
            figures(blocked_sec=4.0, starved_sec=1.0, workers=busy(0.1)),
            "blocked 40% of the time: slots leased, batches are kept or depth is small",
        ),
    ],
)
def test_the_verdict_says_what_is_slow_and_what_to_do(stats, verdict):
    assert stats.verdict == verdict


def test_stats_since_earlier_ones_are_those_of_the_time_between():
    workers = (
        WorkerStats(pid=5, item_count=10, busy_sec=4.0, slot_wait_sec=1.0, busy_share=0.4),
        WorkerStats(pid=6, item_count=3, busy_sec=1.0, slot_wait_sec=0.5, busy_share=0.1),
    )
    earlier = figures(elapsed_sec=8.0, items_delivered=30, workers=workers[:1], batches_ready=1)
    later = figures(
        elapsed_sec=10.0, items_delivered=36, starved_sec=1.0, workers=workers, batches_ready=3
    )
    between = later.since(earlier)
    assert between.elapsed_sec == 2.0
    assert between.items_delivered == 6
    assert between.batches_ready == 3
    assert between.starved_sec == 1.0
    assert [(worker.pid, worker.busy_share) for worker in between.workers] == [(5, 0), (6, 0.5)]
    assert earlier.since(later) == earlier  # a state was set between them
