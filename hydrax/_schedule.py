"""Which batch comes next: epochs, shuffling, seeds, interleaving, validation.

Pure: a schedule is a function of its groups' sizes, modes and seeds. No position costs more than
another to start from, and nothing is stored per item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hydrax import _core
from hydrax._mixing import EpochEnd, Mixture

__all__ = ["GroupOrder", "PlannedBatch", "Position", "Schedule", "Validation"]

# Arguments that set apart what is derived from one group seed.
_TAG_ORDER, _TAG_BATCHES, _TAG_SEEDS, _TAG_BATCH_SEED, _TAG_VALIDATION = range(1, 6)
_SEED_COUNT = 2**31


class Position(NamedTuple):
    """A place between two batches of the schedule.

    Attributes:
        training: Training batches before it.
        validation: Batches before it of the validation run that follows those; None behind the
            run, or where none follows.
    """

    training: int
    validation: int | None = None


class PlannedBatch(NamedTuple):
    """One batch of the schedule.

    Attributes:
        plan: The batch for the core.
        kind: ``_core.TRAINING`` or ``_core.VALIDATION``.
        group_number: Which of all groups, training groups first.
        group_of_kind: Which of the training, or of the validation groups.
        epoch: Training epoch, or number of the validation run.
        epoch_batch: Position within the epoch or validation run.
        batch_num: Position among all training, or all validation batches.
        seed: Of the batch as a whole; 0 for validation.
        item_count: Items of the batch: the batch size, or less for a short last batch.
        valid_count: Items before they repeat, to fill up a padded last batch.
        following: Where the schedule goes on after this batch.
        content: What its items and their seeds follow from, within the group: the epoch whose
            order and seeds they are, and the batch's number in that order.
    """

    plan: _core.Plan
    kind: int
    group_number: int
    group_of_kind: int
    epoch: int
    epoch_batch: int
    batch_num: int
    seed: int
    item_count: int
    valid_count: int
    following: Position
    content: tuple[int, int]


@dataclass(frozen=True)
class GroupOrder:
    """Order and seeds of one training group, for every epoch.

    Where groups are mixed by weight, a pass over the group takes the place of the epoch.

    Attributes:
        item_count: Items of the group.
        batch_size: Items per batch.
        key: Seed of the group, mixed with its place among the groups, so that equal groups with
            equal seeds still load with different ones.
        shuffle_first: Whether epoch 0 is shuffled.
        shuffle_later: ``"repeat"``, ``"reseed"``, ``"itemwise"`` or ``"batchwise"``.
        remainder: ``"drop"``, ``"pad"`` or ``"short"``: what becomes of a last, partial batch.
    """

    item_count: int
    batch_size: int
    key: int
    shuffle_first: bool
    shuffle_later: str
    remainder: str = "drop"

    @property
    def batch_count(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(self.item_count, self.batch_size)
        return whole + (rest > 0 and self.remainder != "drop")

    def sizes_of(self, batch: int) -> tuple[int, int]:
        """Items, and items that do not repeat, of a batch of the order."""
        valid_count = min(self.batch_size, self.item_count - batch * self.batch_size)
        return (valid_count if self.remainder == "short" else self.batch_size), valid_count

    def order_of(self, epoch: int) -> tuple[int, int]:
        """Key and count of the permutation of an epoch's items; count 0 is the data's order."""
        order_epoch = epoch if self.shuffle_later == "itemwise" else 0
        if order_epoch == 0 and not self.shuffle_first:
            return 0, 0
        return _core.mix(self.key ^ _TAG_ORDER, order_epoch), self.item_count

    def batch_at(self, epoch: int, position: int) -> int:
        """Which batch of the order stands at a position of an epoch."""
        if epoch == 0 or self.shuffle_later != "batchwise":
            return position
        key = _core.mix(self.key ^ _TAG_BATCHES, epoch)
        return _core.permute(key, self.batch_count, position)

    def seed_epoch(self, epoch: int) -> int:
        """The epoch whose seeds are used in an epoch."""
        return epoch if self.shuffle_later in ("reseed", "itemwise") else 0

    def seed_key(self) -> int:
        """Key of the permutation that seeds are drawn from."""
        return _core.mix(self.key, _TAG_SEEDS)

    def seed_start(self, epoch: int) -> int:
        """Where an epoch's seeds begin: epochs take consecutive stretches, so none repeats."""
        return self.seed_epoch(epoch) * self.item_count % _SEED_COUNT

    def batch_seed(self, epoch: int, batch: int) -> int:
        """Seed of a batch as a whole."""
        key = _core.mix(self.key ^ _TAG_BATCH_SEED, self.seed_epoch(epoch))
        return _core.mix(key, batch) % _SEED_COUNT


