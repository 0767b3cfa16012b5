"""What a Dataloader is made from: its arguments, checked and worked out, as one frozen object.

Nothing is taken here: no memory, no processes, no files. The memory that is available is looked
up, so that what cannot fit is refused early. hydrax._dataloader documents the arguments, and
hydrax._flow is what runs by them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hydrax import _core, _spawned
from hydrax._arguments import (
    check_bool,
    check_choice,
    check_end,
    check_int,
    check_start,
    check_timeout,
)
from hydrax._caching import Caching, GroupCache, file_layouts
from hydrax._datagroup import DataGroup, DataGroups, check_groups, check_validation
from hydrax._item_loader import LoadGroup, LoadJob
from hydrax._memory import available_nbytes, format_nbytes
from hydrax._mixing import EpochEnd, check_epoch_end, check_weights
from hydrax._schedule import GroupOrder, Schedule, Validation
from hydrax._sequences import refuse_fork
from hydrax._specs import ArrayLayout, lay_out, placed_specs
from hydrax._workers import StartMethod
from hydrax.errors import ArenaMemoryError, LoaderError

if TYPE_CHECKING:
    import jax
    import numpy as np

__all__ = [
    "LoaderFunc",
    "OnError",
    "PlacementFunc",
    "Setup",
    "check_memory",
    "make_caching",
    "make_setup",
]

logger = logging.getLogger(__name__)

_START_METHODS = ("fork", "forkserver", "spawn")
_POLICIES = ("raise", "drop_batch", "skip_item")

LoaderFunc = Callable[..., Mapping[str, Any] | None]
OnError = Literal["raise", "drop_batch", "skip_item"] | Callable[[LoaderError], object]
PlacementFunc = Callable[
    [
        "Mapping[str, np.ndarray[Any, Any]]",
        Mapping[str, ArrayLayout],
        Mapping[str, Sequence[Any]],
        "DataGroup[Any]",
    ],
    "dict[str, jax.Array]",
]

Groups = tuple[DataGroup[Any], ...]
Layouts = list[Mapping[str, ArrayLayout]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A Dataloader's arguments, with what follows from them.

    What is not listed is as the argument says.

    Attributes:
        groups: The training groups, and then the validation groups.
        schedule: Which batch comes when.
        loader_count: Loader processes; 0 where there is nothing to load.
        timeout_s: Seconds to wait for a batch; None waits for ever.
        layouts: For each group the layouts of its arrays in a slot.
        cache_layouts: For each group those in a file of the disk cache.
        job: What those who load are to do.
        packed_job: The same as bytes, where it has to be sent to loader processes.
        arena_config: Arguments of the arena.
    """

    training: Groups
    validation: Groups
    groups: Groups
    schedule: Schedule
    depth: int
    loader_count: int
    cacher_count: int
    max_restarts: int
    timeout_s: float | None
    deterministic: bool
    start_method: StartMethod
    on_error: OnError
    placement_func: PlacementFunc | None
    layouts: Layouts
    cache_layouts: Layouts
    job: LoadJob
    packed_job: bytes | None
    arena_config: Mapping[str, Any]

    @property
    def arena_nbytes(self) -> int:
        """Bytes of shared memory."""
        return _core.Arena.required_nbytes(**self.arena_config)


