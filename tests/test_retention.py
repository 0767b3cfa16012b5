"""Batches that are kept too long: what holds them is found, named, and not held any longer."""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from isolated.run import run_script

import hydrax
from hydrax import (
    BatchRetainedError,
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    debug_batch_references,
)
from hydrax._holders import describe_holders

SPECS = {"x": ((4,), np.float32, np.float32)}
TIMEOUT_S = 20


def numbers(count=100, batch_size=5):
    return DataGroup(batch_size, range(count), loader_arrays=SPECS)


def fill(number, arrays, seed):
    arrays["x"][:] = number


def leased_count(dataloader):
    return dataloader._flow.loading.arena.slot_states().count(hydrax._core.SLOT_LEASED)


class Box:
    """Something with attributes."""


class Slotted:
    __slots__ = ("batch",)


@pytest.fixture
def soon(monkeypatch):
    """Warnings that come sooner than those of real runs."""
    monkeypatch.setattr(hydrax._waiting, "_WARN_AFTER_NS", 200_000_000)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("hydrax")]


# The warning and the error


@pytest.mark.parametrize("loader_count", [0, 2])
def test_after_two_seconds_one_warning_says_what_holds_all_slots(loader_count, caplog):
    kept = []
    with Dataloader(fill, numbers(), loader_count=loader_count, timeout_sec=3) as dataloader:
        with pytest.raises(BatchRetainedError) as caught:
            for batch in dataloader:
                kept.append(batch.arrays["x"])
                del batch
        (warning,) = warnings_of(caplog)
    assert caplog.records[0].levelno == logging.WARNING
    assert re.match(r"next\(\) has waited for 2\.\d s: all 3 slots \(depth\) are held", warning)
    assert isinstance(caught.value, BatchTimeoutError)
    assert "within timeout_sec=3 seconds" in str(caught.value)
    where = (
        "array float32[5, 4] in slot",
        "and 2 more like it",
        f"a list of 3, in variable 'kept' of {sys._getframe().f_code.co_name} ({__file__}:",
    )
    for part in where:
        assert part in warning
        assert part in str(caught.value)
    assert "batch.copy()" in warning


def test_the_same_is_said_once_and_something_else_again(caplog, soon):
    kept = []
    with Dataloader(fill, numbers(), timeout_sec=0.5) as dataloader:
        with pytest.raises(BatchRetainedError):
            while True:
                kept.append(next(dataloader))
        for _ in range(2):
            with pytest.raises(BatchRetainedError):
                next(dataloader)
        assert len(warnings_of(caplog)) == 1
        other = Box()
        other.batches, kept = kept, None
        with pytest.raises(BatchRetainedError):
            next(dataloader)
        assert len(warnings_of(caplog)) == 2
        assert "attribute 'batches' of a Box" in warnings_of(caplog)[1]


def test_a_short_wait_for_a_slot_says_nothing(caplog):
    with Dataloader(fill, numbers(), depth=1, timeout_sec=TIMEOUT_S) as dataloader:
        held = [next(dataloader)]
        timer = threading.Timer(0.5, held.clear)
        timer.start()
        next(dataloader)
        timer.join()
    assert warnings_of(caplog) == []


