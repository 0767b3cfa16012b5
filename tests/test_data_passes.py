"""Draws from data that can only be read from the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hydrax.data._draws import ORDERED, Selection, random_chain
from hydrax.data._passes import PassDraws


class Pipeline:
    """Elements that tell their number; counts what is read."""

    def __init__(self, count: int, chunk: int = 7) -> None:
        self.count, self.chunk = count, chunk
        self.passes = self.read = 0

    def __call__(self) -> Iterator[list[np.ndarray[Any, Any]]]:
        self.passes += 1
        for first in range(0, self.count, self.chunk):
            numbers = np.arange(first, min(first + self.chunk, self.count))
            self.read += len(numbers)
            yield [numbers, np.stack([numbers, -numbers], 1).astype(np.float32)]


def load(
    draws: PassDraws, chain: Any, first: int, count: int, mb_size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    numbers = np.full(count * mb_size, -9)
    pairs = np.full((count * mb_size, 2), -9, np.float32)
    mask = np.zeros(count * mb_size, bool)
    draws.load(chain, first, [numbers, pairs], mask)
    np.testing.assert_array_equal(pairs, np.stack([numbers, -numbers], 1))
    return numbers.reshape(count, mb_size), mask.reshape(count, mb_size)


SIZES = [(10, 3, 4), (10, 3, 100), (50, 8, 1), (1, 1, 5), (30, 30, 7), (64, 16, 16), (100, 9, 20)]


@pytest.mark.parametrize(("count", "mb_size", "buffer_size"), SIZES)
def test_ordered_draws_are_those_of_arrays(count: int, mb_size: int, buffer_size: int) -> None:
    expected = Selection(ORDERED, count, mb_size)
    draws = PassDraws(Pipeline(count), count, mb_size, buffer_size)
    for first, number in [(0, 1), (1, 4), (5, 9), (3, 2), (40, 3), (0, 2)]:
        got = load(draws, ORDERED, first, number, mb_size)
        np.testing.assert_array_equal(got, expected.block(first, number))


@pytest.mark.parametrize(("count", "mb_size", "buffer_size"), SIZES)
def test_random_draws_take_each_element_once_in_a_pass(
    count: int, mb_size: int, buffer_size: int
) -> None:
    draws = PassDraws(Pipeline(count), count, mb_size, buffer_size)
    passes = load(draws, random_chain(seed=3), 0, 3 * count, mb_size)[0].reshape(-1, count)
    for order in passes:
        assert sorted(order) == list(range(count))
        # An element leaves the buffer after it came, with buffer_size - 1 others still there.
        assert (order - np.arange(count) < min(buffer_size, count)).all()
    if min(buffer_size, count) > 3:
        assert len({tuple(order) for order in passes}) > 1
    if buffer_size == 1:
        np.testing.assert_array_equal(passes[0], np.arange(count))


@pytest.mark.parametrize(("count", "mb_size", "buffer_size"), SIZES)
def test_a_random_draw_is_the_same_in_whatever_order_it_is_asked_for(
    count: int, mb_size: int, buffer_size: int, rng: np.random.Generator
) -> None:
    chains = [random_chain(seed=seed) for seed in (1, 2)]
    whole = [
        load(PassDraws(Pipeline(count, 64), count, mb_size, buffer_size), chain, 0, 60, mb_size)[0]
        for chain in chains
    ]
    assert count == 1 or buffer_size == 1 or not np.array_equal(*whole)
    draws = PassDraws(Pipeline(count, 1), count, mb_size, buffer_size)
    for first in [0, 1, 2, *rng.integers(0, 50, 30).tolist()]:
        length = int(rng.integers(0, 10))
        for chain, expected in zip(chains, whole, strict=True):
            got, mask = load(draws, chain, first, length, mb_size)
            np.testing.assert_array_equal(got, expected[first : first + length])
            assert mask.all()


def test_draws_in_sequence_read_each_pass_once() -> None:
    for chain in (ORDERED, random_chain(seed=1)):
        pipeline = Pipeline(100)
        draws = PassDraws(pipeline, 100, 10, 20)
        for first in range(0, 30, 3):
            load(draws, chain, first, 3, 10)
        assert pipeline.passes == 3
        assert pipeline.read == 300


def test_going_on_far_reads_one_pass_at_most() -> None:
    for chain in (ORDERED, random_chain(seed=1)):
        pipeline = Pipeline(100)
        load(PassDraws(pipeline, 100, 10, 20), chain, 10**9 + 5, 1, 10)
        assert pipeline.passes == 1


def test_a_pass_that_ends_early_is_an_error_and_the_next_one_is_good() -> None:
    pipeline = Pipeline(10)
    draws = PassDraws(pipeline, 10, 4, 3)
    for chain in (ORDERED, random_chain(seed=1)):
        pipeline.count = 7
        with pytest.raises(RuntimeError, match="ended after 7 of 10 elements"):
            load(draws, chain, 0, 3, 4)
        pipeline.count = 10
        numbers, _ = load(draws, chain, 0, 5, 4)
        assert sorted(numbers.ravel()[:10]) == list(range(10))