@dataclass(frozen=True)
class Validation:
    """When validation runs: after every ``interval`` training batches or epochs."""

    mode: str
    interval: int
    groups: tuple[GroupOrder, ...]


class Schedule:
    """All batches of a run, in order of delivery.

    Args:
        training: The training groups.
        validation: When to validate and on what, or None.
        start_at: Epoch, and further training batches to skip.
        end_at: Training batches after which it ends, or None.
        interleave_groups: Mix the groups within an epoch, always taking the group of which the
            smallest share has been used so far (the first of these); otherwise one after the other.
        weights: Mix the groups in these proportions instead: one whole number each, or None. The
            groups then go on from epoch to epoch, and each starts anew when it has been gone
            through.
        epoch_end: With weights, when an epoch ends; all epochs have as many batches as the first.
    """

    def __init__(
        self,
        training: Sequence[GroupOrder],
        validation: Validation | None,
        *,
        start_at: tuple[int, int],
        end_at: tuple[str, int] | None,
        interleave_groups: bool,
        weights: Sequence[int] | None = None,
        epoch_end: EpochEnd | int = "all_exhausted",
    ) -> None:
        self._training = tuple(training)
        self._validation = validation
        self._interleave_groups = interleave_groups
        self._mixture = None if weights is None else Mixture(weights)
        self._epoch_end = epoch_end
        self.batches_per_epoch = self._epoch_length()
        self.batches_per_validation = (
            sum(group.batch_count for group in validation.groups) if validation else 0
        )
        self.first_batch = start_at[0] * self.batches_per_epoch + start_at[1]
        self.start = Position(self.first_batch)
        self.last_batch: int | None = None
        if end_at is not None:
            mode, count = end_at
            self.last_batch = count * (self.batches_per_epoch if mode == "epoch" else 1)

    def _epoch_length(self) -> int:
        counts = [group.batch_count for group in self._training]
        if self._mixture is None:
            return sum(counts)
        if isinstance(self._epoch_end, int):
            return self._epoch_end
        return self._mixture.epoch_length(counts, self._epoch_end)

    def facts(self) -> dict[str, Any]:
        """What decides the order of the groups, as JSON values under names for messages."""
        validation = self._validation
        facts: dict[str, Any] = {
            "interleave_groups": self._interleave_groups,
            "validation mode": validation.mode if validation else None,
            "validation interval": validation.interval if validation else None,
        }
        if self._mixture is not None:
            facts["weights"] = list(self._mixture.weights)
            facts["epoch_end"] = self._epoch_end
        return facts

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self.batches(self.start)

    def batches(self, start: Position) -> Iterator[PlannedBatch]:
        """All batches from a position on, in order of delivery."""
        serial = 0
        batch_num = start.training
        run = self._validation_run_after(batch_num)
        if run is not None and start.validation is not None:
            yield from self._validation_batches(serial, run, batch_num, start.validation)
            serial += self.batches_per_validation - start.validation
        for group_index, group_pass, position in self._groups_from(batch_num):
            if self.last_batch is not None and batch_num >= self.last_batch:
                return
            yield self._training_batch(serial, batch_num, group_index, group_pass, position)
            serial += 1
            batch_num += 1
            run = self._validation_run_after(batch_num)
            if run is not None:
                yield from self._validation_batches(serial, run, batch_num, 0)
                serial += self.batches_per_validation

    def _groups_from(self, batch_num: int) -> Iterator[tuple[int, int, int]]:
        """(group index, number of the pass over the group, position in it), without end."""
        if self._mixture is not None:
            for group_index, used in self._mixture.picks(batch_num):
                yield group_index, *divmod(used, self._training[group_index].batch_count)
        epoch, epoch_batch = divmod(batch_num, self.batches_per_epoch)
        while True:
            for group_index, position in self._epoch_groups(epoch_batch):
                yield group_index, epoch, position
            epoch += 1
            epoch_batch = 0

    def _epoch_groups(self, start: int) -> Iterator[tuple[int, int]]:
        """(group index, position within the group) for an epoch's batches from start on."""
        counts = [group.batch_count for group in self._training]
        if not self._interleave_groups:
            for group_index, count in enumerate(counts):
                for position in range(min(start, count), count):
                    yield group_index, position
                start = max(start - count, 0)
            return
        # Batch j of a group with c batches stands at time j / c. Everything before the time
        # (start - groups) / total lies within the first `start` batches; the rest is stepped.
        total = sum(counts)
        early = max(start - len(counts), 0)
        used = [-(-early * count // total) for count in counts]
        for step in range(sum(used), total):
            group_index = -1
            for index, count in enumerate(counts):
                # used / count < least, in whole numbers; the first of equals stays.
                if used[index] < count and (
                    group_index < 0 or used[index] * counts[group_index] < used[group_index] * count
                ):
                    group_index = index
            if step >= start:
                yield group_index, used[group_index]
            used[group_index] += 1

    def _training_batch(
        self,
        serial: int,
        batch_num: int,
        group_index: int,
        group_pass: int,
        position: int,
    ) -> PlannedBatch:
        epoch, epoch_batch = divmod(batch_num, self.batches_per_epoch)
        group = self._training[group_index]
        batch = group.batch_at(group_pass, position)
        order_key, order_count = group.order_of(group_pass)
        item_count, valid_count = group.sizes_of(batch)
        plan = _core.Plan(
            serial=serial,
            epoch=epoch,
            first_position=batch * group.batch_size,
            order_key=order_key,
            order_count=order_count,
            seed_key=group.seed_key(),
            seed_start=group.seed_start(group_pass),
            group=group_index,
            item_count=item_count,
            valid_count=valid_count,
            kind=_core.TRAINING,
        )
        return PlannedBatch(
            plan,
            _core.TRAINING,
            group_index,
            group_index,
            epoch,
            epoch_batch,
            batch_num,
            group.batch_seed(group_pass, batch),
            item_count,
            valid_count,
            self._position_after(batch_num + 1, 0),
            (group.seed_epoch(group_pass), batch),
        )

    def _position_after(self, training: int, validation: int) -> Position:
        """The position with so many batches of the validation run after it, if one follows."""
        is_due = self._validation_run_after(training) is not None
        return Position(
            training,
            validation if is_due and validation < self.batches_per_validation else None,
        )

    def _validation_run_after(self, batch_num: int) -> int | None:
        """Number of the validation run that follows training batch batch_num - 1, if one does."""
        if self._validation is None or batch_num == 0:
            return None
        interval = self._validation.interval
        if self._validation.mode == "epoch":
            interval *= self.batches_per_epoch
        run, rest = divmod(batch_num, interval)
        return run - 1 if rest == 0 else None

    def _validation_batches(
        self, serial: int, run: int, training: int, start: int
    ) -> Iterator[PlannedBatch]:
        """Batches of a validation run, which follows so many training batches, from start on."""
        assert self._validation is not None
        before = 0  # batches of the groups before this one
        for group_index, group in enumerate(self._validation.groups):
            # The same items in the same order each time; what a loader draws from the global
            # generators is the same each time, too.
            order_key, order_count = group.order_of(0)
            for batch in range(max(start - before, 0), group.batch_count):
                epoch_batch = before + batch
                item_count, valid_count = group.sizes_of(batch)
                plan = _core.Plan(
                    serial=serial + epoch_batch - start,
                    epoch=run,
                    first_position=batch * group.batch_size,
                    order_key=order_key,
                    order_count=order_count,
                    seed_key=_core.mix(group.key, _TAG_VALIDATION),
                    seed_start=0,
                    group=len(self._training) + group_index,
                    item_count=item_count,
                    valid_count=valid_count,
                    kind=_core.VALIDATION,
                )
                yield PlannedBatch(
                    plan,
                    _core.VALIDATION,
                    len(self._training) + group_index,
                    group_index,
                    run,
                    epoch_batch,
                    run * self.batches_per_validation + epoch_batch,
                    0,
                    item_count,
                    valid_count,
                    self._position_after(training, epoch_batch + 1),
                    (0, batch),
                )
            before += group.batch_count
