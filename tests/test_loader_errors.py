"""What happens when the loader function, the data or a loader process fails."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from isolated.run import run_script

import hydrax
from hydrax import (
    ArenaMemoryError,
    ArrayChangedError,
    ArrayKeptError,
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    HydraxError,
    ImageError,
    LoaderError,
    UnwrittenArrayError,
    ValueRangeError,
    WorkerDiedError,
    WorkerStartError,
)

SPECS = {"x": ((4,), np.float32, np.float32)}
TIMEOUT_S = 15


def numbers(count=20, batch_size=5, data=None, **options):
    return DataGroup(
        batch_size, range(count) if data is None else data, loader_arrays=SPECS, **options
    )


def doing_at(wanted, do):
    """A loader that fills its array, and at one item does something more."""

    def load(number, arrays, seed):
        arrays["x"][:] = number
        return do() if number == wanted else None

    return load


def raising(error):
    def do():
        raise error

    return do


def failing_at(wanted, error):
    return doing_at(wanted, raising(error))


def use_up(dataloader, see=lambda batch: None):
    for batch in dataloader:
        see(batch)
        del batch


def all_batches(dataloader):
    """What each batch begins with, or the error that came in its place."""
    got = []
    while True:
        try:
            got.append(float(next(dataloader).arrays["x"][0, 0]))
        except StopIteration:
            return got
        except HydraxError as error:
            got.append(error)


def run(loader, *, group=None, **options):
    options = {"end_at": ("epoch", 1), "timeout_sec": TIMEOUT_S, **options}
    with Dataloader(loader, group or numbers(), **options) as dataloader:
        return all_batches(dataloader)


def the_error(loader, kind=LoaderError, **options):
    """The one error of a run in which all other batches come."""
    got = run(loader, **options)
    errors = [entry for entry in got if not isinstance(entry, float)]
    assert len(errors) == 1, got
    assert type(errors[0]) is kind, got
    return errors[0]


@pytest.mark.parametrize("loader_count", [0, 1, 3])
def test_a_loader_that_raises_fails_its_batch_alone_and_the_rest_comes(loader_count):
    got = run(failing_at(7, ValueError("bad picture")), loader_count=loader_count)
    assert [entry if isinstance(entry, float) else type(entry) for entry in got] == [
        0, LoaderError, 10, 15,
    ]  # fmt: skip


def test_a_loader_error_says_which_item_and_carries_the_original():
    first = numbers(10, 5)
    second = numbers(data=["a", "b", "c", "d", "e", "f"], batch_size=3, seed=3)
    seeds = {}

    def load(descriptor, arrays, seed):
        arrays["x"][:] = 0
        if descriptor == "e" and hydrax.loader_context().epoch == 1:
            raise KeyError("no such picture")
        return {"seed": seed}

    with (
        Dataloader(
            load,
            [first, second],
            end_at=("epoch", 2),
            interleave_groups=False,
            timeout_sec=TIMEOUT_S,
        ) as dataloader,
        pytest.raises(LoaderError) as caught,
    ):
        use_up(dataloader, lambda batch: seeds.update(zip(batch.data, batch.seeds, strict=True)))
    error = caught.value
    assert error.descriptor == "e"
    assert error.index == 4
    assert error.group_number == 1
    assert error.epoch == 1
    assert isinstance(error.seed, int)
    assert error.seed not in seeds.values()  # an item's seed is its own, and a new one each epoch
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("no such picture",)
    message = str(error)
    for part in (
        "item 4", "'e'", "training group 1", "epoch 1", str(error.seed), "KeyError",
        "no such picture", "'x' float32 (4,)", 'raise KeyError("no such picture")', __file__,
    ):  # fmt: skip
        assert part in message
    assert "no such picture" in error.traceback_text
    assert isinstance(error, RuntimeError)


def test_a_loader_error_of_validation_has_no_seed():
    validation = numbers(data=[100, 101, 102], batch_size=3)
    with Dataloader(
        failing_at(101, OSError("gone")),
        numbers(),
        validation=("epoch", 1, validation),
        end_at=("epoch", 1),
    ) as dataloader:
        *batches, error = all_batches(dataloader)
    assert batches == [0, 5, 10, 15]
    assert (error.descriptor, error.index, error.seed) == (101, 1, None)
    assert (error.group_number, error.epoch) == (0, 0)
    assert "validation group 0" in str(error)


def test_in_process_the_original_exception_itself_is_the_cause():
    original = ValueError("bad")
    assert the_error(failing_at(7, original), loader_count=0).__cause__ is original


def test_a_batched_loader_that_raises_is_reported_with_its_first_item():
    def load(descriptors, arrays, seeds):
        if 12 in descriptors:
            raise ValueError("one of these is bad")
        arrays["x"][:] = np.asarray(descriptors)[:, None]

    error = the_error(load, batched=True)
    assert error.index in range(10, 13)
    assert "one of these is bad" in str(error)


class TextRaises(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class TextExits(Exception):
    def __str__(self):
        sys.exit(3)

    __repr__ = __str__


class TellsNothing(Exception):
    def __getattribute__(self, name):
        raise RuntimeError("no attributes")

    # The test runner asks it for a name.
    __repr__ = object.__repr__


class HoldsLock(Exception):
    def __init__(self, text, lock):
        super().__init__(text)
        self.lock = lock


class ExitsWhenRebuilt(Exception):
    def __reduce__(self):
        return sys.exit, (9,)


def rebuild_in_a_worker_only():
    if not hydrax.is_worker():
        sys.exit(9)
    return ExitsTheTrainer()


class ExitsTheTrainer(Exception):
    def __reduce__(self):
        return rebuild_in_a_worker_only, ()


class NeedsTwoArguments(Exception):
    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")


@pytest.mark.parametrize(
    ("error", "text", "cause"),
    [
        (TextRaises(), "TextRaises", TextRaises),
        (TextExits(), "TextExits", TextExits),
        (HoldsLock("locked", threading.Lock()), "locked", type(None)),
        (ExitsWhenRebuilt("rebuilt"), "rebuilt", type(None)),
        (ExitsTheTrainer("rebuilt"), "rebuilt", type(None)),
        (NeedsTwoArguments("a.png", "damaged"), "a.png: damaged", type(None)),
        (ExceptionGroup("many", [ValueError("one"), OSError("two")]), "two", ExceptionGroup),
        (BaseException("base"), "base", BaseException),
        (SystemExit(4), "SystemExit", SystemExit),
        (KeyboardInterrupt(), "KeyboardInterrupt", KeyboardInterrupt),
        (StopIteration(5), "StopIteration", StopIteration),
        (GeneratorExit(), "GeneratorExit", GeneratorExit),
        (MemoryError("too big"), "too big", MemoryError),
        (ValueError("\ud800"), "ValueError", ValueError),
        (ValueError("x" * 10**7), "xxxx", ValueError),
        (TimeoutError("a slow server"), "a slow server", TimeoutError),
        (ValueRangeError("mine", item=3), "mine", ValueRangeError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_any_exception_of_a_worker_becomes_a_loader_error_at_once(error, text, cause):
    start_s = time.monotonic()
    got = the_error(failing_at(7, error))
    assert time.monotonic() - start_s < 2
    assert text in str(got)
    assert got.index == 7
    assert type(got.__cause__) is cause


@pytest.mark.parametrize("on_error", ["raise", "skip_item"])
@pytest.mark.parametrize("loader_count", [0, 2])
def test_an_exception_that_refuses_every_attribute_is_about_its_item(loader_count, on_error):
    options = {"loader_count": loader_count, "on_error": on_error}
    loader = failing_at(7, TellsNothing("told"))
    if on_error == "raise":
        assert the_error(loader, **options).index == 7
    else:
        with Dataloader(loader, numbers(), end_at=("epoch", 1), **options) as dataloader:
            use_up(dataloader)
        assert dataloader.stats().items_skipped == 1


def test_an_exception_that_ends_programs_does_so_in_process():
    with (
        Dataloader(failing_at(7, SystemExit(4)), numbers(), loader_count=0) as dataloader,
        pytest.raises(SystemExit) as caught,
    ):
        use_up(dataloader)
    assert caught.value.code == 4


def test_chained_exceptions_show_their_whole_story():
    def do():
        try:
            raise OSError("the disk")
        except OSError as error:
            raise ValueError("the picture") from error

    message = str(the_error(doing_at(7, do)))
    assert message.index("the disk") < message.index("direct cause")


def test_a_recursion_without_end_in_the_loader_is_a_loader_error():
    def recurse():
        return recurse()

    assert isinstance(the_error(doing_at(7, recurse)).__cause__, RecursionError)


def test_kept_errors_keep_no_slots():
    errors = []

    def always(number, arrays, seed):
        raise ValueError(number)

    with Dataloader(
        always, numbers(50, 5), depth=2, end_at=("epoch", 1), timeout_sec=5
    ) as dataloader:
        while True:
            try:
                next(dataloader)
            except LoaderError as error:
                errors.append(error)
            except StopIteration:
                break
    assert [error.index for error in errors] == list(range(0, 50, 5))


@pytest.mark.parametrize("loader_count", [0, 2])
def test_errors_of_several_items_of_a_batch_are_reported_by_the_first(loader_count):
    def load(number, arrays, seed):
        if number in (6, 8):
            raise ValueError(number)
        arrays["x"][:] = number

    assert the_error(load, loader_count=loader_count).index == 6


def test_a_list_or_a_number_is_no_result():
    for result, name in (([1], "list"), (3, "int"), ("ab", "str")):
        error = the_error(doing_at(7, lambda result=result: result))
        assert isinstance(error.__cause__, TypeError)
        assert f"returned {name}" in str(error)
        assert "dict" in str(error)


def test_a_batched_loader_must_return_a_value_per_item():
    def load(descriptors, arrays, seeds):
        arrays["x"][:] = 0
        return {"path": ["a", "b"]}

    got = run(load, batched=True, group=numbers(20, 10))
    assert all(type(entry) is LoaderError for entry in got)
    assert "'path'" in str(got[0])


def test_a_result_that_cannot_be_pickled_names_its_item():
    error = the_error(doing_at(7, lambda: {"lock": threading.Lock()}))
    assert error.index == 7
    assert "pickle" in str(error)
    assert isinstance(error.__cause__, TypeError)


def raise_when_rebuilt(kind):
    raise kind("cannot be rebuilt")


class NotRebuilt:
    def __init__(self, kind=RuntimeError):
        self.kind = kind

    def __reduce__(self):
        return raise_when_rebuilt, (self.kind,)


class EndsProgramsWhenSent:
    def __reduce__(self):
        raise SystemExit("cannot be sent")


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize(
    "thing",
    [NotRebuilt(), NotRebuilt(SystemExit), NotRebuilt(GeneratorExit), EndsProgramsWhenSent()],
    ids=["error", "exit", "generator exit", "exit when sent"],
)
def test_a_result_that_cannot_be_sent_or_rebuilt_names_its_item(thing, batched):
    def load_many(items, arrays, seeds):
        arrays["x"][:] = np.asarray(items)[:, None]
        return {"thing": [thing if item == 7 else None for item in items]}

    loader = load_many if batched else doing_at(7, lambda: {"thing": thing})
    error = the_error(loader, batched=batched)
    assert error.index == 7
    assert "sending the result of item 7 " in str(error)
    assert re.search("cannot be (rebuilt|sent)", str(error))


class NotRebuiltElsewhere:
    """Can be rebuilt in a loader process, not in the main one."""

    def __reduce__(self):
        return raise_if_in_main, ()


def raise_if_in_main():
    if not hydrax.is_worker():
        raise RuntimeError("cannot be rebuilt")


def test_a_result_that_cannot_be_rebuilt_in_the_main_process_is_not_laid_to_one_other_item():
    error = the_error(doing_at(7, lambda: {"thing": NotRebuiltElsewhere()}))
    assert "cannot be rebuilt" in str(error)
    # How many items before it were loaded together with it is up to the worker.
    assert re.search("reading the result of items from [567] ", str(error))


def test_additional_results_of_any_size_come_back_in_item_order():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number % 3 == 0:
            return {"text": bytes([number]) * 10_000_000, "number": number}
        return {"number": number} if number % 3 == 1 else None

    with Dataloader(
        load, numbers(8, 4), end_at=("epoch", 2), depth=2, loader_count=2, timeout_sec=30
    ) as dataloader:
        for batch in dataloader:
            texts = batch.additional["text"]
            for number, text, same in zip(
                batch.data, texts, batch.additional["number"], strict=True
            ):
                assert same == (None if number % 3 == 2 else number)
                assert (text is None) == (number % 3 != 0)
                assert text is None or (len(text) == 10_000_000 and text[-1] == number)
            del batch


def test_an_empty_result_is_no_result_and_odd_keys_are_kept():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        return {} if number < 10 else {None: number, ("a", 1): -number}

    with Dataloader(load, numbers(), end_at=("epoch", 1)) as dataloader:
        batches = [batch.copy() for batch in dataloader]
    assert dict(batches[0].additional) == {}
    assert batches[2].additional[None] == [10, 11, 12, 13, 14]
    assert batches[3].additional["a", 1] == [-15, -16, -17, -18, -19]


@pytest.mark.parametrize(
    ("do", "exitcode", "text"),
    [
        (lambda: os._exit(5), 5, "exited with status 5"),
        (lambda: os._exit(0), 0, "exited with status 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "SIGKILL.*memory"),
        (lambda: os.abort(), -6, "SIGABRT"),
        (lambda: ctypes.string_at(0), -11, "SIGSEGV.*stack on stderr"),
    ],
    ids=["exit 5", "exit 0", "kill", "abort", "segmentation fault"],
)
def test_a_worker_that_dies_is_named_with_what_ended_it(do, exitcode, text, capfd):
    seen = []
    start_s = time.monotonic()
    with (
        Dataloader(
            doing_at(37, do), numbers(100, 10), loader_count=3, timeout_sec=TIMEOUT_S
        ) as dataloader,
        pytest.raises(WorkerDiedError, match=text) as caught,
    ):
        use_up(dataloader, lambda batch: seen.append(batch.batch_num))
    assert len(seen) <= 3
    assert time.monotonic() - start_s < 5
    error = caught.value
    assert error.exitcode == exitcode
    assert f"loader process {error.worker_index} (pid {error.pid})" in str(error)
    assert isinstance(error, RuntimeError)
    if exitcode in (-6, -11):
        stderr = capfd.readouterr().err
        assert "most recent call first" in stderr
        assert __file__ in stderr


def test_a_worker_killed_from_outside_is_reported_after_what_it_had_done():
    pids = []

    def kill_after_three(batch):
        pids.append(batch.additional["pid"][0])
        if len(pids) == 3:
            time.sleep(0.1)
            os.kill(pids[0], signal.SIGKILL)

    with (
        Dataloader(
            lambda number, arrays, seed: {"pid": os.getpid()},
            numbers(1000, 10),
            depth=2,
            timeout_sec=TIMEOUT_S,
        ) as dataloader,
        pytest.raises(WorkerDiedError) as caught,
    ):
        use_up(dataloader, kill_after_three)
    assert caught.value.pid == pids[0]
    assert len(pids) <= 3 + 2


def test_a_run_with_a_dead_worker_never_looks_complete_and_leaving_is_quick():
    with Dataloader(
        doing_at(7, lambda: os._exit(1)), numbers(), timeout_sec=TIMEOUT_S
    ) as dataloader:
        next(dataloader)
        for _ in range(3):
            with pytest.raises(WorkerDiedError, match="status 1"):
                next(dataloader)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 1


def test_a_startup_func_that_raises_is_reported_with_its_error():
    def start_up():
        raise OSError("no data server")

    with (
        Dataloader(
            failing_at(-1, None), numbers(), startup_func=start_up, timeout_sec=TIMEOUT_S
        ) as dataloader,
        pytest.raises(LoaderError, match=r"(?s)startup_func.*no data server") as caught,
    ):
        next(dataloader)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_startup_func_that_exits_is_reported():
    with (
        Dataloader(
            failing_at(-1, None), numbers(), startup_func=sys.exit, timeout_sec=TIMEOUT_S
        ) as dataloader,
        pytest.raises(LoaderError, match=r"(?s)startup_func.*SystemExit"),
    ):
        next(dataloader)
    with (
        Dataloader(
            failing_at(-1, None),
            numbers(),
            startup_func=lambda: os._exit(7),
            timeout_sec=TIMEOUT_S,
        ) as dataloader,
        pytest.raises(WorkerDiedError, match="status 7"),
    ):
        next(dataloader)


class RaisesAtSeven:
    """Data of which one item cannot be had."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 7:
            raise self.kind(index)
        return index


