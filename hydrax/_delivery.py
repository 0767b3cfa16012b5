"""Turns the memory that a batch lies in, a slot or a mapped file, into the batch.

hydrax._placement makes the arrays, or the user's placement_func does; hydrax._batch is what the
user gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydrax import _core
from hydrax._batch import Batch, KeepFunc, make_batch
from hydrax._records import BatchRecords
from hydrax._schedule import PlannedBatch
from hydrax._setup import Setup
from hydrax._specs import ArrayLayout

if TYPE_CHECKING:
    import jax

__all__ = ["Delivery"]

Memory = _core.Lease | _core.Mapping


class Delivery:
    """Makes the batches of a Dataloader.

    Args:
        setup: Of the Dataloader. JAX's default device is looked up once, now.

    Attributes:
        is_by_user: Whether a placement_func makes the arrays.
    """

    def __init__(self, setup: Setup) -> None:
        self._groups = setup.groups
        self._placement_func = setup.placement_func
        self._place: Any = None
        if self._placement_func is None:
            from hydrax._placement import Placement

            self._place = Placement([*setup.layouts, *setup.cache_layouts]).place
        self.is_by_user = self._place is None

    def make(
        self,
        planned: PlannedBatch,
        memory: Memory,
        addresses: range,
        read: BatchRecords | None,
        *,
        is_uncached: bool,
        keep: KeepFunc | None,
    ) -> Batch[Any]:
        """The batch in a leased slot of an arena at these addresses, or in a mapped file.

        Raises:
            TypeError: placement_func returned something else than arrays.
        """
        additional = None if read is None else read.additional
        number = planned.group_number
        group = self._groups[number]
        if isinstance(memory, _core.Mapping):
            layouts = group.cache_layouts
            addresses = range(memory.address, memory.address + memory.nbytes)
        else:
            layouts = group.loader_layouts
        if self._place is None:
            arrays = self._place_by_user(planned, memory, layouts or {}, additional)
        elif isinstance(memory, _core.Mapping):
            arrays = self._place(memory, len(self._groups) + number, planned.item_count)
        else:
            arrays = self._place(memory, number, planned.item_count)
        return make_batch(
            group,
            planned,
            arrays,
            additional,
            addresses,
            None if read is None else read.skipped,
            layouts=layouts,
            is_uncached=is_uncached,
            keep=keep,
        )

    def _place_by_user(
        self,
        planned: PlannedBatch,
        memory: Memory,
        layouts: Mapping[str, ArrayLayout],
        additional: dict[str, list[Any]] | None,
    ) -> dict[str, jax.Array]:
        from hydrax._placement import slot_view

        assert self._placement_func is not None
        # With a placement_func a slot and a file hold what these layouts say, in NumPy's dtypes.
        views = {
            name: slot_view(memory, layout, planned.item_count) for name, layout in layouts.items()
        }
        placed = self._placement_func(
            MappingProxyType(views),
            layouts,
            MappingProxyType(additional or {}),
            self._groups[planned.group_number],
        )
        if not isinstance(placed, Mapping):
            raise TypeError(
                f"placement_func returned {type(placed).__name__}; expected a dict of jax.Arrays"
            )
        return dict(placed)
