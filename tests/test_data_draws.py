"""Which observations a draw takes."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest

from hydrax.data._draws import IN_EPOCHS, ORDERED, SHUFFLE, Chain, Selection, random_chain

KINDS: dict[str, dict[str, bool]] = {
    "independent": {},
    "shuffle": {"shuffle": True},
    "epochs": {"shuffle": True, "in_epochs": True},
}
# One observation, sizes that divide the data and that do not, one draw for all of it, and enough of
# it that orders take another way through the generator.
SIZES = [(1, 1), (2, 2), (10, 3), (33, 7), (64, 16), (10, 10), (20_000, 6_001)]


def chain_of(kind: str, seed: int) -> Chain:
    return ORDERED if kind == "ordered" else random_chain(seed=seed, **KINDS[kind])


@pytest.fixture(scope="module")
def original() -> Any:
    """The package whose draws are to be met."""
    return pytest.importorskip("jax_sgmc.data.numpy_loader", reason="jax-sgmc is not installed")


@pytest.mark.parametrize("kind", ["ordered", *KINDS])
@pytest.mark.parametrize(("count", "mb_size"), SIZES)
@pytest.mark.parametrize("seed", [0, 5, 2**100 + 7])
def test_draws_are_those_of_jax_sgmc_whatever_the_cache_size(
    original: Any, kind: str, count: int, mb_size: int, seed: int
) -> None:
    for cache_size in (1, 2, 5):
        loader = original.NumpyDataLoader(x=np.arange(count))
        if kind == "ordered":
            number = loader.register_ordered_pipeline(cache_size, mb_size)
        else:
            number = loader.register_random_pipeline(cache_size, mb_size, seed=seed, **KINDS[kind])
        calls = -(-3 * count // (cache_size * mb_size)) + 1  # three epochs and a little
        drawn, valid = zip(*(loader.get_batches(number) for _ in range(calls)), strict=True)
        indices, mask = Selection(chain_of(kind, seed), count, mb_size).block(0, calls * cache_size)
        np.testing.assert_array_equal(indices, np.concatenate([batch["x"] for batch in drawn]))
        np.testing.assert_array_equal(mask, np.concatenate(valid))


def test_a_chain_without_a_seed_draws_in_jax_sgmc_as_one_with_its_number(original: Any) -> None:
    loader = original.NumpyDataLoader(x=np.arange(1000))
    loader.register_ordered_pipeline(1, 8)
    for _ in range(3):
        number = loader.register_random_pipeline(4, 8)
        indices, _ = Selection(random_chain(seed=number), 1000, 8).block(0, 4)
        np.testing.assert_array_equal(loader.get_batches(number)[0]["x"], indices)


def test_recorded_draws_are_met() -> None:
    """The draws of jax_sgmc 0.1.5 from 10 observations, 3 at a time."""
    recorded = {
        "independent": [[2, 4, 9], [7, 6, 0], [4, 0, 9], [1, 3, 5], [5, 1, 7], [3, 7, 4]],
        "shuffle": [[6, 5, 2], [9, 8, 0], [7, 4, 3], [1, 4, 9], [6, 3, 7], [2, 5, 0]],
        "epochs": [[6, 5, 2], [9, 8, 0], [7, 4, 3], [1, 0, 0], [4, 9, 6], [3, 7, 2]],
        "ordered": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1], [0, 1, 2], [3, 4, 5]],
    }
    for kind, expected in recorded.items():
        indices, mask = Selection(chain_of(kind, 5), 10, 3).block(0, 6)
        np.testing.assert_array_equal(indices, expected)
        filled = np.ones((6, 3), bool)
        if kind in ("ordered", "epochs"):
            filled[3, 1:] = False
        np.testing.assert_array_equal(mask, filled)


@pytest.mark.parametrize("kind", ["ordered", *KINDS])
def test_a_draw_is_the_same_in_whatever_order_it_is_asked_for(
    kind: str, rng: np.random.Generator
) -> None:
    # Epochs of three draws, so many that states are kept at distances only.
    chain = chain_of(kind, 11)
    mb_size, count = (500, 5000) if kind == "independent" else (2, 5)
    whole, masks = Selection(chain, count, mb_size).block(0, 10_000)
    asked = Selection(chain, count, mb_size)
    for draw in [9_999, 0, 1, 2, 1, 0, *rng.integers(0, 10_000, 300).tolist(), 9_999]:
        indices, mask = asked.indices(draw)
        np.testing.assert_array_equal(indices, whole[draw])
        np.testing.assert_array_equal(mask, masks[draw])
    for first, length in [(3, 0), (8_000, 7), (7_999, 20), (0, 4)]:
        indices, mask = asked.block(first, length)
        np.testing.assert_array_equal(indices, whole[first : first + length])
        np.testing.assert_array_equal(mask, masks[first : first + length])


@pytest.mark.parametrize("kind", ["ordered", "epochs"])
def test_an_epoch_takes_each_observation_once(kind: str) -> None:
    selection = Selection(chain_of(kind, 3), 23, 5)
    assert selection.draws_per_epoch == 5
    for epoch in range(4):
        indices, mask = selection.block(5 * epoch, 5)
        assert sorted(indices[mask]) == list(range(23))
        assert mask[:4].all()
        assert mask[4].sum() == 3


def test_more_observations_than_32_bits_can_number_are_drawn() -> None:
    selection = Selection(random_chain(seed=1), 2**40, 6)
    whole, _ = selection.block(0, 3000)
    assert whole.max() > 2**39
    assert whole.min() >= 0
    np.testing.assert_array_equal(
        Selection(random_chain(seed=1), 2**40, 6).indices(2999)[0], whole[2999]
    )


def test_arrays_of_a_draw_belong_to_the_caller() -> None:
    for kind in ("ordered", *KINDS):
        selection = Selection(chain_of(kind, 1), 7, 3)
        first, mask = selection.indices(0)
        kept = first.copy(), mask.copy()
        first[:] = -1
        mask[:] = False
        np.testing.assert_array_equal(selection.indices(0), kept)


def test_a_pickled_selection_goes_on_with_the_same_draws() -> None:
    for kind in ("ordered", *KINDS):
        selection = Selection(chain_of(kind, 21), 100, 9)
        selection.block(0, 50)
        copy = pickle.loads(pickle.dumps(selection))
        for draw in (50, 3, 51):
            np.testing.assert_array_equal(copy.indices(draw), selection.indices(draw))


def test_memory_does_not_grow_with_the_number_of_draws() -> None:
    selection = Selection(random_chain(seed=1, shuffle=True), 4, 2)
    tracemalloc.start()
    try:
        for first in range(0, 8_000, 100):
            selection.block(first, 100)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 200_000


def test_a_chain_without_a_seed_gets_one_of_its_own() -> None:
    seeds = {random_chain().seed for _ in range(10)}
    assert len(seeds) == 10
    assert max(seeds) > 2**64


def test_options_are_part_of_the_chain() -> None:
    assert random_chain(seed=4) == Chain(False, 4, 0)
    assert random_chain(seed=4, shuffle=True) == Chain(False, 4, SHUFFLE)
    assert random_chain(seed=4, shuffle=True, in_epochs=True) == Chain(
        False, 4, SHUFFLE | IN_EPOCHS
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Selection(ORDERED, 10, 16), ValueError, "16.*1 to 10"),
        (lambda: Selection(ORDERED, 10, 0), ValueError, "is 0.*1 to 10"),
        (lambda: Selection(ORDERED, 0, 1), ValueError, "is 1.*1 to 0"),
        (lambda: Selection(ORDERED, 10, 2).indices(-1), ValueError, "from -1 on"),
        (lambda: random_chain(seed=-1), ValueError, "-1"),
        (lambda: random_chain(seed=2**128), ValueError, "0 to 2"),
        (lambda: random_chain(seed="a"), TypeError, "'a'"),  # type: ignore[arg-type]
        (lambda: random_chain(in_epochs=True), ValueError, "needs shuffle=True"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
