"""Training groups mixed by weight: exact shares at any moment, wherever one starts."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydrax import DataGroup, Dataloader, StateError
from hydrax._mixing import Mixture, check_weights

ARRAYS = {"x": ((2,), np.int32, np.int32)}
quick = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
weights_of = st.lists(
    st.one_of(st.integers(1, 9), st.floats(0.01, 100.0), st.just(math.pi)),
    min_size=1,
    max_size=7,
)


def load(number, arrays, seed):
    arrays["x"][:] = number, -1 if seed is None else seed


def group(count, batch_size=1, start=0, **options):
    numbers = range(start, start + count)
    return DataGroup(batch_size, numbers, loader_arrays=ARRAYS, **options)


def make(training, **options):
    return Dataloader(load, training, loader_count=0, **options)


def first_batches(dataloader, count=None):
    """What identifies each of the next batches, and what they hold."""
    found = []
    for batch in itertools.islice(dataloader, count):
        kind = (batch.epoch, batch.epoch_batch, batch.batch_num) if batch.is_training else None
        numbers = np.asarray(batch.arrays["x"]).tolist()
        found.append((batch.is_training, batch.group_number, kind, numbers))
        del batch
    return found


@quick
@given(weights=weights_of, start=st.integers(0, 10**12))
def test_every_prefix_holds_each_group_to_less_than_one_batch_of_its_share(weights, start):
    mixture = Mixture(check_weights(weights, len(weights)))
    total = sum(mixture.weights)
    unit = max(2 * len(weights) - 2, 1)
    for begin in (0, start):
        counts = [None] * len(weights)
        for step, (index, before) in enumerate(
            itertools.islice(mixture.picks(begin), 300), begin + 1
        ):
            # Which batch of its group it is leaves nothing out, and adds up to the step.
            assert counts[index] in (None, before)
            counts[index] = before + 1
            for other, count in enumerate(counts):
                if count is not None:
                    deviation = abs(count * total - step * mixture.weights[other])
                    assert deviation * unit <= (unit - 1) * total
        if None not in counts:
            assert sum(counts) == begin + 300


@quick
@given(weights=weights_of, start=st.integers(0, 2000))
def test_the_sequence_is_the_same_from_wherever_it_starts(weights, start):
    mixture = Mixture(check_weights(weights, len(weights)))
    whole = itertools.islice(mixture.picks(0), start, start + 40)
    assert list(itertools.islice(mixture.picks(start), 40)) == list(whole)


@quick
@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=6),
    end=st.sampled_from(["first_exhausted", "all_exhausted"]),
)
def test_an_epoch_ends_with_the_batch_that_exhausts_the_first_or_the_last_group(groups, end):
    weights = check_weights([weight for weight, _ in groups], len(groups))
    wanted = [count for _, count in groups]
    counts = [0] * len(groups)
    is_over = any if end == "first_exhausted" else all
    length = 0
    for index, _ in Mixture(weights).picks(0):
        length += 1
        counts[index] += 1
        if is_over(count >= want for count, want in zip(counts, wanted, strict=True)):
            break
    assert Mixture(weights).epoch_length(wanted, end) == length


def test_equal_weights_take_turns():
    picks = [index for index, _ in itertools.islice(Mixture([1, 1, 1]).picks(0), 9)]
    assert picks == [0, 1, 2] * 3


@pytest.mark.parametrize(
    ("given_weights", "expected"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([6, 3], (2, 1)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
        (np.array([0.5, 1.5], np.float32), (1, 3)),
        ((1e-300, 3e-300), (1, 3)),
    ],
)
def test_weights_are_proportions_in_whatever_unit(given_weights, expected):
    assert check_weights(given_weights, len(given_weights)) == expected


def test_groups_and_their_weights_can_have_names():
    wiki, code = group(6), group(6, start=100)
    options = {"end_at": ("batch", 8), "validation": ("epoch", 1, {"held out": group(1)})}
    with make([wiki, code], weights=[3, 1], **options) as dataloader:
        expected = first_batches(dataloader)
    with make({"wiki": wiki, "code": code}, weights={"code": 1, "wiki": 3}, **options) as loader:
        state = loader.get_state()
        assert first_batches(loader) == expected
    make([wiki, code], weights=[3, 1], **options).set_state(state)
    with make({"wiki": wiki, "code": code}, end_at=("epoch", 1)) as dataloader:
        assert Counter(index for _, index, _, _ in first_batches(dataloader)) == {0: 6, 1: 6}


@pytest.mark.parametrize(
    ("training", "weights", "error", "words"),
    [
        (dict, {"a": 1}, ValueError, "weights has the names 'a', .* are 'a', 'b'; expected the sa"),
        (dict, {"a": 1, "c": 1}, ValueError, "weights has the names 'a', 'c', and the"),
        (dict, {"a": 1, "b": 0}, ValueError, r"weights\['b'\] is 0; it must be above 0"),
        (list, {"a": 1, "b": 1}, TypeError, "names 'a', 'b', and the training groups have none"),
        (set, [1, 1], TypeError, "training is a set, which has no order; give a list"),
    ],
)
def test_names_that_do_not_go_together_are_refused(training, weights, error, words):
    named = {"a": group(4), "b": group(4)}
    with pytest.raises(error, match=words):
        make(named if training is dict else training(named.values()), weights=weights)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weights": [1]}, ValueError, "1 numbers for 2 training groups"),
        ({"weights": [1, 0]}, ValueError, r"weights\[1\] is 0; it must be above 0"),
        ({"weights": [1, -2.5]}, ValueError, r"weights\[1\] is -2.5"),
        ({"weights": [math.nan, 1]}, ValueError, r"weights\[0\] is nan"),
        ({"weights": [1, math.inf]}, ValueError, "finite"),
        ({"weights": [1, 1e-6]}, ValueError, r"weights\[1\] is less than a hundred-thousandth"),
        ({"weights": [1, "2"]}, TypeError, r"weights\[1\] is '2'"),
        ({"weights": [True, 1]}, TypeError, r"weights\[0\] is True"),
        ({"weights": "ab"}, TypeError, "weights is 'ab'"),
        ({"weights": 1.0}, TypeError, "expected one number for each"),
        ({"weights": [1, 1], "interleave_groups": False}, ValueError, "interleave_groups"),
        ({"weights": [1, 1], "epoch_end": "shortest"}, ValueError, "first_exhausted"),
        ({"weights": [1, 1], "epoch_end": 0}, ValueError, "epoch_end is 0"),
        ({"weights": [1, 1], "epoch_end": 2.0}, TypeError, "epoch_end is 2.0"),
        ({"epoch_end": 7}, ValueError, "give weights"),
    ],
)
def test_weights_that_cannot_be_are_refused_when_the_dataloader_is_made(arguments, error, words):
    with pytest.raises(error, match=words):
        make([group(4), group(4)], **arguments)


@pytest.mark.parametrize(
    ("epoch_end", "length"),
    # 3 of 4 batches are of group 0, which has 6; group 1 has 5.
    [("first_exhausted", 8), ("all_exhausted", 19), (None, 19), (11, 11)],
)
def test_epochs_end_when_asked(epoch_end, length):
    groups = [group(6, shuffle_first=True), group(5, start=100)]
    with make(groups, weights=[3, 1], epoch_end=epoch_end, end_at=("epoch", 3)) as dataloader:
        assert dataloader.batches_per_epoch == length
        assert dataloader.last_batch == 3 * length
        batches = first_batches(dataloader)
    assert [batch[2] for batch in batches] == [
        (i // length, i % length, i) for i in range(3 * length)
    ]


def test_a_group_that_is_gone_through_starts_over_in_a_new_order_with_new_seeds():
    groups = [group(50, 5, shuffle_first=True), group(400, 5, start=1000)]
    with make(groups, weights=[1, 1], end_at=("epoch", 1)) as dataloader:
        batches = first_batches(dataloader)
    rows = [row for _, index, _, rows in batches if index == 0 for row in rows]
    passes = [rows[start : start + 50] for start in range(0, 400, 50)]
    assert len(passes) == 8
    for each in passes:
        assert sorted(number for number, _ in each) == list(range(50))
    assert len({tuple(number for number, _ in each) for each in passes}) == 8
    assert len({seed for each in passes for _, seed in each}) == 400


def test_groups_go_on_across_the_end_of_an_epoch():
    """No item of a large group waits for ever because epochs are short."""
    groups = [group(4), group(30, start=100)]
    options = {"weights": [1, 1], "epoch_end": "first_exhausted", "end_at": ("epoch", 10)}
    with make(groups, **options) as dataloader:
        batches = first_batches(dataloader)
    seen = Counter(rows[0][0] for _, index, _, rows in batches if index == 1)
    assert set(seen) == set(range(100, 130))
    assert max(seen.values()) - min(seen.values()) <= 1


groups_of = st.lists(
    st.tuples(
        st.integers(1, 17),
        st.integers(1, 5),
        st.sampled_from(["repeat", "reseed", "itemwise", "batchwise"]),
        st.booleans(),
        st.sampled_from(["drop", "pad", "short"]),
        st.floats(0.05, 4.0),
    ),
    min_size=1,
    max_size=4,
)


@settings(quick, max_examples=60)
@given(
    specs=groups_of,
    epoch_end=st.sampled_from(["first_exhausted", "all_exhausted", 5]),
    validation=st.none() | st.tuples(st.sampled_from(["epoch", "batch"]), st.integers(1, 4)),
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
def test_resuming_at_any_point_gives_the_uninterrupted_run(specs, epoch_end, validation, stops):
    def new(depth):
        groups = [
            DataGroup(
                size,
                range(1000 * i, 1000 * i + count),
                loader_arrays=ARRAYS,
                seed=i,
                shuffle_later=later,
                shuffle_first=first,
                remainder=remainder,
            )
            for i, (count, size, later, first, remainder, _) in enumerate(specs)
        ]
        return make(
            groups,
            weights=[spec[-1] for spec in specs],
            epoch_end=epoch_end,
            validation=None if validation is None else (*validation, group(5, 2, start=9000)),
            end_at=("batch", 40),
            depth=depth,
        )

    with new(2) as dataloader:
        whole = first_batches(dataloader)
    pieces, state = [], None
    for stop in [*stops, None]:
        dataloader = new(1 + len(pieces) % 3)
        if state is not None:
            dataloader.set_state(json.loads(json.dumps(state)))
        with dataloader:
            pieces += first_batches(dataloader, stop)
            state = dataloader.get_state()
    assert pieces == whole


def test_the_workers_load_what_the_main_process_does():
    def run(**options):
        groups = [group(30, 4, shuffle_first=True), group(9, 2, start=100), group(5, start=200)]
        with Dataloader(load, groups, weights=[4, 2, 1], end_at=("batch", 40), **options) as loader:
            return first_batches(loader)

    assert run(loader_count=2, depth=4) == run(loader_count=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": [3, 2]}, r"weights was \[2, 1\] and is \[3, 2\]"),
        ({"epoch_end": 9}, "epoch_end was 'all_exhausted' and is 9"),
        ({"weights": None}, r"weights was \[2, 1\] and is None"),
    ],
)
def test_a_state_of_other_weights_is_refused_by_name(change, words):
    groups = [group(7), group(7)]
    state = make(groups, weights=[2, 1]).get_state()
    make(groups, weights=[4, 2.0]).set_state(state)
    with pytest.raises(StateError, match=words):
        make(groups, **({"weights": [2, 1]} | change)).set_state(state)


def test_going_on_at_batch_a_thousand_million_takes_no_longer_than_at_the_first():
    groups = [group(10**6, 4, shuffle_first=True), group(3000, 4), group(10**7, 4)]
    took = {}
    for position in (100, 10**9):
        dataloader = make(groups, weights=[0.6, 0.3, 0.1])
        state = dataloader.get_state() | {"training_batches": position}
        begin = time.process_time()
        dataloader.set_state(state)
        with dataloader:
            batch = next(dataloader)
        took[position] = time.process_time() - begin
        assert batch.batch_num == position
    assert took[10**9] < 5 * took[100] + 0.1
