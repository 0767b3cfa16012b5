"""on_error="skip_item": items that cannot be loaded are masked, and everything adds up."""

from __future__ import annotations

import logging
import os
import sys
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from hydrax import Batch, DataGroup, Dataloader, LoaderError, ValueRangeError

PLAIN = {"x": ((3,), np.float32, np.float32), "y": ((), np.int32, np.int32)}
CONVERTED = {"x": ((3,), np.float32, np.float32), "y": ((), np.int64, np.int32)}
TIMEOUT_S = 20


def is_bad(number):
    return number % 10 == 7


def load(number, arrays, seed):
    arrays["x"][:2] = number + 1
    if is_bad(number):
        raise OSError(f"cannot read {number}")
    arrays["x"][2] = number + 1
    arrays["y"][...] = number + 1
    return {"number": number, "seed": seed}


def load_run(numbers, arrays, seeds):
    arrays["x"][:] = np.asarray(numbers)[:, None] + 1
    if any(map(is_bad, numbers)):
        raise OSError(f"cannot read one of {list(numbers)}")
    arrays["y"][:] = np.asarray(numbers) + 1
    return {
        "number": list(map(int, numbers)),
        "seed": [None] * len(numbers) if seeds is None else list(seeds),
    }


def group(items=40, size=4, arrays=PLAIN, **options):
    return DataGroup(size, range(items), loader_arrays=arrays, **options)


def loaded(groups=None, *, loader=load, **options):
    """Copies of all batches, and the figures at the end."""
    options = {"end_at": ("epoch", 1), "timeout_sec": TIMEOUT_S, **options}
    if groups is None:
        groups = group()
    with Dataloader(loader, groups, on_error="skip_item", **options) as dataloader:
        batches = [batch.copy() for batch in dataloader]
        return batches, dataloader.stats()


def check(batch):
    """Good items are there as loaded, others are zeros and stand in the mask."""
    x, y = np.asarray(batch.arrays["x"]), np.asarray(batch.arrays["y"])
    seeds = batch.seeds if batch.is_training else [None] * len(batch)
    for item, (index, seed) in enumerate(zip(batch.indices, seeds, strict=True)):
        is_loaded = not is_bad(index)
        assert (x[item] == (index + 1) * is_loaded).all()
        assert y[item] == (index + 1) * is_loaded
        assert batch.additional["number"][item] == (index if is_loaded else None)
        assert batch.additional["seed"][item] == (seed if is_loaded else None)
        assert is_loaded or not batch.mask[item]
    assert batch.mask.dtype == np.bool_
    assert batch.mask.shape == (len(batch),)
    assert batch.mask.sum() == batch.valid_count
    assert all(is_bad(error.index) for error in batch.skipped.values())


@pytest.mark.parametrize("arrays", [PLAIN, CONVERTED], ids=["plain", "converted"])
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("loader_count", [0, 1, 3])
def test_an_item_that_fails_is_zeros_masked_and_counted(loader_count, batched, arrays):
    batches, stats = loaded(
        group(arrays=arrays),
        loader=load_run if batched else load,
        batched=batched,
        loader_count=loader_count,
        depth=2,  # so that slots are used again, which hold earlier batches
        end_at=("epoch", 3),
    )
    assert len(batches) == 30
    for batch in batches:
        check(batch)
        assert batch.valid_count == 4 - sum(map(is_bad, batch.indices))
        assert [batch.indices[item] for item in batch.skipped] == list(
            filter(is_bad, batch.indices)
        )
    assert stats.items_delivered == 3 * 36
    assert stats.items_skipped == 3 * 4
    assert (stats.items_dropped, stats.batches_dropped, stats.batches_delivered) == (0, 0, 30)


@pytest.mark.parametrize("debug", [False, True])
def test_what_was_skipped_says_why(debug):
    batches, _ = loaded(debug=debug)
    error = batches[1].skipped[3]
    assert isinstance(error, LoaderError)
    assert (error.descriptor, error.index, error.epoch, error.group_number) == (7, 7, 0, 0)
    assert error.seed == batches[1].seeds[3]
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.__traceback__ is None  # it would hold the loader's frames
    assert 'raise OSError(f"cannot read {number}")' in error.traceback_text
    assert dict(batches[0].skipped) == {}


