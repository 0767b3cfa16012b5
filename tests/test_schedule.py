import itertools

import pytest

from hydrax import _core
from hydrax._schedule import GroupOrder, Schedule, Validation


def order(count=10, size=2, key=1, first=False, later="itemwise"):
    return GroupOrder(count, size, key, first, later)


def schedule(*groups, validation=None, start_at=(0, 0), end_at=None, interleave_groups=True):
    return Schedule(
        groups,
        validation,
        start_at=start_at,
        end_at=end_at,
        interleave_groups=interleave_groups,
    )


def summary(planned):
    return (
        planned.kind,
        planned.group_of_kind,
        planned.epoch,
        planned.epoch_batch,
        planned.batch_num,
        planned.seed,
        planned.plan.indices(),
        planned.plan.seeds(),
    )


def take(plan, count):
    return list(itertools.islice(plan, count))


def epochs_of(group, count):
    """Item indices and seeds of each of the first epochs."""
    planned = take(schedule(group), count * group.batch_count)
    indices = [[] for _ in range(count)]
    seeds = [[] for _ in range(count)]
    for batch in planned:
        indices[batch.epoch].append(batch.plan.indices())
        seeds[batch.epoch].append(batch.plan.seeds())
    return indices, seeds


def flat(batches):
    return [item for batch in batches for item in batch]


@pytest.mark.parametrize("later", ["repeat", "reseed", "itemwise", "batchwise"])
@pytest.mark.parametrize("first", [False, True])
def test_an_epoch_holds_each_item_at_most_once_in_every_mode(first, later):
    indices, seeds = epochs_of(order(count=101, size=5, first=first, later=later), 4)
    for epoch in range(4):
        items = flat(indices[epoch])
        assert len(items) == 100
        assert len(set(items)) == 100
        assert set(items) <= set(range(101))
        assert len(set(flat(seeds[epoch]))) == 100


@pytest.mark.parametrize("later", ["repeat", "reseed", "itemwise", "batchwise"])
def test_the_first_epoch_is_in_order_unless_shuffle_first(later):
    assert flat(epochs_of(order(later=later), 1)[0][0]) == list(range(10))
    shuffled = flat(epochs_of(order(count=100, first=True, later=later), 1)[0][0])
    assert shuffled != list(range(100))
    assert sorted(shuffled) == list(range(100))


def test_repeat_keeps_order_and_seeds():
    indices, seeds = epochs_of(order(count=60, first=True, later="repeat"), 3)
    assert indices[0] == indices[1] == indices[2]
    assert seeds[0] == seeds[1] == seeds[2]


def test_reseed_keeps_the_order_and_changes_every_seed():
    indices, seeds = epochs_of(order(count=60, first=True, later="reseed"), 3)
    assert indices[0] == indices[1] == indices[2]
    assert len({*flat(seeds[0]), *flat(seeds[1]), *flat(seeds[2])}) == 180


def test_itemwise_changes_order_and_seeds_in_each_later_epoch():
    indices, seeds = epochs_of(order(count=60, later="itemwise"), 3)
    assert flat(indices[0]) == list(range(60))
    assert len({tuple(flat(epoch)) for epoch in indices}) == 3
    assert len({*flat(seeds[0]), *flat(seeds[1]), *flat(seeds[2])}) == 180


def test_batchwise_keeps_batches_with_their_seeds_and_changes_their_order():
    indices, seeds = epochs_of(order(count=200, size=4, first=True, later="batchwise"), 3)
    batches = [
        {tuple(items): tuple(own) for items, own in zip(indices[epoch], seeds[epoch], strict=True)}
        for epoch in range(3)
    ]
    assert batches[0] == batches[1] == batches[2]
    assert indices[0] != indices[1] != indices[2]


def test_batch_seeds_differ_between_batches_and_epochs():
    planned = take(schedule(order(count=100)), 150)
    assert len({batch.seed for batch in planned}) == 150


def test_groups_of_equal_seed_have_different_item_seeds():
    groups = [order(key=_core.mix(0, index)) for index in range(2)]
    first, second = take(schedule(*groups), 2)
    assert (first.group_of_kind, second.group_of_kind) == (0, 1)
    assert not set(first.plan.seeds()) & set(second.plan.seeds())