@pytest.mark.parametrize("kind", [OSError, IndexError, StopIteration])
def test_data_whose_item_cannot_be_had_is_a_loader_error(kind):
    got = the_error(failing_at(-1, None), group=numbers(data=RaisesAtSeven(kind)))
    assert got.index == 7
    assert type(got.__cause__) is kind
    assert kind.__name__ in str(got)


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no text")


def test_a_descriptor_without_a_text_is_still_reported():
    data = [NoRepr() for _ in range(20)]

    def load(descriptor, arrays, seed):
        if seed % 2 >= 0:
            raise ValueError("bad item")

    got = run(load, group=numbers(data=data))
    assert [type(entry) for entry in got] == [LoaderError] * 4
    assert got[0].descriptor is data[0]


def test_a_very_long_descriptor_does_not_fill_the_message():
    data = ["a" * 1_000_000] * 20

    def load(descriptor, arrays, seed):
        raise ValueError("bad")

    got = run(load, group=numbers(data=data))
    assert len(got) == 4
    assert all(len(str(error)) < 10_000 for error in got)
    assert got[0].descriptor == data[0]


def test_a_dataloader_cannot_be_made_in_a_loader_process():
    error = the_error(doing_at(7, lambda: Dataloader(print, numbers())))
    assert isinstance(error.__cause__, RuntimeError)
    assert "__main__" in str(error)