@pytest.mark.parametrize("loader_count", [0, 2])
def test_each_skipped_item_is_logged_once_with_descriptor_and_traceback(loader_count, caplog):
    with caplog.at_level(logging.WARNING, "hydrax"):
        loaded(loader_count=loader_count)
    assert len(caplog.messages) == 4
    for number, message in zip((7, 17, 27, 37), caplog.messages, strict=True):
        assert "an item is skipped" in message
        assert f"loading item {number} ({number})" in message
        assert f"OSError: cannot read {number}" in message
        assert 'raise OSError(f"cannot read {number}")' in message


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("remainder", ["pad", "short"])
def test_masks_of_padding_and_of_skipping_are_one(remainder, batched):
    batches, stats = loaded(
        group(items=38, size=5, remainder=remainder),
        loader=load_run if batched else load,
        batched=batched,
        end_at=("epoch", 2),
        loader_count=2,
    )
    assert len(batches) == 16
    last = batches[7]  # items 35 36 37, and to pad it 35 36
    if remainder == "pad":
        assert last.mask.tolist() == [True, True, False, False, False]
    else:
        assert last.mask.tolist() == [True, True, False]
    assert last.valid_count == 2
    assert list(last.skipped) == [2]
    for batch in batches:
        check(batch)
    assert stats.items_delivered == 2 * 34
    assert stats.items_skipped == 2 * 4


def test_an_item_that_fails_in_its_repetition_too_counts_once(caplog):
    with caplog.at_level(logging.WARNING, "hydrax"):
        batches, stats = loaded(group(items=8, size=6, remainder="pad"))
    # Items 6 and 7, and again 6 7 6 7: item 7 is at three places of the last batch.
    last = batches[1]
    assert list(last.indices) == [6, 7, 6, 7, 6, 7]
    assert last.mask.tolist() == [True] + [False] * 5
    check(last)
    assert (stats.items_delivered, stats.items_skipped) == (7, 1)
    assert len(caplog.messages) == 1


def test_validation_items_are_skipped_as_well():
    batches, stats = loaded(validation=("epoch", 1, group(items=10, size=5)), loader_count=2)
    validation = [batch for batch in batches if batch.is_validation]
    assert [batch.valid_count for batch in validation] == [5, 4]
    for batch in batches:
        check(batch)
    assert validation[1].skipped[2].seed is None
    assert "validation group 0" in str(validation[1].skipped[2])
    assert stats.items_delivered + stats.items_skipped == 50


def test_a_placement_function_gets_zeros_and_none():
    seen = []

    def place(arrays, layouts, additional, of_group):
        seen.append((arrays["x"].copy(), list(additional["number"])))
        return {name: jax.numpy.array(array) for name, array in arrays.items()}

    batches, _ = loaded(placement_func=place)
    assert seen[1][1] == [4, 5, 6, None]
    assert seen[1][0][:, 0].tolist() == [5, 6, 7, 0]
    for batch in batches:
        check(batch)


def test_a_masked_function_is_compiled_once():
    compiled = 0

    @jax.jit
    def total(x, mask):
        nonlocal compiled
        compiled += 1
        return jax.numpy.where(mask[:, None], x, 0.0).sum()

    batches, _ = loaded(group(items=38, size=5, remainder="pad"))
    found = sum(float(total(batch.arrays["x"], batch.mask)) for batch in batches)
    assert compiled == 1
    assert found == 3 * sum(number + 1 for number in range(38) if not is_bad(number))


