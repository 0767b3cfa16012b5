"""What a batch holds is a function of seed, epoch and position, whatever loads it and when."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import pytest

from hydrax import DataGroup, Dataloader, TrainingBatch, _core
from hydrax._schedule import GroupOrder, PlannedBatch, Schedule, Validation

MODES = ["repeat", "reseed", "itemwise", "batchwise", "default"]
SPECS = {
    "label": ((), np.int64, np.int32),
    "odd": ((3,), np.uint8, np.uint8),
    "noise": ((17,), np.float32, np.float32),
    "half": ((5,), np.float64, np.float16),
}


def fill(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int | None) -> dict[str, Any]:
    """An item as a function of its descriptor and seed, every byte of it."""
    chance = np.random.Generator(
        np.random.Philox(key=descriptor + (1 << 40 if seed is None else seed))
    )
    arrays["label"][...] = descriptor
    arrays["odd"][...] = chance.integers(0, 256, 3)
    arrays["noise"][...] = chance.standard_normal(17)
    arrays["half"][...] = chance.random(5)
    return {"check": int(chance.integers(2**62))}


def nap() -> None:
    """Wait a random time, another one in every run: what comes when must not matter."""
    if random.SystemRandom().random() < 0.3:
        time.sleep(random.SystemRandom().random() * 2e-3)


# Functions of the module, so that started-afresh processes find them.
def load(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int | None) -> dict[str, Any]:
    nap()
    return fill(descriptor, arrays, seed)


def load_batched(
    descriptors: np.ndarray, arrays: Mapping[str, np.ndarray], seeds: Any
) -> dict[str, list[Any]]:
    nap()
    checks = []
    for place, descriptor in enumerate(descriptors):
        item = {name: array[place, ...] for name, array in arrays.items()}
        checks.append(fill(int(descriptor), item, None if seeds is None else seeds[place])["check"])
    return {"check": checks}


def load_label(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int | None) -> None:
    arrays["label"][...] = descriptor


def fingerprint(batch: Any) -> tuple[Any, ...]:
    """Everything that a batch holds, arrays as one hash of their bytes."""
    digest = hashlib.blake2b()
    for name, array in batch.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.asarray(array).tobytes())
    place: tuple[Any, ...]
    if isinstance(batch, TrainingBatch):
        place = (batch.epoch, batch.epoch_batch, batch.batch_num, batch.seed, *batch.seeds)
    else:
        place = (
            batch.validation_epoch,
            batch.validation_epoch_batch,
            batch.validation_batch_num,
        )
    additional = {key: tuple(values) for key, values in batch.additional.items()}
    return (
        batch.is_training,
        batch.group_number,
        place,
        tuple(batch.indices),
        tuple(batch.data),
        tuple(sorted(additional.items())),
        digest.hexdigest(),
    )


def fingerprints(loader: Any = load, seed: int = 3, **options: Any) -> list[tuple[Any, ...]]:
    groups = [
        DataGroup(7, range(50), loader_arrays=SPECS, seed=seed, shuffle_first=True),
        DataGroup(4, range(100, 113), loader_arrays=SPECS, seed=seed),
    ]
    validation = DataGroup(5, range(1000, 1011), loader_arrays=SPECS, seed=seed)
    settings = {"end_at": ("epoch", 3), "validation": ("epoch", 1, validation), "timeout_sec": 30}
    with Dataloader(loader, groups, **(settings | options)) as dataloader:
        found = []
        for batch in dataloader:
            found.append(fingerprint(batch))
            del batch
    return found


@pytest.fixture(scope="module")
def reference() -> list[tuple[Any, ...]]:
    """All batches, loaded in this process."""
    return fingerprints(loader_count=0)


def test_loading_in_this_process_gives_what_the_loader_function_says(
    reference: list[tuple[Any, ...]],
) -> None:
    assert len(reference) == 3 * (7 + 3 + 2)
    for is_training, _, place, indices, data, additional, digest in reference:
        seeds = place[4:] if is_training else [None] * len(indices)
        placed = {
            name: np.zeros((len(data), *shape), loaded)
            for name, (shape, loaded, _) in SPECS.items()
        }
        checks = []
        for i, (descriptor, seed) in enumerate(zip(data, seeds, strict=True)):
            item = {name: array[i, ...] for name, array in placed.items()}
            checks.append(fill(descriptor, item, seed)["check"])
        assert additional == (("check", tuple(checks)),)
        expected = hashlib.blake2b()
        for name, (_, _, given) in SPECS.items():
            array = placed[name].astype(given)
            expected.update(f"{name} {array.dtype} {array.shape}".encode())
            expected.update(array.tobytes())
        assert digest == expected.hexdigest()


@pytest.mark.parametrize(
    ("loader_count", "start_method", "batched", "depth"),
    [
        (0, "fork", False, 1),
        (0, "fork", True, 3),
        (1, "fork", False, 1),
        (1, "fork", True, 3),
        (2, "fork", False, 3),
        (2, "fork", True, 1),
        (7, "fork", False, 2),
        (7, "fork", False, 9),
        (7, "fork", True, 3),
        (7, "fork", True, 9),
        (2, "forkserver", False, 3),
        (7, "forkserver", True, 3),
        (1, "spawn", True, 2),
        (2, "spawn", False, 3),
    ],
)
def test_batches_are_bit_identical_whatever_loads_them(
    reference: list[tuple[Any, ...]],
    loader_count: int,
    start_method: str,
    batched: bool,
    depth: int,
) -> None:
    found = fingerprints(
        load_batched if batched else load,
        loader_count=loader_count,
        start_method=start_method,
        batched=batched,
        depth=depth,
    )
    assert found == reference


@pytest.mark.parametrize("batched", [False, True])
def test_batches_out_of_order_are_the_same_set(
    reference: list[tuple[Any, ...]], batched: bool
) -> None:
    loader = load_batched if batched else load
    found = fingerprints(loader, loader_count=3, depth=4, deterministic=False, batched=batched)
    assert sorted(found) == sorted(reference)


def test_out_of_order_delivery_does_not_wait_for_a_slow_batch() -> None:
    def load_first_slowly(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        if descriptor == 0:
            time.sleep(1)
        load_label(descriptor, arrays, seed)

    group = DataGroup(1, range(8), loader_arrays={"label": SPECS["label"]})
    with Dataloader(
        load_first_slowly, group, loader_count=2, depth=4, deterministic=False, end_at=("epoch", 1)
    ) as dataloader:
        order = []
        for batch in dataloader:
            order.extend(batch.indices)
            assert batch.arrays["label"].tolist() == list(batch.indices)
            del batch
    assert sorted(order) == list(range(8))
    assert order[0] != 0
    assert order[-1] == 0


def test_another_seed_gives_other_orders_and_seeds(reference: list[tuple[Any, ...]]) -> None:
    found = fingerprints(loader_count=0, seed=4)
    for ours, theirs in zip(found, reference, strict=True):
        if ours[0]:
            assert ours[2][3:] != theirs[2][3:]
    assert [entry[3] for entry in found] != [entry[3] for entry in reference]


def test_validation_is_bit_identical_in_every_run(reference: list[tuple[Any, ...]]) -> None:
    runs: dict[int, list[Any]] = defaultdict(list)
    for is_training, group_index, place, *rest in reference:
        if not is_training:
            runs[place[0]].append((group_index, place[1], rest))
    assert len(runs) == 3
    assert len(runs[0]) == 2
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("start_at", [(0, 0), (0, 9), (0, 10), (1, 0), (1, 3), (0, 27), (3, 0)])
def test_start_at_gives_the_tail_of_the_whole_run(
    reference: list[tuple[Any, ...]], start_at: tuple[int, int]
) -> None:
    first = start_at[0] * 10 + start_at[1]
    position = next(
        (i for i, entry in enumerate(reference) if entry[0] and entry[2][2] == first),
        len(reference),
    )
    assert fingerprints(loader_count=1, start_at=start_at) == reference[position:]


def test_end_at_gives_the_head_of_the_whole_run(reference: list[tuple[Any, ...]]) -> None:
    found = fingerprints(loader_count=1, end_at=("batch", 13))
    assert found == reference[: len(found)]
    assert sum(entry[0] for entry in found) == 13
    assert fingerprints(loader_count=1, end_at=("batch", 0)) == []


# --- seeds and orders -----------------------------------------------------------------------------


def orders_and_seeds(
    mode: str, *, epochs: int = 5, count: int = 60, batch_size: int = 6, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Item indices and their seeds, per epoch."""
    group = DataGroup(
        batch_size,
        range(count),
        loader_arrays={"label": SPECS["label"]},
        shuffle_later=mode,  # type: ignore[arg-type]
        **options,
    )
    orders: list[list[int]] = [[] for _ in range(epochs)]
    seeds: list[list[int]] = [[] for _ in range(epochs)]
    given: list[int] = []

    def record(descriptor: int, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        given.append(seed)
        load_label(descriptor, arrays, seed)

    with Dataloader(record, group, loader_count=0, end_at=("epoch", epochs)) as dataloader:
        for batch in dataloader:
            assert batch.arrays["label"].tolist() == list(batch.indices)
            assert list(batch.seeds) == given[:batch_size]
            del given[:batch_size]
            orders[batch.epoch].extend(batch.indices)
            seeds[batch.epoch].extend(batch.seeds)
            del batch
    return orders, seeds


@pytest.mark.parametrize("shuffle_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_orders_are_permutations_that_change_as_the_mode_says(
    mode: str, shuffle_first: bool
) -> None:
    orders, _ = orders_and_seeds(mode, shuffle_first=shuffle_first)
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert (orders[0] == list(range(60))) is not shuffle_first
    if mode in ("repeat", "reseed"):
        assert all(order == orders[0] for order in orders)
    else:
        assert len({tuple(order) for order in orders}) == 5
    batches = [{tuple(order[start : start + 6]) for start in range(0, 60, 6)} for order in orders]
    if mode == "batchwise":
        assert all(found == batches[0] for found in batches)
    elif mode in ("itemwise", "default"):
        assert all(not found & batches[0] for found in batches[1:])


@pytest.mark.parametrize("mode", MODES)
def test_seeds_change_between_epochs_except_where_repetition_is_promised(mode: str) -> None:
    orders, seeds = orders_and_seeds(mode)
    by_item = [dict(zip(*pair, strict=True)) for pair in zip(orders, seeds, strict=True)]
    for epoch in range(1, 5):
        for item in range(60):
            same = by_item[epoch][item] == by_item[0][item]
            assert same is (mode in ("repeat", "batchwise"))
    everything = list(itertools.chain(*seeds))
    assert all(0 <= seed < 2**31 for seed in everything)
    wanted = 60 if mode in ("repeat", "batchwise") else 300
    assert len(set(everything)) == wanted


def test_the_same_seed_repeats_and_another_one_does_not() -> None:
    first = orders_and_seeds("itemwise", seed=11, shuffle_first=True)
    assert orders_and_seeds("itemwise", seed=11, shuffle_first=True) == first
    other = orders_and_seeds("itemwise", seed=12, shuffle_first=True)
    for ours, theirs in zip(first[0] + first[1], other[0] + other[1], strict=True):
        assert ours != theirs
        assert sum(map(int.__eq__, ours, theirs)) < 10


def test_items_that_do_not_fill_a_batch_are_others_in_each_itemwise_epoch() -> None:
    orders, _ = orders_and_seeds("itemwise", count=17, batch_size=5, epochs=40, shuffle_first=True)
    assert all(len(order) == len(set(order)) == 15 for order in orders)
    left_out = Counter(item for order in orders for item in set(range(17)) - set(order))
    assert len(left_out) == 17


def test_seeds_of_equal_groups_differ() -> None:
    groups = [DataGroup(5, range(20), loader_arrays={"label": SPECS["label"]}) for _ in range(3)]
    seeds: dict[int, set[int]] = defaultdict(set)
    with Dataloader(load_label, groups, loader_count=0, end_at=("epoch", 3)) as dataloader:
        for batch in dataloader:
            seeds[batch.group_number].update(batch.seeds)
            del batch
    assert [len(found) for found in seeds.values()] == [60, 60, 60]
    assert len(set.union(*seeds.values())) > 175  # equal by chance at most


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_64_bit_integer_is_a_seed(seed: int) -> None:
    orders, seeds = orders_and_seeds("itemwise", epochs=2, seed=seed, shuffle_first=True)
    assert sorted(orders[1]) == list(range(60))
    assert len(set(seeds[0] + seeds[1])) == 120


# --- several groups -------------------------------------------------------------------------------


def order_of(index: int, count: int, batch_size: int = 1) -> GroupOrder:
    return GroupOrder(count, batch_size, 7 + index, True, "itemwise")


def schedule(
    counts: list[int],
    *,
    interleave: bool,
    start: int = 0,
    epochs: int = 3,
    validation: Validation | None = None,
) -> list[PlannedBatch]:
    return list(
        Schedule(
            [order_of(index, count) for index, count in enumerate(counts)],
            validation,
            start_at=(0, start),
            end_at=("epoch", epochs),
            interleave_groups=interleave,
        )
    )


def facts(planned: PlannedBatch) -> tuple[Any, ...]:
    return (*planned[1:], *planned.plan.indices(), *planned.plan.seeds())


@pytest.mark.parametrize("interleave", [False, True])
def test_any_start_gives_the_tail_for_any_groups(
    interleave: bool, rng: np.random.Generator
) -> None:
    for _ in range(12):
        counts = rng.integers(1, 20, rng.integers(1, 5)).tolist()
        mode = "epoch" if rng.integers(2) else "batch"
        validation = Validation(mode, int(rng.integers(1, 5)), (order_of(9, 2), order_of(8, 1)))
        options: dict[str, Any] = {"interleave": interleave, "validation": validation, "epochs": 2}
        whole = [facts(planned) for planned in schedule(counts, **options)]
        training = [i for i, entry in enumerate(whole) if entry[0] == _core.TRAINING]
        assert len(training) == 2 * sum(counts)
        for start, position in enumerate(training):
            tail = [facts(planned) for planned in schedule(counts, start=start, **options)]
            assert tail == whole[position:], (counts, start)


@pytest.mark.parametrize("interleave", [False, True])
def test_every_group_is_used_up_once_per_epoch(interleave: bool) -> None:
    counts = [1, 7, 30, 12]
    for epoch in range(3):
        planned = [p for p in schedule(counts, interleave=interleave) if p.epoch == epoch]
        for group, count in enumerate(counts):
            indices = [p.plan.indices()[0] for p in planned if p.group_of_kind == group]
            assert sorted(indices) == list(range(count))
        assert [p.epoch_batch for p in planned] == list(range(50))


def test_interleaved_groups_keep_in_step_throughout_the_epoch(rng: np.random.Generator) -> None:
    for _ in range(20):
        counts = rng.integers(1, 200, rng.integers(2, 6)).tolist()
        used = [0] * len(counts)
        for step, planned in enumerate(schedule(counts, interleave=True, epochs=1), 1):
            used[planned.group_of_kind] += 1
            for taken, count in zip(used, counts, strict=True):
                # Never more than about one batch from the group's share of what was delivered.
                assert abs(taken - count * step / sum(counts)) < len(counts), (counts, step)


def test_groups_without_interleaving_come_one_after_the_other() -> None:
    groups = [planned.group_of_kind for planned in schedule([3, 1, 2], interleave=False)]
    assert groups == [0, 0, 0, 1, 2, 2] * 3


def test_a_late_start_costs_no_more_than_an_early_one() -> None:
    groups = [order_of(0, 10**9), order_of(1, 10**6), order_of(2, 3)]
    start = time.perf_counter()
    for epoch, skipped in [(0, 0), (5, 10**9), (10**6, 7), (0, 10**12)]:
        planned = Schedule(
            groups, None, start_at=(epoch, skipped), end_at=None, interleave_groups=True
        )
        first = next(iter(planned))
        assert first.batch_num == planned.first_batch
    assert time.perf_counter() - start < 1


# --- the permutation ------------------------------------------------------------------------------


def permutation(key: int, count: int) -> np.ndarray:
    """The whole keyed permutation of [0, count)."""
    plan = _core.Plan(0, 0, 0, key, count, 0, 0, 0, count, count, _core.TRAINING)
    return np.array(plan.indices(), np.int64)


@pytest.mark.sanitize
def test_permutation_is_a_bijection_for_every_count_up_to_5000() -> None:
    with pytest.raises(ValueError, match="position < count"):  # of nothing there is no order
        _core.permute(1, 0, 0)
    for count in range(1, 5001):
        found = np.zeros(count, bool)
        values = permutation(_core.mix(count, 1), count)
        found[values] = True  # an index error, were one too large
        assert found.all(), count
        assert values.min() == 0


@pytest.mark.sanitize
def test_permutation_of_large_counts_has_no_value_twice_and_none_outside(
    rng: np.random.Generator,
) -> None:
    counts = [2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, (2**31 - 1) ** 2, 2**63 - 1, 10**18]
    counts += [int(2 ** rng.uniform(13, 63)) for _ in range(100)]
    for count in counts:
        key = int(rng.integers(2**63))
        positions = {*range(200), *range(count - 200, count)}
        positions |= {int(p) for p in rng.integers(0, count, 600)}
        values = [_core.permute(key, count, position) for position in positions]
        assert len(set(values)) == len(values), count
        assert min(values) >= 0
        assert max(values) < count
        # They are spread: each quarter of the range gets its share.
        quarters = Counter(value * 4 // count for value in values)
        assert all(abs(quarters[q] - len(values) / 4) < 100 for q in range(4)), (count, quarters)


def test_permutation_refuses_what_is_no_position() -> None:
    for arguments in [(1, 0, 0), (1, 5, 5), (1, 2**63, 0)]:
        with pytest.raises(ValueError, match="position"):
            _core.permute(*arguments)
    with pytest.raises(OverflowError):
        _core.permute(1, 5, -1)


def chi_square_z(observed: np.ndarray, expected: float, freedom: float, scale: float = 1) -> float:
    """How many standard deviations a chi-square sum lies above or below what chance gives."""
    total = float(((observed - expected) ** 2 / expected).sum()) * scale
    # Wilson and Hilferty's approximation.
    root = (total / freedom) ** (1 / 3)
    spread = 2 / (9 * freedom)
    return (root - (1 - spread)) / math.sqrt(spread)


KEYS = {
    "consecutive": lambda i: i,
    "mixed": lambda i: _core.mix(7, i),
    "high_bits": lambda i: i << 48,
}


@pytest.mark.parametrize("keys", KEYS)
def test_every_value_is_as_likely_as_any_other_at_every_position(keys: str) -> None:
    trials = 4000
    for count in [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 25, 31]:
        table = np.zeros((count, count))
        places = np.arange(count)
        for trial in range(trials):
            table[places, permutation(KEYS[keys](trial), count)] += 1
        # Rows and columns have fixed sums: (count - 1) ** 2 degrees of freedom in wider cells.
        z = chi_square_z(table, trials / count, (count - 1) ** 2, (count - 1) / count)
        assert abs(z) < 4.5, count


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7])
def test_every_order_of_a_few_items_is_as_likely_as_any_other(count: int) -> None:
    per_order = 300 if count < 6 else 20
    trials = per_order * math.factorial(count)
    orders = Counter(tuple(permutation(_core.mix(7, trial), count)) for trial in range(trials))
    assert len(orders) == math.factorial(count)
    observed = np.array(list(orders.values()), float)
    assert abs(chi_square_z(observed, per_order, len(observed) - 1)) < 4.5


