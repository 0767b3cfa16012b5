"""Progress bars: what they show, and that they hold no batch and leave nothing behind."""

import gc
import io
import logging
import time
import weakref

import numpy as np
import psutil
import pytest

import hydrax

pytest.importorskip("tqdm", reason="needs tqdm")

from tqdm.auto import tqdm

from hydrax.tqdm import ProgressMonitor, tbatches

BATCH_SIZE = 4
ARRAYS = {"x": ((3,), np.float32, np.float32)}


def load(number, arrays, seed):
    arrays["x"][...] = number


def make_loader(batch_count=5, *, loader=load, validation_count=0, **options):
    validation = None
    if validation_count:
        items = range(validation_count * BATCH_SIZE)
        validation = ("epoch", 1, hydrax.DataGroup(BATCH_SIZE, items, loader_arrays=ARRAYS))
    group = hydrax.DataGroup(BATCH_SIZE, range(batch_count * BATCH_SIZE), loader_arrays=ARRAYS)
    options = {"end_at": ("epoch", 1), "timeout_sec": 20, **options}
    return hydrax.Dataloader(loader, group, validation=validation, **options)


def bar_options(file):
    return {"file": file, "ncols": 80, "mininterval": 0, "miniters": 1, "ascii": True}


def assert_nothing_open():
    assert len(tqdm._instances) == 0
    assert psutil.Process().children() == []


def test_batches_are_those_of_the_plain_loop():
    with make_loader() as dataloader:
        plain = [np.array(batch.arrays["x"]) for batch in dataloader]
    shown = [np.array(batch.arrays["x"]) for batch in tbatches(make_loader(), disable=True)]
    assert len(shown) == 5
    np.testing.assert_array_equal(shown, plain)
    assert_nothing_open()


def test_nothing_starts_before_the_first_batch_is_asked_for():
    batches = tbatches(make_loader(), disable=True)
    assert_nothing_open()
    batches.close()


def test_depth_one_goes_on_when_the_loop_lets_go_of_its_batch():
    count = 0
    for batch in tbatches(make_loader(depth=1), disable=True):
        batch.arrays["x"].block_until_ready()
        del batch
        count += 1
    assert count == 5


def test_suspended_generator_holds_no_batch():
    batches = tbatches(make_loader(loader_count=0), disable=True)
    batch = next(batches)
    array = weakref.ref(batch.arrays["x"])
    del batch
    gc.collect()
    assert array() is None
    batches.close()


def test_monitor_holds_no_batch():
    dataloader = make_loader(loader_count=0)
    monitor = ProgressMonitor(dataloader, report_interval=1, disable=True)
    with dataloader, monitor:
        batch = next(dataloader)
        monitor.begin_batch(batch)
        array = weakref.ref(batch.arrays["x"])
        monitor.end_batch(batch)
        del batch
        gc.collect()
        assert array() is None


def test_break_leaves_the_block_and_closes_the_bars():
    dataloader = make_loader(end_at=None, validation_count=2)
    for batch in tbatches(dataloader, file=io.StringIO()):
        if batch.is_validation:
            del batch
            break
        del batch
    assert_nothing_open()


def test_closed_generator_leaves_the_block_and_closes_the_bars():
    batches = tbatches(make_loader(end_at=None), file=io.StringIO())
    next(batches)
    assert len(tqdm._instances) == 1
    batches.close()
    assert_nothing_open()


def test_exception_in_the_loop_leaves_the_block_and_closes_the_bars():
    def train():
        for batch in tbatches(make_loader(end_at=None), file=io.StringIO()):
            raise RuntimeError(f"no use for {len(batch)} items")

    with pytest.raises(RuntimeError, match="no use for 4 items"):
        train()
    assert_nothing_open()


def test_error_of_the_loader_comes_out_and_closes_the_bars():
    def fail(number, arrays, seed):
        raise ValueError("unreadable")

    batches = tbatches(make_loader(loader=fail), file=io.StringIO())
    with pytest.raises(hydrax.LoaderError, match="unreadable"):
        next(batches)
    assert_nothing_open()


def test_interrupt_ends_the_loop():
    dataloader = make_loader(end_at=None)
    count = 0
    for batch in tbatches(dataloader, disable=True):
        del batch
        count += 1
        if count == 2:
            dataloader.interrupt()
    assert count == 2
    assert dataloader.interrupted


def test_training_bar_goes_from_first_to_last_batch():
    file = io.StringIO()
    dataloader = make_loader(start_at=(0, 2), end_at=("epoch", 2))
    for batch in tbatches(dataloader, description="learn", **bar_options(file)):
        del batch
    shown = file.getvalue().split("\r")
    assert "learn" in shown[1]
    assert "2/10 " in shown[1]
    assert "10/10 " in shown[-1]


def test_endless_loader_has_a_bar_without_a_total():
    file = io.StringIO()
    batches = tbatches(make_loader(end_at=None), **bar_options(file))
    for _ in range(7):
        next(batches)
    batches.close()
    assert "6batch" in file.getvalue()
    assert "/None" not in file.getvalue()


def test_validation_has_a_bar_of_its_own_for_each_run():
    file = io.StringIO()
    dataloader = make_loader(2, validation_count=3, end_at=("epoch", 2))
    for batch in tbatches(dataloader, **bar_options(file)):
        del batch
    shown = file.getvalue()
    assert shown.count("validate: 100%") == 2
    assert "validate:   0%" in shown
    assert "3/3 " in shown
    assert "4/4 " in shown
    assert_nothing_open()