@pytest.mark.parametrize("loader_count", [0, 2])
def test_a_batch_without_a_good_item_is_left_out_logged_and_counted(loader_count, caplog):
    def load_some(number, arrays, seed):
        if 4 <= number < 8 or number == 1:
            raise OSError(f"cannot read {number}")
        arrays["y"][...] = number

    with caplog.at_level(logging.WARNING, "hydrax"):
        batches, stats = loaded(group(items=14), loader=load_some, loader_count=loader_count)
    assert [batch.batch_num for batch in batches] == [0, 2]
    assert (stats.batches_delivered, stats.batches_dropped) == (2, 1)
    assert (stats.items_delivered, stats.items_dropped, stats.items_skipped) == (7, 4, 1)
    assert len(caplog.messages) == 6
    assert "a batch is dropped: none of the 4 items of training batch 1" in caplog.messages[-1]


@pytest.mark.parametrize("policy", ["raise", "drop_batch", "skip_item", "callable"])
def test_the_figures_of_an_epoch_add_up_to_its_items(policy, caplog):
    def load_all_but_one(number, arrays, seed):
        if number == 41:
            raise OSError("unreadable")
        arrays["x"][:] = number

    asked = []
    on_error = asked.append if policy == "callable" else policy
    dataloader = Dataloader(
        load_all_but_one, group(items=100, size=10), end_at=("epoch", 1), on_error=on_error
    )
    count = 0
    errors = []
    with dataloader, caplog.at_level(logging.WARNING, "hydrax"):
        while True:
            try:
                count += next(dataloader).valid_count
            except LoaderError as error:
                errors.append(error)
            except StopIteration:
                break
        stats = dataloader.stats()
    assert stats.items_delivered == count
    assert stats.items_delivered + stats.items_dropped + stats.items_skipped == 100
    assert stats.batches_delivered + stats.batches_dropped == 10
    assert count == (99 if policy == "skip_item" else 90)
    assert [error.index for error in errors] == ([41] if policy == "raise" else [])
    assert len(caplog.messages) == (policy != "raise")
    assert [error.index for error in asked] == ([41] if policy == "callable" else [])