def test_nothing_is_said_of_slots_while_workers_are_slow(caplog, soon):
    def load(number, arrays, seed):
        time.sleep(1)
        arrays["x"][:] = number

    with Dataloader(load, numbers(2, 1), end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
        kept = list(dataloader)
    assert len(kept) == 2
    assert warnings_of(caplog) == []


# What holds them


def hold_batches_in_a_list(dataloader):
    kept = []
    for batch in dataloader:
        kept.append(batch)
        del batch


def hold_the_loop_variables(dataloader):
    first = next(dataloader)
    second = next(dataloader)
    next(dataloader)
    del first, second


def hold_in_attributes(dataloader):
    box, slotted = Box(), Slotted()
    box.last = next(dataloader)
    slotted.batch = next(dataloader)
    next(dataloader)


def hold_in_nested_containers(dataloader):
    history = {"losses": deque(), 7: ()}
    history["losses"].append([next(dataloader)])
    history[7] = (next(dataloader),)
    next(dataloader)


def hold_in_globals(dataloader):
    global held_globally
    try:
        held_globally = [next(dataloader), next(dataloader)]
        next(dataloader)
    finally:
        del held_globally


def hold_in_a_class(dataloader):
    class Local:
        last = (next(dataloader), next(dataloader))

    next(dataloader)
    assert Local.last


def hold_by_a_traceback(dataloader):
    def step(batch):
        raise ValueError(len(batch))

    errors = []
    for batch in dataloader:
        try:
            step(batch)
        except ValueError as error:
            errors.append(error)
        del batch


def hold_by_a_generator(dataloader):
    def numbers_of():
        for inner in dataloader:
            yield inner.indices

    for indices in numbers_of():
        other = next(dataloader)  # noqa: F841 - to hold it
        del indices


def hold_by_enumerate(dataloader):
    for _, batch in enumerate(dataloader):
        other = next(dataloader)  # noqa: F841 - to hold it
        del batch


def hold_by_zip(dataloader):
    for batch, _ in zip(dataloader, "abc", strict=False):
        other = next(dataloader)  # noqa: F841 - to hold it
        del batch


def hold_by_a_closure(dataloader):
    def make():
        batch = next(dataloader)
        other = next(dataloader)
        return lambda: (batch, other)

    function = make()
    next(dataloader)
    function()


def hold_numpy_views(dataloader):
    views = []
    for batch in dataloader:
        views.append(np.asarray(batch.arrays["x"])[:2])
        del batch


def hold_in_a_thread(dataloader):
    def wait(batches):
        done.wait()

    done = threading.Event()
    thread = threading.Thread(target=wait, args=[[next(dataloader), next(dataloader)]])
    thread.start()
    try:
        next(dataloader)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("hold", "texts"),
    [
        (hold_batches_in_a_list, ["<TrainingBatch 0 ", "list of 2, in variable 'kept'"]),
        (hold_the_loop_variables, ["variable 'first' of", "variable 'second' of"]),
        (
            hold_in_attributes,
            [
                "attribute 'last' of a Box, in variable 'box'",
                "attribute 'batch' of a Slotted, in variable 'slotted'",
            ],
        ),
        (
            hold_in_nested_containers,
            [
                "a list of 1, in a deque of 1, in ['losses'] of a dict, in variable 'history'",
                "a tuple of 1, in [7] of a dict, in variable 'history'",
            ],
        ),
        (hold_in_globals, [f"a list of 2, in global variable 'held_globally' of {__name__}"]),
        (hold_in_a_class, ["attribute 'last' of class hold_in_a_class.<locals>.Local"]),
        (
            hold_by_a_traceback,
            [
                "variable 'batch' of hold_by_a_traceback.<locals>.step",
                "in the traceback of a ValueError, in a list of 2, in variable 'errors'",
            ],
        ),
        (
            hold_by_a_generator,
            ["variable 'inner' of hold_by_a_generator.<locals>.n", "variable 'other'"],
        ),
        (hold_by_enumerate, ["the last result of enumerate()"]),
        (hold_by_zip, ["the last result of zip()"]),
        (hold_by_a_closure, ["a closure, in a tuple of 2, in function", "variable 'function'"]),
        (hold_numpy_views, ["a NumPy view of it, in variable 'views' of hold_numpy_views"]),
        (hold_in_a_thread, ["variable 'batches' of hold_in_a_thread.<locals>.wait"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_holds_batches_is_named(hold, texts):
    gc.disable()  # as in programs that want no pauses
    try:
        with (
            Dataloader(fill, numbers(), depth=2, timeout_sec=0.3) as dataloader,
            pytest.raises(BatchRetainedError) as caught,
        ):
            hold(dataloader)
    finally:
        gc.enable()
    for text in texts:
        assert text in str(caught.value)


def test_batches_in_cycles_are_collected_although_the_collector_is_off(caplog, soon):
    gc.disable()
    try:
        with Dataloader(fill, numbers(), end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
            count = 0
            for batch in dataloader:
                box = Box()
                box.itself, box.batch = box, batch
                count += 1
                del batch, box
            assert count == 20
    finally:
        gc.enable()
    assert warnings_of(caplog) == []


def test_work_that_jax_has_not_finished_is_told_apart(caplog, soon):
    @jax.jit
    def slow(x, square, rounds):
        total = jax.lax.fori_loop(0, rounds, lambda _, s: jnp.tanh(s @ s), square)
        return total[0, 0] + x.sum()

    def seconds(rounds):
        start_s = time.monotonic()
        slow(jnp.zeros((5, 4), jnp.float32), square, rounds).block_until_ready()
        return time.monotonic() - start_s

    square = jnp.ones((300, 300), jnp.float32)
    seconds(1)  # compiles
    rounds = int(100 * 1.5 / seconds(100))  # a second and a half, on any machine
    with Dataloader(fill, numbers(), depth=2, timeout_sec=TIMEOUT_S) as dataloader:
        totals = []
        for _ in range(3):
            batch = next(dataloader)
            totals.append(slow(batch.arrays["x"], square, rounds))
            del batch
        jax.block_until_ready(totals)
    (warning,) = warnings_of(caplog)
    assert "held by JAX" in warning
    assert "slots 0, 1:" in warning
    assert "computations or transfers that JAX has not finished" in warning
    assert "batch.copy()" not in warning


# Nothing is held by the search, and nothing is disturbed


def test_slots_are_free_at_once_after_an_error_that_named_their_holders(soon):
    with Dataloader(fill, numbers(), timeout_sec=0.4) as dataloader:
        kept = [next(dataloader) for _ in range(3)]
        last = kept[0]
        with pytest.raises(BatchRetainedError):
            next(dataloader)
        gc.disable()
        try:
            assert leased_count(dataloader) == 3
            del last
            kept.clear()
            assert leased_count(dataloader) == 0
        finally:
            gc.enable()


def test_variables_and_dicts_of_locals_stay_as_they_are(soon):
    def step(dataloader, scale):
        settings = locals()
        batch = next(dataloader)
        kept = [next(dataloader), batch]
        with pytest.raises(BatchRetainedError):
            next(dataloader)
        assert settings["scale"] is scale
        assert settings["dataloader"] is dataloader
        assert kept[1] is batch
        return len(kept)

    with Dataloader(fill, numbers(), depth=2, timeout_sec=0.4) as dataloader:
        assert step(dataloader, object()) == 2


def test_variables_survive_a_search_from_within_a_debugger():
    seen = []

    def step(dataloader):
        first = next(dataloader)
        second = next(dataloader)
        seen.append("here")
        return first.batch_num, second.batch_num

    def trace(frame, event, arg):
        if frame.f_code is not step.__code__:
            return None
        if event == "line" and seen == []:
            variables = dict(frame.f_locals)
            if "second" in variables:
                seen.append("searching")
                with pytest.raises(BatchRetainedError):
                    next(variables["dataloader"])
            del variables
        return trace

    with Dataloader(fill, numbers(), depth=2, timeout_sec=0.3) as dataloader:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert step(dataloader) == (0, 1)
        finally:
            sys.settrace(before)
        assert seen == ["searching", "here"]


class Hostile:
    """Answers no question about itself."""

    def __init__(self, batch):
        object.__setattr__(self, "secret", [batch])

    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError

    __hash__ = None

    def __len__(self):
        raise RuntimeError

    def __repr__(self):
        raise RuntimeError


def test_objects_that_resist_are_found_all_the_same():
    with (
        Dataloader(fill, numbers(), depth=1, timeout_sec=0.3) as dataloader,
        pytest.raises(BatchRetainedError, match=r"a list of 1, in attribute 'secret' of a Hostile"),
    ):
        hostile = Hostile(next(dataloader))
        next(dataloader)
    del hostile


def test_a_large_heap_is_searched_in_bounded_time():
    heap = [{"number": i, "list": [i]} for i in range(700_000)]
    many = [object() for _ in range(1_000_000)]
    with Dataloader(fill, numbers(), depth=1, timeout_sec=TIMEOUT_S) as dataloader:
        many.append(next(dataloader).arrays["x"])
        start_s = time.thread_time()
        gc.get_referrers(many)
        step_s = time.thread_time() - start_s
        start_s = time.thread_time()
        lines = describe_holders([dataloader._flow.loading.arena]).lines
        took_s = time.thread_time() - start_s
    assert len(heap) == 700_000
    assert "variable 'many'" in "".join(lines)
    assert took_s < 1.2 + 4 * step_s


def test_a_search_that_is_given_up_says_so(monkeypatch):
    monkeypatch.setattr(hydrax._holders, "_MAX_BLOCKS", 0)
    with Dataloader(fill, numbers(), depth=1, timeout_sec=TIMEOUT_S) as dataloader:
        kept = [next(dataloader)]
        lines = describe_holders([dataloader._flow.loading.arena]).lines
        assert "array float32[5, 4] in slot 0" in lines[0]
        assert "not found in time" in lines[1]
        array = kept[0].arrays["x"]  # what a variable itself holds needs no search
        lines = describe_holders([dataloader._flow.loading.arena]).lines
        assert "variable 'array' of test_a_search" in lines[1]
        del array


def test_many_slots_make_a_short_report():
    with Dataloader(fill, numbers(1000, 5), depth=100, timeout_sec=TIMEOUT_S) as dataloader:
        kept = [next(dataloader).arrays["x"] for _ in range(100)]
        lines = describe_holders([dataloader._flow.loading.arena]).lines
    assert len(lines) < 12
    assert "variable 'kept'" in "".join(lines)
    assert len(kept) == 100


def test_references_are_printed_on_demand(capsys):
    with Dataloader(fill, numbers(), timeout_sec=TIMEOUT_S) as dataloader:
        kept = [next(dataloader)]
        debug_batch_references()
    text = capsys.readouterr().out
    assert "<TrainingBatch 0 (epoch 0, batch 0), x: float32[5, 4]>" in text
    assert "a list of 1, in variable 'kept' of" in text
    debug_batch_references()  # the arena is given up, the batch is still there
    assert "variable 'kept' of" in capsys.readouterr().out
    kept.clear()
    debug_batch_references()
    assert capsys.readouterr().out == "no batch memory is referred to\n"


def test_a_loop_with_few_files_is_told_what_keeps_its_batches():
    result = run_script("few_files.py")
    assert result.returncode == 0, result.stderr
    counts, message = result.stdout.split("\n", 1)
    first, last = map(int, counts.split())
    assert last <= first
    assert "variable 'history' of" in message
    assert "too many open files" not in message.lower()