def test_options_of_the_training_bar_do_not_reach_the_validation_bar():
    file = io.StringIO()
    dataloader = make_loader(2, validation_count=3)
    options = {"total": 77, "desc": "own", "leave": False, "position": 1, **bar_options(file)}
    for batch in tbatches(dataloader, **options):
        del batch
    assert "/77 " in file.getvalue()
    assert "own:" in file.getvalue()
    assert "validate: 100%" in file.getvalue()
    assert "3/3 " in file.getvalue()


def load_slowly(number, arrays, seed):
    time.sleep(0.01)
    arrays["x"][...] = number


@pytest.mark.parametrize("loader_count", [0, 1])
def test_report_tells_how_far_loading_runs_behind(caplog, loader_count):
    file = io.StringIO()
    dataloader = make_loader(6, loader=load_slowly, loader_count=loader_count)
    with caplog.at_level(logging.INFO, "hydrax.tqdm"):
        for batch in tbatches(dataloader, report_interval=3, **bar_options(file)):
            del batch
    assert "batch 6: training waited for loading 0." in file.getvalue()
    assert "; starved " in file.getvalue()
    assert ("workers busy" if loader_count else "use workers") in file.getvalue()
    assert dataloader.idle_usec() > 0  # not used up by the report
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert "ms a batch" in caplog.text


def test_report_is_silent_while_loading_keeps_up(caplog):
    with caplog.at_level(logging.INFO, "hydrax.tqdm"):
        for batch in tbatches(make_loader(8), report_interval=4, disable=True):
            del batch
            time.sleep(0.02)
    assert caplog.text == ""


def test_report_of_a_hidden_bar_goes_to_the_log_alone(caplog, capfd):
    with caplog.at_level(logging.INFO, "hydrax.tqdm"):
        dataloader = make_loader(4, loader=load_slowly)
        for batch in tbatches(dataloader, report_interval=4, disable=True):
            del batch
    assert "training waited" in caplog.text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("failing", [BATCH_SIZE, 100, 100 + 2 * BATCH_SIZE])
def test_dropped_batches_are_counted_and_reported(failing):
    def fail_once(number, arrays, seed):
        if number == failing:
            raise ValueError("unreadable")
        arrays["x"][...] = number

    training = hydrax.DataGroup(
        BATCH_SIZE, range(4 * BATCH_SIZE), loader_arrays=ARRAYS, shuffle_later="repeat"
    )
    held_out = hydrax.DataGroup(BATCH_SIZE, range(100, 100 + 3 * BATCH_SIZE), loader_arrays=ARRAYS)
    dataloader = hydrax.Dataloader(
        fail_once, training, validation=("epoch", 1, held_out), end_at=("batch", 7)
    )
    file = io.StringIO()
    monitor = ProgressMonitor(dataloader, report_interval=8, **bar_options(file))
    with dataloader, monitor:
        while True:
            try:
                batch = next(dataloader)
            except hydrax.LoaderError:
                continue
            except StopIteration:
                break
            monitor.begin_batch(batch)
            monitor.end_batch(batch)
            del batch
    dropped = 2 if failing == BATCH_SIZE else 1
    assert f"batches dropped: {dropped}" in file.getvalue()
    assert "7/7 " in file.getvalue()
    assert "3/3 " in file.getvalue()


def test_skipped_items_are_reported_by_interval(caplog):
    def fail_one(number, arrays, seed):
        if number == 2 * BATCH_SIZE + 1:
            raise ValueError("unreadable")
        arrays["x"][...] = number

    group = hydrax.DataGroup(BATCH_SIZE, range(4 * BATCH_SIZE), loader_arrays=ARRAYS)
    dataloader = hydrax.Dataloader(fail_one, group, on_error="skip_item", end_at=("epoch", 1))
    with caplog.at_level(logging.INFO, "hydrax.tqdm"):
        for batch in tbatches(dataloader, report_interval=2, disable=True):
            del batch
            time.sleep(0.02)
    assert caplog.text.count("items skipped: 1") == 1
    assert dataloader.stats().items_skipped == 1


def test_loader_out_of_order_is_refused_at_the_call():
    with pytest.raises(ValueError, match="deterministic=True"):
        tbatches(make_loader(deterministic=False))
    with pytest.raises(ValueError, match="deterministic=True"):
        ProgressMonitor(make_loader(deterministic=False))


@pytest.mark.parametrize(
    ("interval", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_report_interval_is_refused_by_name(interval, error):
    with pytest.raises(error, match="report_interval"):
        tbatches(make_loader(), report_interval=interval)


def test_something_else_than_a_loader_is_refused():
    with pytest.raises(TypeError, match=r"expected hydrax\.Dataloader"):
        tbatches([1, 2, 3])


def test_monitor_may_be_closed_again_and_without_a_block():
    monitor = ProgressMonitor(make_loader(), file=io.StringIO())
    monitor.close()
    with make_loader() as dataloader:
        monitor = ProgressMonitor(dataloader, file=io.StringIO())
        batch = next(dataloader)
        monitor.begin_batch(batch)
        monitor.end_batch(batch)
        assert repr(monitor) == "ProgressMonitor(batch 1 of 5)"
        monitor.close()
        monitor.close()
    assert_nothing_open()
