"""Loader functions that draw from the global generators: fresh numbers, reproducibly."""

from __future__ import annotations

import itertools
import random

# Bound before Hydrax can have touched the module, as at the top of many programs.
from random import choice as early_choice
from random import gauss as early_gauss
from random import getstate as early_getstate
from random import seed as early_seed
from random import setstate as early_setstate
from random import shuffle as early_shuffle
from random import uniform as early_uniform
from typing import Any

import numpy as np
import pytest
from numpy.random import rand as early_rand
from numpy.random import randn as early_randn
from numpy.random import seed as early_numpy_seed

from hydrax import DataGroup, Dataloader, LoaderError

SPECS = {"x": ((), np.float32, np.float32)}
ITEMS = 24
Draws = list[tuple[Any, ...]]


def draws_of(
    draw: Any,
    *,
    loader_count: int = 0,
    epochs: int = 1,
    batched: bool = False,
    validation: bool = False,
    **group_options: Any,
) -> Draws:
    """What draw(seed) gives for each item, in order of delivery."""

    def load(descriptor: Any, arrays: Any, seed: Any) -> dict[str, Any]:
        arrays["x"][...] = 0
        if batched:
            return {"drawn": [draw(seed) for _ in descriptor]}
        return {"drawn": draw(seed)}

    group = DataGroup(4, range(ITEMS), loader_arrays=SPECS, **group_options)
    drawn: Draws = []
    with Dataloader(
        load,
        group,
        validation=("epoch", 1, group) if validation else None,
        loader_count=loader_count,
        batched=batched,
        end_at=("epoch", epochs),
        timeout_sec=20,
    ) as dataloader:
        for batch in dataloader:
            if batch.is_validation == validation:
                drawn.extend(batch.additional["drawn"])
            del batch
    return drawn


def draw_from_both(seed: Any) -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(64),
        random.randint(0, 2**60),
        random.sample(range(1000), 5),
        random.betavariate(2, 3),
        random.randbytes(9),
        random.normalvariate(0, 1),
        np.random.rand(),
        np.random.randn(3).tolist(),
        np.random.randint(0, 2**30, 5).tolist(),
        np.random.permutation(20).tolist(),
        np.random.randint(0, 200, 3, dtype=np.uint8).tolist(),
        np.random.choice(1000, 3, replace=False).tolist(),
        np.random.uniform(2, 3, (2,)).tolist(),
        np.random.poisson(1000),
        np.random.bytes(7),
    )


def draw_early(seed: Any) -> tuple[Any, ...]:
    numbers = list(range(30))
    early_shuffle(numbers)
    return early_gauss(0, 1), early_uniform(0, 1), early_choice(range(10**9)), early_rand(), numbers


def draw_one_normal(seed: Any) -> tuple[Any, ...]:
    """An odd number of normal draws: both modules make two at a time and keep the second."""
    return (
        early_gauss(0, 1),
        random.gauss(0, 1),
        random.gauss(0, 1),
        early_randn(),
        np.random.randn(2)[0],
    )


DRAWS = [draw_from_both, draw_early, draw_one_normal]


@pytest.mark.parametrize("draw", DRAWS)
def test_global_draws_are_the_same_in_every_run_and_whatever_loads(draw: Any) -> None:
    expected = draws_of(draw)
    assert draws_of(draw) == expected
    for loader_count in (1, 2, 8):
        assert draws_of(draw, loader_count=loader_count) == expected


@pytest.mark.parametrize("draw", DRAWS)
def test_global_draws_never_repeat_across_workers_and_epochs(draw: Any) -> None:
    drawn = draws_of(draw, loader_count=8, epochs=3)
    assert len(drawn) == 3 * ITEMS
    for column in zip(*drawn, strict=True):
        values = [repr(value) for value in column]
        if isinstance(column[0], int) and max(column) < 2000:
            continue  # too few values to be all different
        assert len(set(values)) == len(values), values


def test_global_draws_differ_between_seeds_of_the_group_and_repeat_only_when_seeds_do() -> None:
    def draw(seed: Any) -> tuple[Any, ...]:
        return random.random(), np.random.rand()

    first = draws_of(draw, seed=1)
    assert not set(first) & set(draws_of(draw, seed=2))
    again = draws_of(draw, seed=1, epochs=2, shuffle_later="repeat")
    assert again == first + first
    others = draws_of(draw, seed=1, epochs=2, shuffle_later="reseed")
    assert others[:ITEMS] == first
    assert len(set(others)) == 2 * ITEMS


@pytest.mark.parametrize("loader_count", [0, 2])
def test_global_draws_of_validation_are_the_same_in_every_validation_run(loader_count: int) -> None:
    drawn = draws_of(draw_one_normal, loader_count=loader_count, epochs=3, validation=True)
    assert drawn[:ITEMS] == drawn[ITEMS : 2 * ITEMS] == drawn[2 * ITEMS :]
    assert len({repr(entry) for entry in drawn[:ITEMS]}) == ITEMS


