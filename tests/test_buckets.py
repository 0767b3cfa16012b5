"""Buckets and packs: each item in exactly one, nothing longer than it may be."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrax import DataGroup, Dataloader, Ragged, bucket_by_length, pack_sequences


def arrays(length):
    return {"x": Ragged((length,), np.int32)}


def buckets(lengths, boundaries, batch_sizes=4, data=None, **options):
    data = [f"item{i}" for i in range(len(lengths))] if data is None else data
    options = {"loader_arrays": arrays, "remainder": "short"} | options
    return bucket_by_length(data, lengths, boundaries, batch_sizes, **options)


lengths_of = st.lists(st.integers(0, 30), min_size=1, max_size=80)


@settings(max_examples=150, deadline=None)
@given(
    lengths=lengths_of,
    inner=st.sets(st.integers(0, 29), max_size=5),
    kind=st.sampled_from(["list", "range", "array"]),
)
def test_each_item_is_in_exactly_the_bucket_of_its_length(lengths, inner, kind):
    boundaries = [*sorted(inner), 30]
    data = {
        "list": [f"item{i}" for i in range(len(lengths))],
        "range": range(100, 100 + 3 * len(lengths), 3),
        "array": np.arange(len(lengths)) * 7,
    }[kind]
    length_of = dict(zip(list(data), lengths, strict=True))
    found = Counter()
    for group in buckets(lengths, boundaries, data=data):
        (boundary,) = group.loader_layouts["x"].shape[1:]
        below = max((edge for edge in boundaries if edge < boundary), default=-1)
        for item in group:
            assert below < length_of[item] <= boundary
            found[item] += 1
    assert found == Counter(list(data))


def test_buckets_load_with_few_shapes_and_one_compilation_each():
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    traces = []

    @jax.jit
    def total(x):
        traces.append(x.shape)
        return x.sum(axis=1)

    def load(index, arrays, seed):
        arrays["x"].write(np.full(lengths[index], index, np.int32))

    groups = buckets(lengths, [8, 16, 64], [32, 16, 4], range(500), remainder="pad", seed=3)
    sums = {}
    with Dataloader(load, groups, loader_count=0, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            sums |= dict(zip(batch.data, total(batch.arrays["x"]).tolist(), strict=True))
            assert batch.group.seed == 3
            del batch
    assert sums == {i: int(lengths[i] * i) for i in range(500)}
    assert sorted(traces) == [(4, 64), (16, 16), (32, 8)]


def test_buckets_without_items_are_left_out():
    groups = buckets([1, 2, 20], [4, 8, 16, 32], [1, 2, 3, 4])
    assert [group.loader_layouts["x"].shape[1] for group in groups] == [4, 32]
    assert [group.batch_size for group in groups] == [1, 1]


def test_an_item_above_the_last_boundary_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"item 1 \('item1'\) has length 9; .* room is 8"):
        buckets([3, 9, 12], [4, 8])


def test_items_above_the_last_boundary_are_left_out_if_asked(caplog):
    with caplog.at_level(logging.WARNING, "hydrax"):
        groups = buckets([3, 9, 12, 7], [4, 8], too_long="drop")
    assert [list(group) for group in groups] == [["item0"], ["item3"]]
    assert "2 of 4 items are longer than 8" in caplog.text


def test_items_above_the_last_boundary_are_cut_off_if_asked():
    groups = buckets([3, 9, 12], [4, 8], too_long="truncate")
    assert [list(group) for group in groups] == [["item0"], ["item1", "item2"]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1, 2], [], 4), ValueError, "ascending"),
        (([1, 2], [4, 4], 4), ValueError, "ascending"),
        (([1, 2], [8, 4], 4), ValueError, "ascending"),
        (([1, 2], [4, 8], [4]), ValueError, "1 numbers for 2 boundaries"),
        (([1, -2], [4, 8], 4), ValueError, r"lengths\[1\] is -2"),
        (([1.0, 2.0], [4, 8], 4), TypeError, "float64"),
        (([[1], [2]], [4, 8], 4), TypeError, r"shape \(2, 1\)"),
        (([1, 2], ["a"], 4), TypeError, "a boundary"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        buckets(*arguments)


def test_lengths_for_other_items_are_refused():
    with pytest.raises(ValueError, match="3 numbers for 2 items"):
        buckets([1, 2, 3], [4], data=["a", "b"])
    with pytest.raises(ValueError, match="too_long is 'cut'"):
        buckets([1], [4], too_long="cut")
    with pytest.raises(ValueError, match="no item is left"):
        buckets([5], [4], too_long="drop")
    with pytest.raises(TypeError, match="loader_arrays is no function"):
        buckets([1], [4], loader_arrays=arrays(4))


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_of, room=st.integers(30, 70), keep_order=st.booleans())
def test_each_sequence_is_in_exactly_one_pack_and_fits(lengths, room, keep_order):
    plan = pack_sequences(lengths, room, keep_order=keep_order)
    packs = [pack.tolist() for pack in plan]
    assert packs == [plan[i].tolist() for i in range(len(plan))]
    assert packs == [pack.tolist() for pack in plan[:]]
    assert packs[-1] == plan[-1].tolist()
    members = [index for pack in packs for index in pack]
    assert sorted(members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= room for pack in packs)
    if keep_order:
        assert members == sorted(members)
        for one, other in itertools.pairwise(packs):
            assert sum(lengths[index] for index in one) + lengths[other[0]] > room
    else:
        # No two packs could be one: the least that filling up what has room gives.
        fills = sorted(sum(lengths[index] for index in pack) for pack in packs)
        assert len(fills) < 2 or fills[0] + fills[1] > room
    assert plan.fill == pytest.approx(sum(lengths) / (len(plan) * room))


def test_packing_by_fit_wastes_little():
    lengths = np.random.default_rng(0).integers(1, 300, 20_000)
    begin = time.process_time()
    plan = pack_sequences(lengths, 512)
    assert time.process_time() - begin < 3
    assert len(plan) <= math.ceil(lengths.sum() / 512 * 1.01)
    assert len(pack_sequences(lengths, 512, keep_order=True)) > len(plan)


def test_a_sequence_longer_than_a_pack_is_refused_left_out_or_cut_off(caplog):
    with pytest.raises(ValueError, match=r"item 1 has length 9; .* room is 8"):
        pack_sequences([3, 9], 8)
    assert [pack.tolist() for pack in pack_sequences([3, 9], 8, too_long="drop")] == [[0]]
    plan = pack_sequences([3, 9], 8, too_long="truncate")
    assert [pack.tolist() for pack in plan] == [[1], [0]]
    assert plan.lengths.tolist() == [3, 8]
    with pytest.raises(ValueError, match="no sequence"):
        pack_sequences([], 8)


def test_packs_are_the_items_of_a_group():
    def load(pack, arrays, seed):
        arrays["x"].write(pack)

    plan = pack_sequences([4, 2, 3, 3], 6)
    group = DataGroup(2, plan, loader_arrays={"x": Ragged((4,), np.int32)})
    with Dataloader(load, group, loader_count=0, end_at=("epoch", 1)) as dataloader:
        assert [batch.arrays["x"].tolist() for batch in dataloader] == [
            [[0, 1, 0, 0], [2, 3, 0, 0]]
        ]
    with pytest.raises(IndexError):
        plan[2]