class TextRaises(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class ExitsWhenRebuilt(Exception):
    def __reduce__(self):
        return sys.exit, (9,)


class Panic(BaseException):
    """As extension modules written in Rust raise it."""


@pytest.mark.parametrize(
    "kind",
    [
        TextRaises,
        ExitsWhenRebuilt,
        Panic,
        GeneratorExit,
        StopIteration,
        MemoryError,
        ExceptionGroup,
    ],
)
@pytest.mark.parametrize("loader_count", [0, 1])
def test_an_exception_of_any_kind_is_skipped(loader_count, kind):
    def fail_at_seven(number, arrays, seed):
        if number == 7:
            raise kind("many", [ValueError(threading.Lock())]) if kind is ExceptionGroup else kind
        arrays["x"][:] = 1

    batches, stats = loaded(loader=fail_at_seven, loader_count=loader_count)
    assert batches[1].mask.tolist() == [True, True, True, False]
    assert kind.__name__ in str(batches[1].skipped[3])
    assert (stats.items_delivered, stats.items_skipped) == (39, 1)


@pytest.mark.parametrize("policy", ["drop_batch", "skip_item", "callable"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_a_loader_function_is_raised_whatever_the_policy(kind, policy):
    def leave_at_seven(number, arrays, seed):
        if number == 7:
            raise kind

    on_error = (lambda error: None) if policy == "callable" else policy
    with (
        Dataloader(leave_at_seven, group(), on_error=on_error, timeout_sec=TIMEOUT_S) as dataloader,
        pytest.raises(LoaderError, match=kind.__name__) as caught,
    ):
        list(map(Batch.copy, dataloader))
    assert caught.value.index == 7
    with (
        Dataloader(leave_at_seven, group(), on_error=on_error, loader_count=0) as dataloader,
        pytest.raises(kind),
    ):
        list(map(Batch.copy, dataloader))


@pytest.mark.parametrize("policy", ["drop_batch", "skip_item"])
def test_a_startup_that_fails_is_raised_whatever_the_policy(policy):
    def start_up():
        raise OSError("no data server")

    with (
        Dataloader(load, group(), on_error=policy, startup_func=start_up) as dataloader,
        pytest.raises(LoaderError, match=r"(?s)startup_func.*no data server"),
    ):
        next(dataloader)


def test_a_result_that_cannot_be_pickled_costs_its_item_alone():
    def load_with_lock(number, arrays, seed):
        arrays["x"][:] = number + 1
        arrays["y"][...] = number + 1
        return {"number": threading.Lock() if is_bad(number) else number, "seed": seed}

    batches, stats = loaded(loader=load_with_lock, loader_count=2)
    for batch in batches:
        check(batch)
    assert stats.items_skipped == 4
    assert "sending the result of item 7" in str(batches[1].skipped[3])


def raise_when_rebuilt():
    raise RuntimeError("cannot be rebuilt")


class NotRebuilt:
    def __reduce__(self):
        return raise_when_rebuilt, ()


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("loader_count", [0, 2])
def test_a_result_that_cannot_be_rebuilt_costs_its_item_alone(loader_count, batched):
    def load_strange(number, arrays, seed):
        arrays["x"][:] = number + 1
        arrays["y"][...] = number + 1
        return {"number": NotRebuilt() if is_bad(number) else number, "seed": seed}

    def load_strange_run(numbers, arrays, seeds):
        arrays["x"][:] = np.asarray(numbers)[:, None] + 1
        arrays["y"][:] = np.asarray(numbers) + 1
        found = [NotRebuilt() if is_bad(number) else int(number) for number in numbers]
        return {"number": found, "seed": list(seeds)}

    batches, stats = loaded(
        loader=load_strange_run if batched else load_strange,
        loader_count=loader_count,
        batched=batched,
    )
    for batch in batches:
        check(batch)
    assert (stats.items_delivered, stats.items_skipped, stats.items_dropped) == (36, 4, 0)
    assert "sending the result of item 7" in str(batches[1].skipped[3])
    assert isinstance(batches[1].skipped[3].__cause__, RuntimeError)


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_value_that_does_not_fit_costs_its_item_alone(batched):
    def load_wide(number, arrays, seed):
        arrays["x"][:] = number + 1
        arrays["y"][...] = 2**40 if is_bad(number) else number + 1
        return {"number": number, "seed": seed}

    def load_wide_run(numbers, arrays, seeds):
        arrays["x"][:] = np.asarray(numbers)[:, None] + 1
        arrays["y"][:] = [2**40 if is_bad(number) else number + 1 for number in numbers]
        return {"number": list(map(int, numbers)), "seed": list(seeds)}

    batches, stats = loaded(
        group(arrays=CONVERTED), loader=load_wide_run if batched else load_wide, batched=batched
    )
    for batch in batches:
        check(batch)
    assert isinstance(batches[1].skipped[3].__cause__, ValueRangeError)
    assert stats.items_skipped == 4


def test_what_a_failed_item_left_is_not_converted():
    def load_and_fail(number, arrays, seed):
        arrays["x"][:] = number + 1
        arrays["y"][...] = 2**40 if is_bad(number) else number + 1
        if is_bad(number):
            raise OSError("after all was written")
        return {"number": number, "seed": seed}

    batches, stats = loaded(group(arrays=CONVERTED), loader=load_and_fail, loader_count=2)
    for batch in batches:
        check(batch)
    assert isinstance(batches[1].skipped[3].__cause__, OSError)
    assert (stats.items_delivered, stats.items_skipped) == (36, 4)


def test_zeros_are_zero_bytes_in_every_dtype():
    names = ["bool", "uint8", "float16", "complex64", "bfloat16", "float8_e8m0fnu", "int4"]
    dtypes = [np.dtype(getattr(ml_dtypes, name, name)) for name in names]
    arrays = {name: ((2, 0), dtype, dtype) for name, dtype in zip(names, dtypes, strict=True)}
    arrays |= {f"{name} 5": ((5,), dtype, dtype) for name, dtype in zip(names, dtypes, strict=True)}
    arrays["to"] = ((2,), np.float32, ml_dtypes.float8_e8m0fnu)

    def load_ones(number, views, seed):
        for view in views.values():
            view[...] = 1
        if number % 2:
            raise OSError

    batches, _ = loaded(group(size=4, arrays=arrays), loader=load_ones, end_at=("epoch", 2))
    assert len(batches) == 20
    for batch in batches:
        assert batch.valid_count == sum(index % 2 == 0 for index in batch.indices)
        for array in batch.arrays.values():
            for index, item in zip(batch.indices, np.asarray(array), strict=True):
                is_written = item.tobytes().strip(b"\0") != b""
                assert is_written == (index % 2 == 0 and item.size > 0)


class SomeMissing:
    """Data of which some items cannot be had."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if is_bad(index):
            raise OSError(f"no descriptor {index}")
        return index


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_data_whose_item_cannot_be_had_costs_the_item(batched):
    data = DataGroup(4, SomeMissing(), loader_arrays=PLAIN)
    batches, stats = loaded(data, loader=load_run if batched else load, batched=batched)
    for batch in batches:
        check(batch)
    assert stats.items_skipped == 4
    assert "descriptor cannot be had" in str(batches[1].skipped[3])


def test_a_batched_loader_is_called_again_for_each_item_of_a_run_that_failed():
    def load_and_tell(numbers, arrays, seeds):
        if any(map(is_bad, numbers)):
            raise OSError
        return {"calls": [len(numbers)] * len(numbers)}

    batches, _ = loaded(loader=load_and_tell, batched=True)
    assert batches[0].additional["calls"] == [4, 4, 4, 4]
    assert batches[1].additional["calls"] == [1, 1, 1, None]


def test_kept_skipped_errors_keep_no_slot():
    kept = []
    with Dataloader(
        load, group(items=400), depth=2, end_at=("epoch", 1), on_error="skip_item", timeout_sec=20
    ) as dataloader:
        for batch in dataloader:
            kept.append(batch.skipped)
            del batch
    assert len(kept) == 100
    assert sum(map(len, kept)) == 40


def signature(batch):
    return (
        type(batch).__name__,
        batch._planned[2:],
        {name: np.asarray(array).tobytes() for name, array in batch.arrays.items()},
        batch.mask.tolist(),
        {key: list(values) for key, values in batch.additional.items()},
        {item: error.index for item, error in batch.skipped.items()},
    )


def test_a_resumed_run_skips_the_same_items():
    def load_with_luck(number, arrays, seed):
        arrays["x"][:] = seed if seed is not None else number
        if number >= 8 and (number % 3 == 0 or 12 <= number < 15):
            raise OSError
        arrays["y"][...] = number
        return {"number": number}

    def make(**options):
        training = DataGroup(
            3, range(20), loader_arrays=PLAIN, remainder="pad", shuffle_later="batchwise"
        )
        validation = ("batch", 4, group(items=10, size=4, remainder="short"))
        return Dataloader(
            load_with_luck,
            training,
            validation=validation,
            on_error="skip_item",
            end_at=("epoch", 3),
            timeout_sec=TIMEOUT_S,
            **options,
        )

    whole, states = [], []
    with make(loader_count=2) as dataloader:
        states.append(dataloader.get_state())
        for batch in dataloader:
            whole.append(signature(batch))
            states.append(dataloader.get_state())
            del batch
    assert any(entry[5] for entry in whole)
    for done in range(0, len(whole) + 1, 3):
        dataloader = make(loader_count=done % 4, depth=1 + done % 3)
        dataloader.set_state(states[done])
        with dataloader:
            assert [signature(batch) for batch in map(Batch.copy, dataloader)] == whole[done:]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_items_are_skipped_under_every_start_method(start_method):
    batches, stats = loaded(start_method=start_method, loader_count=2)
    for batch in batches:
        check(batch)
    assert stats.items_skipped == 4


def test_a_worker_that_dies_is_no_skipped_item():
    from hydrax import WorkerDiedError

    def die_at_seven(number, arrays, seed):
        if number == 7:
            os._exit(3)

    with pytest.raises(WorkerDiedError):
        loaded(loader=die_at_seven)