def test_an_item_draws_the_same_whether_or_not_its_neighbours_draw() -> None:
    def load(descriptor: int, arrays: Any, seed: int) -> dict[str, Any] | None:
        arrays["x"][...] = 0
        if descriptor % 3 == 0:
            return {"drawn": draw_one_normal(seed)}
        if descriptor % 3 == 1:
            np.random.randn()
            early_gauss()
        return None

    found: list[dict[int, Any]] = []
    for loader_count in (0, 2, 0):
        group = DataGroup(6, range(ITEMS), loader_arrays=SPECS)
        drawn = {}
        with Dataloader(load, group, loader_count=loader_count, end_at=("epoch", 1)) as dataloader:
            for batch in dataloader:
                drawn.update(zip(batch.indices, batch.additional["drawn"], strict=True))
                del batch
        found.append({index: value for index, value in drawn.items() if value is not None})
    everything = draws_of(draw_one_normal)
    assert found[0] == found[1] == found[2]
    assert found[0] == {index: everything[index] for index in range(0, ITEMS, 3)}


# --- the loader's own seeding ---------------------------------------------------------------------


def seed_and_draw(seed: int) -> tuple[Any, ...]:
    random.seed(seed)
    np.random.seed(seed)
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    return (
        random.random() == python.random(),
        random.gauss(0, 1) == python.gauss(0, 1),
        random.getrandbits(40) == python.getrandbits(40),
        random.sample(range(99), 9) == python.sample(range(99), 9),
        np.random.rand() == numpy.rand(),
        np.random.randn() == numpy.randn(),
        np.random.randint(10**9) == numpy.randint(10**9),
        np.random.permutation(9).tolist() == numpy.permutation(9).tolist(),
    )


def seed_and_draw_early(seed: int) -> tuple[Any, ...]:
    early_seed(seed + 1)
    early_numpy_seed(seed + 1)
    python, numpy = random.Random(seed + 1), np.random.RandomState(seed + 1)
    return (
        early_uniform(0, 9) == python.uniform(0, 9),
        random.random() == python.random(),
        early_gauss(0, 1) == python.gauss(0, 1),
        early_randn() == numpy.randn(),
        np.random.randn() == numpy.randn(),
        early_rand() == numpy.rand(),
    )


def seed_after_drawing(seed: int) -> tuple[Any, ...]:
    random.gauss(0, 1)
    np.random.randn()
    return seed_and_draw(seed) + seed_and_draw_early(seed + 5)


def set_states(seed: int) -> tuple[Any, ...]:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    python.gauss(0, 1)
    numpy.randn()
    random.setstate(python.getstate())
    np.random.set_state(numpy.get_state())
    same = [
        random.gauss(0, 1) == python.gauss(0, 1),
        random.random() == python.random(),
        np.random.randn() == numpy.randn(),
        np.random.rand() == numpy.rand(),
    ]
    early_setstate(python.getstate())
    np.random.set_state(numpy.get_state(legacy=False))
    return (*same, early_uniform(0, 1) == python.uniform(0, 1), np.random.rand() == numpy.rand())


def replay_states(seed: int) -> tuple[Any, ...]:
    """get_state, draw, set_state, draw: the draws must be the same ones."""
    same = []
    for getstate, setstate in [
        (early_getstate, random.setstate),
        (random.getstate, early_setstate),
    ]:
        state = getstate()
        before = random.random(), random.gauss(0, 1), random.randint(0, 99)
        setstate(state)
        same.append(before == (random.random(), random.gauss(0, 1), random.randint(0, 99)))
    for legacy in (True, False):
        state = np.random.get_state(legacy=legacy)
        before = np.random.rand(), np.random.randn(), np.random.randint(0, 99)
        np.random.set_state(state)
        same.append(before == (np.random.rand(), np.random.randn(), np.random.randint(0, 99)))
    return tuple(same)


@pytest.mark.parametrize("loader_count", [0, 2])
@pytest.mark.parametrize(
    "draw", [seed_and_draw, seed_and_draw_early, seed_after_drawing, set_states, replay_states]
)
def test_seeds_and_states_that_a_loader_sets_hold_as_ever(draw: Any, loader_count: int) -> None:
    for index, same in enumerate(draws_of(draw, loader_count=loader_count)):
        assert all(same), (index, same)


def test_what_a_loader_seeds_ends_with_its_item() -> None:
    state = np.random.RandomState(5)
    state.randn()  # leaves a normal number behind, in the state too
    python = random.Random(5)
    python.gauss(0, 1)

    def load(descriptor: int, arrays: Any, seed: int) -> dict[str, Any] | None:
        arrays["x"][...] = 0
        if descriptor % 2 == 0:
            np.random.set_state(state.get_state())
            random.setstate(python.getstate())
            return None
        return {"drawn": (early_randn(), early_gauss(0, 1), np.random.rand(), random.random())}

    runs = []
    for loader_count in (0, 1, 3):
        drawn: list[Any] = []
        group = DataGroup(4, range(ITEMS), loader_arrays=SPECS)
        with Dataloader(load, group, loader_count=loader_count, end_at=("epoch", 1)) as dataloader:
            for batch in dataloader:
                drawn.extend(batch.additional["drawn"][1::2])
                del batch
        runs.append(drawn)
    assert runs[0] == runs[1] == runs[2]
    assert len(set(itertools.chain(*runs[0]))) == 4 * ITEMS // 2