def test_a_value_that_does_not_fit_names_array_item_and_value():
    def load(number, arrays, seed):
        arrays["count"][...] = 2**40 if number == 7 else number

    group = DataGroup(5, range(20), loader_arrays={"count": ((), np.int64, np.int32)})
    with Dataloader(load, group, end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
        next(dataloader)
        with pytest.raises(LoaderError, match=f"'count'.*{2**40}") as caught:
            next(dataloader)
    assert caught.value.index == 7
    assert isinstance(caught.value.__cause__, ValueRangeError)


def test_a_debugger_in_a_worker_says_to_load_in_process():
    assert "loader_count=0" in str(the_error(doing_at(7, lambda: breakpoint())))
    result = run_script("debugger.py")
    assert result.returncode == 0, result.stderr
    assert "loader_count=0" in result.stdout


def test_in_process_a_breakpoint_is_the_users_own(monkeypatch):
    hits = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: hits.append(1))
    got = run(doing_at(7, lambda: breakpoint()), loader_count=0)
    assert hits == [1]
    assert got == run(failing_at(-1, None))


@pytest.mark.parametrize(
    "error",
    [
        BatchTimeoutError("text"),
        LoaderError("text", descriptor="a", index=1, group_number=0, epoch=2, seed=3),
        WorkerDiedError("text", worker_index=1, pid=2, exitcode=-9),
        WorkerStartError("text"),
        ArenaMemoryError("text"),
        ValueRangeError("text", item=4),
        UnwrittenArrayError("text"),
        ArrayKeptError("text"),
        ArrayChangedError("text"),
        ImageError("text"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_between_processes(error):
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == "text"
    assert vars(copied) == vars(error)
    assert isinstance(copied, HydraxError)


def test_an_enormous_message_is_cut_in_the_error_and_whole_in_its_cause():
    def load(number, arrays, seed):
        raise ValueError("begin" + "x" * 10**7 + "end")

    with (
        Dataloader(load, numbers(), timeout_sec=TIMEOUT_S) as dataloader,
        pytest.raises(LoaderError) as caught,
    ):
        next(dataloader)
    assert len(str(caught.value)) < 10**6
    assert "begin" in str(caught.value)
    assert len(str(caught.value.__cause__)) == 10**7 + 8
