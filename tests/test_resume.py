"""A run that goes on from a state delivers what the uninterrupted run would have."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydrax import Batch, DataGroup, Dataloader, StateError

ARRAYS = {"x": ((3,), np.int32, np.int32)}


def load(number, arrays, seed):
    arrays["x"][:] = (number, -1 if seed is None else seed, number * 7)
    return {"number": number} if number % 3 == 0 else None


def load_or_fail(number, arrays, seed):
    if number % 11 == 5:
        raise OSError("cannot be read")
    return load(number, arrays, seed)


def make(training, validation, loader=load, **changes):
    """A Dataloader over groups given as (items, batch size, later, first, remainder)."""

    def group(spec, start, seed):
        items, size, later, first, remainder = spec
        return DataGroup(
            size,
            range(start, start + items),
            loader_arrays=ARRAYS,
            seed=seed,
            shuffle_first=first,
            shuffle_later=later,
            remainder=remainder,
        )

    arguments = {"loader_count": 0, "end_at": ("epoch", 3)} | changes
    return Dataloader(
        loader,
        [group(spec, 1000 * i, i) for i, spec in enumerate(training)],
        validation=None
        if validation is None
        else (
            validation[0],
            validation[1],
            [group(spec, 5000 + 1000 * i, i) for i, spec in enumerate(validation[2])],
        ),
        **arguments,
    )


def content(batch):
    return (
        type(batch).__name__,
        batch.group_number,
        np.asarray(batch.arrays["x"]).tobytes(),
        list(batch.indices),
        batch.mask.tolist(),
        dict(batch.additional),
        (batch.epoch, batch.epoch_batch, batch.batch_num, batch.seed)
        if batch.is_training
        else (batch.validation_epoch, batch.validation_epoch_batch, batch.validation_batch_num),
    )


def run(dataloader, count=None):
    """Contents of the next batches."""
    return list(map(content, map(Batch.copy, itertools.islice(dataloader, count))))


groups = st.tuples(
    st.integers(1, 23),
    st.integers(1, 6),
    st.sampled_from(["repeat", "reseed", "itemwise", "batchwise"]),
    st.booleans(),
    st.sampled_from(["drop", "pad", "short"]),
)
validations = st.none() | st.tuples(
    st.sampled_from(["epoch", "batch"]), st.integers(1, 4), st.lists(groups, min_size=1, max_size=2)
)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.slow
@pytest.mark.timeout(240)
@given(
    training=st.lists(groups, min_size=1, max_size=3),
    validation=validations,
    interleave=st.booleans(),
    policy=st.sampled_from(["raise", "drop_batch", "skip_item"]),
    stops=st.lists(st.integers(0, 25), min_size=1, max_size=3),
)
def test_resuming_again_and_again_gives_the_uninterrupted_run(
    training, validation, interleave, policy, stops
):
    options = {"interleave_groups": interleave, "on_error": policy}
    if policy != "raise":
        options["loader"] = load_or_fail
    with make(training, validation, **options) as dataloader:
        whole = run(dataloader)
    pieces = []
    state = None
    for stop in [*stops, None]:
        dataloader = make(training, validation, depth=1 + len(pieces) % 3, **options)
        if state is not None:
            dataloader.set_state(json.loads(json.dumps(state)))
        with dataloader:
            pieces += run(dataloader, stop)
            state = dataloader.get_state()
    assert pieces == whole


SPECS = ([(23, 4, "itemwise", True, "pad"), (9, 2, "batchwise", False, "short")],
         ("batch", 3, [(5, 2, "default", False, "short")]))  # fmt: skip


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("stop", [0, 5, 17])
def test_a_state_goes_on_under_another_worker_count_and_start_method(start_method, stop):
    with make(*SPECS, loader_count=1) as dataloader:
        whole = run(dataloader)
    with make(*SPECS, loader_count=2, depth=5) as dataloader:
        before = run(dataloader, stop)
        state = dataloader.get_state()
    dataloader = make(*SPECS, loader_count=3, start_method=start_method, depth=2)
    dataloader.set_state(state)
    with dataloader:
        after = run(dataloader)
    assert before + after == whole


@pytest.mark.parametrize("loader_count", [0, 2])
def test_set_state_inside_the_block_goes_back_and_forth(loader_count):
    with make(*SPECS, loader_count=loader_count) as dataloader:
        states = [dataloader.get_state()]
        whole = []
        for batch in dataloader:
            whole.append(content(batch.copy()))
            del batch
            states.append(dataloader.get_state())
        for stop in (7, 0, 12):
            dataloader.set_state(states[stop])
            assert run(dataloader) == whole[stop:]


def test_arrays_of_before_set_state_stay_as_they_are():
    with make(*SPECS, loader_count=1) as dataloader:
        batch = next(dataloader)
        expected = content(batch)
        dataloader.set_state(dataloader.get_state())
        run(dataloader)
        assert content(batch) == expected


def test_a_state_is_small_json():
    with make(*SPECS) as dataloader:
        run(dataloader, 9)
        text = json.dumps(dataloader.get_state())
    assert len(text) < 4000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((24, 4, "itemwise", True, "pad"), "item count of training group 0"),
        ((23, 5, "itemwise", True, "pad"), "batch_size of training group 0"),
        ((23, 4, "reseed", True, "pad"), "shuffle_later of training group 0"),
        ((23, 4, "itemwise", False, "pad"), "shuffle_first of training group 0"),
        ((23, 4, "itemwise", True, "drop"), "remainder of training group 0"),
    ],
)
def test_a_state_of_other_arguments_is_refused_by_name(change, words):
    state = make(*SPECS).get_state()
    dataloader = make([change, SPECS[0][1]], SPECS[1])
    with pytest.raises(StateError, match=words):
        dataloader.set_state(state)


def test_a_state_of_other_data_is_refused():
    def group(start):
        return DataGroup(2, [f"{start}/{i}.png" for i in range(9)], loader_arrays=ARRAYS)

    state = Dataloader(load, group("a")).get_state()
    with pytest.raises(StateError, match="data of training group 0"):
        Dataloader(load, group("b")).set_state(state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "get_state"),
        (None, "get_state"),
        ({"hydrax_state_version": 99}, "version 99"),
        ({"hydrax_state_version": 1}, "damaged"),
    ],
)
def test_what_is_no_state_is_refused(state, words):
    with pytest.raises(StateError, match=words):
        make(*SPECS).set_state(state)


def test_a_negative_position_is_refused():
    dataloader = make(*SPECS)
    state = dataloader.get_state() | {"training_batches": -1}
    with pytest.raises(StateError, match="position"):
        dataloader.set_state(state)


def test_a_loader_that_may_change_the_order_has_no_state():
    dataloader = make(*SPECS, deterministic=False)
    with pytest.raises(RuntimeError, match="deterministic"):
        dataloader.get_state()


def test_going_on_at_batch_a_thousand_million_is_planned_at_once():
    group = DataGroup(4, range(10**6), loader_arrays=ARRAYS, shuffle_first=True)
    dataloader = Dataloader(load, group, loader_count=0)
    dataloader.set_state(dataloader.get_state() | {"training_batches": 10**9})
    with dataloader:
        batch = next(dataloader)
        assert batch.batch_num == 10**9


def test_a_state_goes_through_orbax(tmp_path):
    script = """
import sys, orbax.checkpoint as ocp
from tests_resume_helper import make_loader
path = sys.argv[1]
dataloader = make_loader()
with dataloader:
    for _ in range(3):
        next(dataloader)
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.JsonSave(dataloader.get_state()))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.JsonRestore())
    expected = next(dataloader).arrays["x"].tolist()
again = make_loader()
again.set_state(restored)
with again:
    assert next(again).arrays["x"].tolist() == expected
"""
    helper = """
import numpy as np
from hydrax import DataGroup, Dataloader
def load(number, arrays, seed):
    arrays["x"][...] = number
def make_loader():
    arrays = {"x": ((), np.int32, np.int32)}
    return Dataloader(load, DataGroup(2, range(50), loader_arrays=arrays, shuffle_first=True))
"""
    (tmp_path / "tests_resume_helper.py").write_text(helper)
    (tmp_path / "main.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "main.py", str(tmp_path / "checkpoints")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