def test_states_taken_before_any_draw_do_not_differ_from_run_to_run() -> None:
    def draw(seed: Any) -> tuple[Any, ...]:
        state, python = np.random.get_state(), random.getstate()
        np.random.set_state(state)
        random.setstate(python)
        return np.random.rand(), random.random()

    expected = draws_of(draw)
    assert draws_of(draw) == expected
    assert draws_of(draw, loader_count=2) == expected
    assert len(set(expected)) == ITEMS


@pytest.mark.parametrize("loader_count", [0, 2])
def test_batched_loaders_draw_the_same_in_every_run(loader_count: int) -> None:
    def draw(seed: Any) -> tuple[Any, ...]:
        return random.random(), np.random.randn()

    first = draws_of(draw, batched=True, loader_count=loader_count, epochs=3)
    assert draws_of(draw, batched=True, loader_count=loader_count, epochs=3) == first
    assert first == draws_of(draw, batched=True, epochs=3)
    assert len(set(first)) == 3 * ITEMS


# --- the user's own sequences ---------------------------------------------------------------------


def user_draws() -> list[Any]:
    return [
        np.random.randn(),
        random.gauss(0, 1),
        np.random.rand(),
        random.random(),
        random.randint(0, 99),
    ]


@pytest.mark.parametrize("loader_count", [0, 1])
@pytest.mark.parametrize("draw", [draw_one_normal, seed_after_drawing, set_states])
def test_loading_leaves_the_users_own_sequences_undisturbed(draw: Any, loader_count: int) -> None:
    np.random.seed(7)
    random.seed(7)
    expected = [user_draws() for _ in range(ITEMS // 4 + 1)]
    assert np.random.get_state(legacy=False)["has_gauss"] == 1

    def load(descriptor: int, arrays: Any, seed: int) -> None:
        arrays["x"][...] = 0
        draw(seed)

    np.random.seed(7)
    random.seed(7)
    found = []
    group = DataGroup(4, range(ITEMS), loader_arrays=SPECS)
    with Dataloader(load, group, loader_count=loader_count, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            del batch
            found.append(user_draws())
    found.append(user_draws())
    assert found == expected


def test_the_users_generators_are_back_after_a_loader_failed_in_this_process() -> None:
    def load(descriptor: int, arrays: Any, seed: int) -> None:
        np.random.seed(1)
        random.seed(1)
        raise ValueError("an item that cannot be loaded")

    bits = np.random.get_bit_generator()
    np.random.seed(7)
    random.seed(7)
    expected = user_draws()
    np.random.seed(7)
    random.seed(7)
    group = DataGroup(4, range(ITEMS), loader_arrays=SPECS)
    with Dataloader(load, group, loader_count=0) as dataloader:
        with pytest.raises(LoaderError, match="cannot be loaded"):
            next(dataloader)
        assert user_draws() == expected
    assert np.random.get_bit_generator() is bits
    assert type(random._inst) is random.Random  # type: ignore[attr-defined]


def test_two_loaders_in_one_process_draw_as_if_each_were_alone() -> None:
    def load(descriptor: int, arrays: Any, seed: int) -> dict[str, Any]:
        arrays["x"][...] = 0
        return {"drawn": draw_one_normal(seed)}

    alone = draws_of(draw_one_normal), draws_of(draw_one_normal, seed=9)
    groups = [DataGroup(4, range(ITEMS), loader_arrays=SPECS, seed=seed) for seed in (0, 9)]
    found: tuple[Draws, Draws] = ([], [])
    with (
        Dataloader(load, groups[0], loader_count=0, end_at=("epoch", 1)) as first,
        Dataloader(load, groups[1], loader_count=0, end_at=("epoch", 1)) as second,
    ):
        for pair in zip(first, second, strict=True):
            for drawn, batch in zip(found, pair, strict=True):
                drawn.extend(batch.additional["drawn"])
    assert found == alone


def test_two_loaders_in_the_main_process_do_not_mix_their_seeded_generators() -> None:
    def load(number, arrays, seed):  # type: ignore[no-untyped-def]
        np.random.seed(5)
        arrays["x"][...] = np.random.randint(10**6)

    def make() -> Dataloader[int]:
        group = DataGroup(4, range(40), loader_arrays={"x": ((), np.int32, np.int32)})
        return Dataloader(load, group, loader_count=0)

    np.random.seed(5)
    expected = [np.random.randint(10**6)] * 4
    with make() as first:
        assert next(first).arrays["x"].tolist() == expected
        with make() as second:
            assert next(second).arrays["x"].tolist() == expected
            assert next(first).arrays["x"].tolist() == expected
        del second
        assert next(first).arrays["x"].tolist() == expected