def test_interleaving_takes_the_group_with_the_smallest_share_used_and_the_first_of_equals():
    groups = [order(count=4), order(count=8), order(count=2)]
    sequence = [batch.group_of_kind for batch in take(schedule(*groups), 7)]
    assert sequence == [0, 1, 2, 1, 0, 1, 1]


def test_without_interleaving_groups_come_one_after_the_other():
    groups = [order(count=4), order(count=6)]
    sequence = [
        batch.group_of_kind for batch in take(schedule(*groups, interleave_groups=False), 10)
    ]
    assert sequence == [0, 0, 1, 1, 1] * 2


@pytest.mark.parametrize("interleave_groups", [True, False])
@pytest.mark.parametrize("start", range(0, 45, 2))
def test_starting_later_gives_the_tail_of_the_whole(start, interleave_groups):
    groups = [order(count=11), order(count=3, size=3, key=7), order(count=14, later="batchwise")]
    validation = Validation("batch", 3, (order(count=4), order(count=2)))
    whole = schedule(
        *groups, validation=validation, end_at=("epoch", 4), interleave_groups=interleave_groups
    )
    expected = [summary(planned) for planned in whole]
    training = [entry for entry in expected if entry[0] == _core.TRAINING]
    position = expected.index(training[start])
    later = schedule(
        *groups,
        validation=validation,
        start_at=(0, start),
        end_at=("epoch", 4),
        interleave_groups=interleave_groups,
    )
    assert [summary(planned) for planned in later] == expected[position:]


def test_starting_in_an_epoch_equals_skipping_its_batches():
    group = order()
    by_epoch = take(schedule(group, start_at=(2, 1)), 9)
    by_batch = take(schedule(group, start_at=(0, 11)), 9)
    assert [summary(p) for p in by_epoch] == [summary(p) for p in by_batch]


def test_validation_follows_every_interval_of_epochs_and_repeats_itself():
    validation = Validation("epoch", 2, (order(count=5), order(count=2)))
    planned = list(schedule(order(count=4), validation=validation, end_at=("epoch", 4)))
    kinds = "".join("tv"[batch.kind] for batch in planned)
    assert kinds == "tttt" + "vvv" + "tttt" + "vvv"
    runs = [batch for batch in planned if batch.kind == _core.VALIDATION]
    assert [batch.epoch for batch in runs] == [0, 0, 0, 1, 1, 1]
    assert [batch.epoch_batch for batch in runs] == [0, 1, 2] * 2
    assert [batch.batch_num for batch in runs] == [0, 1, 2, 3, 4, 5]
    assert [batch.group_of_kind for batch in runs] == [0, 0, 1] * 2
    assert [b.plan.indices() for b in runs[:3]] == [b.plan.indices() for b in runs[3:]]
    assert [b.plan.seeds() for b in runs[:3]] == [b.plan.seeds() for b in runs[3:]]


def test_validation_follows_every_interval_of_batches():
    validation = Validation("batch", 3, (order(count=2),))
    planned = list(schedule(order(count=4), validation=validation, end_at=("batch", 7)))
    assert "".join("tv"[batch.kind] for batch in planned) == "tttvtttvt"


def test_serials_count_all_batches_in_order_of_delivery():
    validation = Validation("batch", 2, (order(count=4),))
    planned = list(schedule(order(), validation=validation, end_at=("batch", 9)))
    assert [batch.plan.serial for batch in planned] == list(range(len(planned)))


def test_end_at_counts_from_the_beginning():
    assert len(list(schedule(order(), start_at=(1, 0), end_at=("epoch", 3)))) == 10
    assert list(schedule(order(), start_at=(1, 0), end_at=("batch", 5))) == []


def test_a_huge_group_is_planned_at_any_position_at_once():
    group = order(count=10**12, size=256, first=True)
    (planned,) = take(schedule(group, start_at=(3, 10**9)), 1)
    items = planned.plan.indices()
    assert len(set(items)) == 256
    assert all(0 <= item < 10**12 for item in items)
