"""Mixing groups by weight: which group the next batch comes from.

Pure, in whole numbers. At every moment the number of batches that each group has had differs from
its share of all batches by at most ``1 - 1 / (2 * groups - 2)``, hence by less than one.
"""

from __future__ import annotations

import heapq
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from hydrax._arguments import check_int

__all__ = ["EpochEnd", "Mixture", "check_epoch_end", "check_weights"]

EpochEnd = Literal["first_exhausted", "all_exhausted"]

# What it takes to go on in the middle of a run grows with one over the smallest share.
_SMALLEST_SHARE = Fraction(1, 10**5)


class Mixture:
    """An endless sequence of groups in which each has its share of every stretch.

    That such a sequence exists with the bound above is Tijdeman's theorem. It says between which
    steps the j-th batch of a group has to come; taking always the batch that is due first, of
    those that may come, keeps to that.

    What the past leaves behind is only which of the batches that may come already have come, and
    for how long that can matter is known. So the sequence can be had from any step on, by running
    through the few steps before it.

    Args:
        weights: One whole number above 0 for each group, without a common divisor.

    Source:
        R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980), 323-330.

    Example:
        >>> import itertools
        >>> [group for group, _ in itertools.islice(Mixture([5, 3, 2]).picks(0), 10)]
        [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self._total = sum(weights)
        # The largest deviation is (unit - 1) / unit.
        self._unit = max(2 * len(self.weights) - 2, 1)

    def _first_step(self, group: int, count: int) -> int:
        """The step, counted from 1, from which on a group may have its batch number count."""
        parts = (count - 1) * self._unit + 1
        return -(-parts * self._total // (self._unit * self.weights[group]))

    def _last_step(self, group: int, count: int) -> int:
        """The step with which a group has its batch number count at the latest."""
        parts = count * self._unit - 1
        return parts * self._total // (self._unit * self.weights[group]) + 1

    def picks(self, start: int) -> Iterator[tuple[int, int]]:
        """(group, batches that it has had before) for each step after start steps."""
        groups = range(len(self.weights))
        # A batch that may come by the first of these steps is due before start.
        lookback = max(self._last_step(group, 1) - self._first_step(group, 1) for group in groups)
        step = max(start - lookback - 2, 0)
        counts = self._due_first(step)
        waiting = [(self._first_step(group, counts[group] + 1), group) for group in groups]
        ready: list[tuple[int, int]] = []
        heapq.heapify(waiting)
        while True:
            step += 1
            while waiting and waiting[0][0] <= step:
                _, group = heapq.heappop(waiting)
                heapq.heappush(ready, (self._last_step(group, counts[group] + 1), group))
            _, group = heapq.heappop(ready)
            if step > start:
                yield group, counts[group]
            counts[group] += 1
            heapq.heappush(waiting, (self._first_step(group, counts[group] + 1), group))

    def _due_first(self, step: int) -> list[int]:
        """Batches of each group if after so many steps those due first have come.

        Whatever came in truth, none of these is still to come ``lookback`` steps later.
        """
        counts, optional = [], []
        for group, weight in enumerate(self.weights):
            # Of each group at most one batch may have come that need not have.
            parts = step * weight * self._unit - self._total * (self._unit - 1)
            needed = max(-(-parts // (self._total * self._unit)), 0)
            counts.append(needed)
            if self._first_step(group, needed + 1) <= step:
                optional.append((self._last_step(group, needed + 1), group))
        for _, group in sorted(optional)[: step - sum(counts)]:
            counts[group] += 1
        return counts

    def epoch_length(self, batch_counts: Sequence[int], end: EpochEnd) -> int:
        """Steps until the first group, or every group, has had its number of batches.

        Args:
            batch_counts: For each group the batches of one pass over it.
            end: ``"first_exhausted"`` or ``"all_exhausted"``.
        """
        first = [self._first_step(*pair) for pair in enumerate(batch_counts)]
        if end == "first_exhausted":
            missing = dict(enumerate(batch_counts))
        else:
            # Groups that have had theirs by the step that one of them cannot come before are past.
            missing = {
                group: count
                for group, count in enumerate(batch_counts)
                if self._last_step(group, count) >= max(first)
            }
        step = min(first[group] for group in missing) - 1
        for group, before in self.picks(step):
            step += 1
            if missing.get(group) == before + 1:
                del missing[group]
                if end == "first_exhausted" or not missing:
                    break
        return step


def check_weights(
    weights: Any, group_count: int, names: Sequence[Any] | None = None
) -> tuple[int, ...]:
    """Weights as whole numbers without a common divisor, in the same proportions.

    A float counts as the decimal number that it is written as, so that 0.1 is a tenth.

    Args:
        weights: One number for each group in their order, or a mapping from their names.
        group_count: Number of groups.
        names: Of the groups, where they have names.

    Raises:
        TypeError: They are no numbers, or have names and the groups have none.
        ValueError: There are not as many as groups, or of other names, or one is not above 0, not
            finite, or less than a hundred-thousandth of their sum.

    Example:
        >>> check_weights([0.7, 0.2, 0.1], 3)
        (7, 2, 1)
        >>> check_weights({"b": 2, "a": 6}, 2, ["a", "b"])
        (3, 1)
    """
    keys: Sequence[Any] = range(group_count)
    if isinstance(weights, Mapping):
        if names is None:
            raise TypeError(
                f"weights has the names {', '.join(map(repr, weights))}, and the training groups "
                "have none; give training as a mapping too, or weights as a list"
            )
        if set(weights) != set(names):
            raise ValueError(
                f"weights has the names {', '.join(map(repr, weights))}, and the training groups "
                f"are {', '.join(map(repr, names))}; expected the same"
            )
        keys, weights = names, [weights[name] for name in names]
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Iterable):
        raise TypeError(f"weights is {weights!r:.80}; expected one number for each training group")
    given = list(weights)
    if len(given) != group_count:
        raise ValueError(
            f"weights has {len(given)} numbers for {group_count} training groups; expected one each"
        )
    parts = [_as_fraction(key, weight) for key, weight in zip(keys, given, strict=True)]
    total = sum(parts)
    for key, part in zip(keys, parts, strict=True):
        if part < total * _SMALLEST_SHARE:
            raise ValueError(
                f"weights[{key!r}] is less than a hundred-thousandth of the sum of all; leave "
                "the group out, or give it more"
            )
    scale = math.lcm(*(part.denominator for part in parts))
    whole = [int(part * scale) for part in parts]
    divisor = math.gcd(*whole)
    return tuple(number // divisor for number in whole)


def _as_fraction(key: Any, weight: Any) -> Fraction:
    if isinstance(weight, (bool, np.bool_)) or not isinstance(weight, numbers.Real):
        raise TypeError(f"weights[{key!r}] is {weight!r:.80}; expected a number above 0")
    if isinstance(weight, numbers.Rational):
        part = Fraction(int(weight.numerator), int(weight.denominator))
    elif math.isfinite(weight):
        part = Fraction(str(weight))
    else:
        raise ValueError(f"weights[{key!r}] is {weight!r}; expected a finite number above 0")
    if part <= 0:
        raise ValueError(
            f"weights[{key!r}] is {weight!r}; it must be above 0: leave out a group of which "
            "nothing is wanted"
        )
    return part


def check_epoch_end(epoch_end: Any) -> EpochEnd | int:
    """epoch_end as one of its words, or a number of batches; None is the default."""
    if epoch_end is None:
        return "all_exhausted"
    if isinstance(epoch_end, str):
        if epoch_end not in ("first_exhausted", "all_exhausted"):
            raise ValueError(
                f"epoch_end is {epoch_end!r}; expected 'first_exhausted', 'all_exhausted' or a "
                "number of batches"
            )
        return epoch_end  # type: ignore[return-value]
    return check_int("epoch_end", epoch_end, minimum=1)