@pytest.mark.parametrize("keys", KEYS)
def test_position_and_value_are_independent_for_a_thousand_items(keys: str) -> None:
    bins, trials, count = 20, 60, 1000
    table = np.zeros((bins, bins))
    gaps = np.zeros(bins)
    for trial in range(trials):
        values = permutation(KEYS[keys](trial), count)
        np.add.at(table, (np.arange(count) * bins // count, values * bins // count), 1)
        np.add.at(gaps, np.diff(values) % count * bins // count, 1)
    assert abs(chi_square_z(table, trials * count / bins**2, (bins - 1) ** 2)) < 4.5
    # Neighbours are strangers, too: the step from one value to the next is anything.
    assert abs(chi_square_z(gaps, trials * (count - 1) / bins, bins - 1)) < 4.5


@pytest.mark.parametrize("keys", KEYS)
def test_orders_of_different_keys_are_unrelated(keys: str) -> None:
    orders = [permutation(KEYS[keys](i), 1000) for i in range(40)]
    same = [int((a == b).sum()) for a, b in itertools.combinations(orders, 2)]
    # Two unrelated orders agree in one place on average.
    assert 0.8 < np.mean(same) < 1.2
    assert max(same) <= 10
    correlations = [abs(np.corrcoef(a, b)[0, 1]) for a, b in itertools.pairwise(orders)]
    assert max(correlations) < 0.2


# --- size -----------------------------------------------------------------------------------------


def test_a_shuffled_range_of_a_thousand_million_items_starts_at_once_and_takes_no_memory() -> None:
    group_options: dict[str, Any] = {
        "loader_arrays": {"label": ((), np.int32, np.int32)},
        "shuffle_first": True,
    }

    def first_batches(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        group = DataGroup(64, range(count), **group_options)
        with Dataloader(load_label, group, loader_count=1) as dataloader:
            batch = next(dataloader)
            elapsed = time.perf_counter() - start
            indices = list(batch.indices)
            assert batch.arrays["label"].tolist() == indices
            del batch
        return elapsed, indices

    first_batches(1000)
    process = psutil.Process()
    before = process.memory_info().rss
    elapsed, indices = first_batches(10**9)
    assert process.memory_info().rss - before < 20e6
    assert elapsed < 2
    assert len(set(indices)) == 64
    assert max(indices) > 10**8


def test_the_end_of_a_huge_epoch_is_reached_by_start_at() -> None:
    group = DataGroup(
        1000,
        range(10**9),
        loader_arrays={"label": ((), np.int32, np.int32)},
        shuffle_first=True,
    )
    with Dataloader(load_label, group, start_at=(0, 10**6 - 1), end_at=("epoch", 2)) as dataloader:
        last = next(dataloader)
        assert (last.epoch, last.epoch_batch, last.batch_num) == (0, 10**6 - 1, 10**6 - 1)
        first = next(dataloader)
        assert (first.epoch, first.epoch_batch, first.batch_num) == (1, 0, 10**6)
        assert not set(last.seeds) & set(first.seeds)
        assert first.arrays["label"].tolist() == list(first.indices)
        del first, last