def make_setup(
    loader_func: LoaderFunc | None,
    training: DataGroups[Any],
    *,
    validation: tuple[str, int, DataGroups[Any]] | None,
    depth: int,
    loader_count: int,
    loader_nice: int,
    cacher_count: int,
    start_at: tuple[int, int],
    end_at: tuple[str, int] | None,
    interleave_groups: bool,
    weights: Iterable[float] | Mapping[str, float] | None,
    epoch_end: EpochEnd | int | None,
    deterministic: bool,
    timeout_sec: float,
    startup_func: Callable[[], None] | None,
    placement_func: PlacementFunc | None,
    start_method: StartMethod,
    batched: bool | None,
    debug: bool,
    on_error: OnError,
    max_restarts: int,
) -> Setup:
    """Check the arguments of a Dataloader, which see, and work out what follows from them.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: An argument has a value that cannot be.
        ArenaMemoryError: ``depth`` batches do not fit the memory that is available.
    """
    for name, func in (
        ("loader_func", loader_func),
        ("startup_func", startup_func),
        ("placement_func", placement_func),
    ):
        if not callable(func) and func is not None:
            raise TypeError(f"{name} is {func!r}; expected a callable")
    check_choice("start_method", start_method, _START_METHODS)
    if not callable(on_error):
        check_choice("on_error", on_error, _POLICIES, otherwise=", or a callable")
    depth = check_int("depth", depth, minimum=1, maximum=2**20)
    loader_count = check_int("loader_count", loader_count, minimum=0, maximum=2**12)
    cacher_count = check_int("cacher_count", cacher_count, minimum=0, maximum=2**8)
    max_restarts = check_int("max_restarts", max_restarts, minimum=0)
    timeout_s = check_timeout(timeout_sec)
    interleave_groups = check_bool("interleave_groups", interleave_groups)
    debug = check_bool("debug", debug)
    training_groups = check_groups("training", training)
    names = list(training) if isinstance(training, Mapping) else None
    mode, interval, validation_groups = check_validation(validation)
    if weights is None and epoch_end is not None:
        raise ValueError("epoch_end is for groups that are mixed by weight; give weights")
    if weights is not None and not interleave_groups:
        raise ValueError("weights mix the groups; leave out interleave_groups=False")
    schedule = Schedule(
        _group_orders(training_groups),
        Validation(mode, interval, tuple(_group_orders(validation_groups)))
        if validation_groups
        else None,
        start_at=check_start(start_at),
        end_at=check_end(end_at),
        interleave_groups=interleave_groups,
        weights=None if weights is None else check_weights(weights, len(training_groups), names),
        epoch_end=check_epoch_end(epoch_end),
    )
    if schedule.last_batch is not None and schedule.last_batch < schedule.first_batch:
        raise ValueError(
            f"end_at {end_at} (batch {schedule.last_batch}) comes before start_at "
            f"{start_at} (batch {schedule.first_batch}); both count from the beginning"
        )
    if batched is None:
        batched = getattr(loader_func, "is_batched", False)
    groups = (*training_groups, *validation_groups)
    if not any(group.specs for group in groups):
        logger.info("all batches come from a disk cache; nothing is loaded")
        loader_count = 0
    elif loader_func is None:
        raise TypeError("loader_func is None; expected a callable, as there are loader_arrays")
    canonical = None
    if placement_func is None:
        from hydrax._placement import canonical_dtypes

        canonical = canonical_dtypes()
    layouts, slot_nbytes = _lay_out_slots(groups, canonical)
    job = LoadJob(
        loader_func or _load_nothing,
        startup_func,
        _load_groups(groups, layouts, len(training_groups)),
        len(training_groups),
        check_bool("batched", batched),
        debug or os.environ.get("HYDRAX_DEBUG", "0") not in ("", "0"),
        check_int("loader_nice", loader_nice, minimum=-(2**30), maximum=2**30),
        on_error == "skip_item",
    )
    packed_job: bytes | None = None
    if loader_count > 0:
        if start_method == "fork":
            for group in groups:
                refuse_fork(group.data)
        else:
            packed_job = _spawned.pack_job(job)
    check_memory(depth, depth * slot_nbytes)
    setup = Setup(
        training=training_groups,
        validation=validation_groups,
        groups=groups,
        schedule=schedule,
        depth=depth,
        loader_count=loader_count,
        cacher_count=cacher_count,
        max_restarts=max_restarts,
        timeout_s=timeout_s,
        deterministic=check_bool("deterministic", deterministic),
        start_method=start_method,
        on_error=on_error,
        placement_func=placement_func,
        layouts=layouts,
        cache_layouts=[file_layouts(group, canonical) for group in groups],
        job=job,
        packed_job=packed_job,
        arena_config={
            "slot_count": depth,
            "slot_nbytes": max(slot_nbytes, 1),
            "worker_count": max(loader_count, 1),
            "group_count": len(groups),
            "batch_capacity": max(group.batch_size for group in groups),
            "is_batched": job.is_batched,
        },
    )
    check_memory(depth, setup.arena_nbytes)
    return setup


def make_caching(setup: Setup) -> Caching | None:
    """The disk caches of a Dataloader's groups, not opened; None if no group has one."""
    training_count = len(setup.training)
    caches = [
        GroupCache(
            group,
            index if index < training_count else index - training_count,
            setup.cache_layouts[index],
            is_validation=index >= training_count,
        )
        if group.cache_location is not None
        else None
        for index, group in enumerate(setup.groups)
    ]
    if not any(caches):
        return None
    return Caching(caches, setup.depth, setup.cacher_count, setup.timeout_s)


def _group_orders(groups: Groups) -> list[GroupOrder]:
    return [
        GroupOrder(
            len(group),
            group.batch_size,
            _core.mix(_fold(group.seed), index),
            group.shuffle_first,
            group.shuffle_later,
            group.remainder,
        )
        for index, group in enumerate(groups)
    ]


def _fold(seed: int) -> int:
    """A seed within the 64 bits of the core, to which each bit of a longer one contributes."""
    while seed >= 2**64:
        seed = (seed >> 128 << 64) | _core.mix(seed % 2**64, (seed >> 64) % 2**64)
    return seed


def _lay_out_slots(
    groups: Groups, canonical: Mapping[np.dtype[Any], np.dtype[Any]] | None
) -> tuple[Layouts, int]:
    """Layouts of each group's arrays in a slot, and the bytes of the largest."""
    if canonical is None:
        # A placement_func gets what the loader filled.
        layouts: Layouts = [group.loader_layouts or {} for group in groups]
        return layouts, max(group.loader_size or 0 for group in groups)
    placed = [lay_out(placed_specs(group.specs, canonical), group.batch_size) for group in groups]
    return [layouts for layouts, _ in placed], max(nbytes for _, nbytes in placed)


def _load_groups(groups: Groups, layouts: Layouts, training_count: int) -> tuple[LoadGroup, ...]:
    return tuple(
        LoadGroup(
            group.data,
            group_layouts,
            {
                spec.name: spec.dtype
                for spec in group.specs
                if spec.dtype != group_layouts[spec.name].dtype
            },
            {spec.name: spec.truncate for spec in group.specs if spec.ragged},
            is_validation=index >= training_count,
        )
        for index, (group, group_layouts) in enumerate(zip(groups, layouts, strict=True))
    )


def check_memory(depth: int, wanted: int) -> None:
    """Refuse an arena that does not fit.

    Raises:
        ArenaMemoryError: So many bytes for depth batches are not there now.
    """
    available = available_nbytes()
    if wanted > available:
        raise ArenaMemoryError(
            f"{depth} batches (depth) need {format_nbytes(wanted)} ({wanted} bytes), but "
            f"{format_nbytes(available)} ({available} bytes) of memory are available; lower "
            "depth or batch_size"
        )


def _load_nothing(descriptor: Any, arrays: Any, seed: Any) -> None:
    """Stands in for a loader function where all batches come from the disk cache."""
