"""Programs written for Hydrax 0.2.2 run unchanged.

What is expected here was seen of 0.2.2, on a CPU. Numbers that it drew are not part of that.
"""

from __future__ import annotations

import numpy as np
import pytest

from hydrax import DataGroup, Dataloader

ARRAYS = {"x": ((3,), np.float32, np.float32), "n": ((1,), np.int32, np.int32)}


def load(number, arrays, seed):
    arrays["x"][:] = arrays["n"][:] = number
    if number == 4:
        return None
    return {"number": number, "none": None} | ({"odd": True} if number % 2 else {})


def numbers(count=10, start=0, **options):
    options = {"loader_arrays": ARRAYS} | options
    return DataGroup(2, range(start, start + count), **options)


def batches(training, look, **options):
    """What look returns of each batch."""
    with Dataloader(load, training, loader_count=0, **options) as dataloader:
        return [look(batch) for batch in dataloader]


def test_group_index_counts_the_batches_of_each_group():
    def look(batch):
        return batch.is_training, batch.group_index, int(batch.arrays["n"][0, 0])

    found = batches(
        [numbers(6), numbers(4, 100)],
        look,
        interleave_groups=False,
        validation=("epoch", 1, [numbers(4, 1000), numbers(2, 1100)]),
        end_at=("epoch", 1),
    )
    assert found == [
        (True, 0, 0), (True, 1, 2), (True, 2, 4), (True, 0, 100), (True, 1, 102),
        (False, 0, 1000), (False, 1, 1002), (False, 0, 1100),
    ]  # fmt: skip


def test_group_index_stays_with_a_batch_that_is_shuffled_as_a_whole():
    def look(batch):
        return batch.group_index, int(batch.arrays["n"][0, 0])

    found = batches(numbers(12, shuffle_later="batchwise"), look, end_at=("epoch", 3))
    order = [(index, 2 * index) for index in range(6)]
    assert found[:6] == order
    assert found[6:12] != order != found[12:] != found[6:12]
    assert sorted(found[6:12]) == sorted(found[12:]) == order


def test_group_index_is_the_place_in_an_epoch_of_items_that_are_shuffled():
    found = batches(numbers(6), lambda batch: batch.group_index, end_at=("epoch", 2))
    assert found == [0, 1, 2, 0, 1, 2]


def test_get_additional_fills_in_the_default_item_by_item():
    def look(batch):
        return (
            batch.get_additional("odd"),
            batch.get_additional("odd", default=9),
            batch.get_additional("odd", 0, default=9),
            batch.get_additional("odd", 1, default=9),
            batch.get_additional("odd", -1),
            batch.get_additional("missing"),
            batch.get_additional("missing", default=9),
            batch.get_additional("missing", 0, default=9),
            batch.get_additional("none", default=9),
        )

    found = batches(numbers(2), look, end_at=("epoch", 1))
    missing = [None, None]
    assert found == [([None, True], [9, True], 9, True, True, missing, [9, 9], 9, [9, 9])]


def test_get_additional_refuses_items_that_the_batch_does_not_have():
    def look(batch):
        for key in ("number", "missing"):
            with pytest.raises(IndexError):
                batch.get_additional(key, 2)

    batches(numbers(2), look, end_at=("epoch", 1))


@pytest.mark.parametrize("persist", [True, False])
def test_cache_keeps_additional_results_unless_others_are_given(tmp_path, persist):
    group = numbers(
        4,
        cache_arrays={"mean": ((), np.float32, np.float32)},
        cache_location=tmp_path / "cache",
        shuffle_later="repeat",
    )

    def look(batch):
        if batch.uncached:
            mean = batch.arrays["x"].mean(axis=1)
            other = {"z": ["a", "b"]} if batch.group_index else None
            batch.cache({"mean": mean}, other, persist=persist)
        return dict(batch.additional)

    kept = {"number": [0, 1], "none": [None, None], "odd": [None, True]}
    expected = [kept, {"z": ["a", "b"]}]
    assert batches(group, look, end_at=("epoch", 2)) == expected * 2


def test_places_may_be_lists_as_json_and_yaml_give_them():
    held_out = numbers(4, 100)
    dataloader = Dataloader(
        load, numbers(), start_at=[1, 2], end_at=["epoch", 3], validation=["batch", 2, [held_out]]
    )
    assert (dataloader.first_batch, dataloader.last_batch) == (7, 15)
    assert dataloader.batches_per_validation == 2


def test_seeds_may_be_as_long_as_those_of_numpy():
    entropy = 2**127 + 12345

    def order(seed):
        group = numbers(20, seed=seed, shuffle_first=True)
        return batches(
            group, lambda batch: (list(batch.indices), list(batch.seeds)), end_at=("epoch", 1)
        )

    assert order(entropy) == order(entropy)
    others = [order(seed) for seed in (entropy, entropy + 2**64, entropy + 1, 12345, 2**200)]
    assert all(a != b for i, a in enumerate(others) for b in others[:i])


@pytest.mark.parametrize("niceness", [50, -50])
def test_niceness_ends_at_the_limit_of_the_system(niceness):
    group = numbers(2)
    with Dataloader(load, group, loader_nice=niceness, end_at=("epoch", 1)) as dataloader:
        assert len(list(dataloader)) == 1


@pytest.mark.parametrize("switch", [True, False, 1, 0, None, np.bool_(True)])
def test_switches_may_be_none_or_numbers(switch):
    group = numbers(shuffle_first=switch, cache_readonly=switch)
    dataloader = Dataloader(load, group, interleave_groups=switch, deterministic=switch)
    assert dataloader.deterministic is bool(switch)
