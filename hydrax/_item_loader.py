"""Loading a run of items: the calls of the loader function, and what becomes of their results.

The same code loads in a worker and, where ``loader_count`` is 0, in the main process. Imports no
JAX.
"""

from __future__ import annotations

import array
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from hydrax import _context, _core, _debug
from hydrax._convert import convert
from hydrax._failures import describe_failure
from hydrax._random import ItemRandom
from hydrax._specs import ArrayLayout
from hydrax.errors import ValueRangeError

__all__ = ["ItemLoader", "LoadGroup", "LoadJob"]

# Item views are made once and kept, up to so many arrays; beyond that they are made as needed,
# so that a worker's own memory stays small.
_KEPT_VIEWS = 8192
# Bytes of items that are loaded at a time where they are to be converted.
_CONVERT_NBYTES = 256 * 1024

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class LoadGroup:
    """What a worker knows of one group.

    Attributes:
        data: The descriptors.
        layouts: What lies in a slot.
        loaded_dtypes: Array name to the dtype that the loader fills, for the arrays where it is
            not the slot's.
        is_validation: Whether loaders get None as seed.
    """

    data: Sequence[Any]
    layouts: Mapping[str, ArrayLayout]
    loaded_dtypes: Mapping[str, np.dtype[Any]]
    is_validation: bool

    def __getstate__(self) -> tuple[Any, ...]:
        # A mappingproxy cannot be pickled.
        return self.data, dict(self.layouts), dict(self.loaded_dtypes), self.is_validation

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(
            ("data", "layouts", "loaded_dtypes", "is_validation"), state, strict=True
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class LoadJob:
    """Everything that a worker is to do; the same for all workers of a Dataloader."""

    loader_func: Callable[..., Any]
    startup_func: Callable[[], None] | None
    groups: tuple[LoadGroup, ...]
    training_group_count: int
    is_batched: bool
    is_debug: bool
    nice: int

    def make_loader(self, arena: _core.Arena) -> ItemLoader:
        """What loads the items in a loader process."""
        return ItemLoader(arena, self)


class _ItemError(Exception):
    """Carries which item of a run failed, with the exception as its cause."""

    def __init__(self, item: int, stage: str) -> None:
        super().__init__(item, stage)
        self.item = item
        self.stage = stage


class ItemLoader:
    """Loads runs of items into an arena.

    Args:
        arena: Where to load to.
        job: What to load, and how.

    Attributes:
        last_error: The exception of the item that failed last, for the process that loads itself.
    """

    def __init__(self, arena: _core.Arena, job: LoadJob) -> None:
        self._arena = arena
        self._job = job
        self._slots: dict[tuple[int, int], Arrays] = {}
        self._views: dict[tuple[int, int], list[Arrays]] = {}
        self._kept = 0
        self._scratch: dict[int, Arrays] = {}
        self._random = ItemRandom()
        self.last_error: BaseException | None = None

    @property
    def random(self) -> ItemRandom:
        """The global generators' switch."""
        return self._random

    def load(self, run: _core.Run) -> None:
        """Load a run's items and end the run, failed if an item fails.

        An ``Exception`` of the loader function ends there. Another ``BaseException`` fails the run
        too, and goes on in the main process, where it means something.
        """
        group = self._job.groups[run.group]
        previous = _context.set_run(run, self._job.training_group_count)
        try:
            load = self._load_batched if self._job.is_batched else self._load_items
            results = load(run, group)
            payload = None
            if results is not None:
                try:
                    payload = pickle.dumps(results, protocol=5)
                except Exception as error:
                    item = run.first + self._unpicklable(results)
                    raise _ItemError(item, "sending the result of") from error
            run.complete(payload)
        except _ItemError as failed:
            cause = failed.__cause__
            assert cause is not None
            self.last_error = cause
            failure = describe_failure(cause, self._describe_arrays(group), failed.stage)
            run.fail(failed.item, pickle.dumps(tuple(failure)))
            if not _context.is_worker() and not isinstance(cause, Exception):
                raise cause from None
        except BaseException as error:  # no room for the results, or a signal's handler raised
            self.last_error = error
            self.fail(run, error, "keeping the results of")
            if not _context.is_worker() and not isinstance(error, Exception):
                raise
        finally:
            _context.set_run(*previous)

    def fail(self, run: _core.Run, error: BaseException, stage: str) -> None:
        """End a run as failed without loading it."""
        run.fail(run.first, pickle.dumps(tuple(describe_failure(error, "", stage))))

    def _load_items(self, run: _core.Run, group: LoadGroup) -> dict[str, Any] | None:
        """One call of the loader function per item. Returns ``{key: [value per item]}``."""
        if group.loaded_dtypes:
            return self._load_converted(run, group)
        results: list[Any] = []
        self._load_stretch(run, group, run.first, self._item_views(run, group), results)
        return _collect(results, run.count)

    def _load_stretch(
        self,
        run: _core.Run,
        group: LoadGroup,
        first: int,
        views: Sequence[Arrays],
        results: list[Any],
    ) -> None:
        """Load len(views) items, from the batch's item `first` on, into views."""
        loader = self._job.loader_func
        begin = run.begin
        forget = self._random.forget
        data = group.data
        start = first - run.first
        indices = run.indices()[start : start + len(views)]
        seeds = run.seeds()[start : start + len(views)]
        given: Sequence[int | None] = [None] * len(seeds) if group.is_validation else seeds
        item = first
        has_results = False
        try:
            if self._job.is_debug:
                loader = _poisoning(loader, self._random.forget)
            for index, view, seed, item_seed in zip(indices, views, given, seeds, strict=True):
                if begin(item, item_seed):
                    forget()
                result = loader(data[index], view, seed)
                if result is not None:
                    if not has_results:
                        results.extend([None] * (item - run.first - len(results)))
                        has_results = True
                    results.append(_own_result(_checked_result(result)))
                elif has_results:
                    results.append(None)
                item += 1
        except BaseException as error:
            raise _ItemError(item, "loading") from error

    def _load_converted(self, run: _core.Run, group: LoadGroup) -> dict[str, Any] | None:
        """Like _load_items() for groups of which an array is converted on its way."""
        scratch = self._scratch_of(run.group, group)
        length = len(next(iter(scratch.values())))
        slot = self._slot_arrays(run.slot, run.group, group)
        results: list[Any] = []
        for first in range(run.first, run.first + run.count, length):
            count = min(length, run.first + run.count - first)
            parts: dict[str, np.ndarray[Any, Any]] = {
                name: scratch[name][:count] if name in scratch else whole[first : first + count]
                for name, whole in slot.items()
            }
            self._load_stretch(run, group, first, _split(parts, count), results)
            _convert_parts(parts, slot, scratch, first, count)
        return _collect(results, run.count)

    def _load_batched(self, run: _core.Run, group: LoadGroup) -> dict[str, Any] | None:
        """One call of the loader function for the whole run."""
        count = run.count
        slot = self._slot_arrays(run.slot, run.group, group)
        stop = run.first + count
        parts = {name: whole[run.first : stop] for name, whole in slot.items()}
        for name, dtype in group.loaded_dtypes.items():
            parts[name] = np.empty((count, *slot[name].shape[1:]), dtype)
        seeds: array.array[int] = array.array("q", bytes(8 * count))
        run.fill_seeds(seeds)
        try:
            if run.begin(run.first, seeds[0]):
                self._random.forget()
            loader = self._job.loader_func
            if self._job.is_debug:
                loader = _poisoning(loader, self._random.forget)
            descriptors = _descriptors(run, group.data)
            result = loader(
                descriptors, MappingProxyType(parts), None if group.is_validation else seeds
            )
            results = _checked_batch_result(result, count)
        except BaseException as error:
            raise _ItemError(run.first, "loading") from error
        if group.loaded_dtypes:
            _convert_parts(parts, slot, group.loaded_dtypes, run.first, count)
        return results

    def _slot_arrays(self, slot: int, group_number: int, group: LoadGroup) -> Arrays:
        """The arrays of a whole batch in a slot."""
        key = (slot, group_number)
        arrays = self._slots.get(key)
        if arrays is None:
            start = slot * self._arena.slot_nbytes
            memory = memoryview(self._arena)
            arrays = {
                name: np.ndarray(layout.shape, layout.dtype, memory, offset=start + layout.offset)
                for name, layout in group.layouts.items()
            }
            self._slots[key] = arrays
        return arrays

    def _item_views(self, run: _core.Run, group: LoadGroup) -> Sequence[Arrays]:
        """The item mappings of a run, kept from one use of the slot to the next."""
        slot = self._slot_arrays(run.slot, run.group, group)
        stop = run.first + run.count
        key = (run.slot, run.group)
        kept = self._views.get(key)
        if kept is None:
            batch_size = len(next(iter(slot.values())))
            if self._kept + batch_size * len(slot) > _KEPT_VIEWS:
                parts = {name: whole[run.first : stop] for name, whole in slot.items()}
                return _split(parts, run.count)
            self._kept += batch_size * len(slot)
            kept = self._views[key] = _split(slot, batch_size)
        return kept[run.first : stop]

    def _scratch_of(self, group_number: int, group: LoadGroup) -> Arrays:
        """Arrays of the loader's dtypes, for some items at a time."""
        scratch = self._scratch.get(group_number)
        if scratch is None:
            item_nbytes = sum(
                group.layouts[name].element_count // group.layouts[name].shape[0] * dtype.itemsize
                for name, dtype in group.loaded_dtypes.items()
            )
            batch_size = next(iter(group.layouts.values())).shape[0]
            count = max(1, min(batch_size, _CONVERT_NBYTES // max(item_nbytes, 1)))
            scratch = {
                name: np.zeros((count, *group.layouts[name].shape[1:]), dtype)
                for name, dtype in group.loaded_dtypes.items()
            }
            self._scratch[group_number] = scratch
        return scratch

    def _describe_arrays(self, group: LoadGroup) -> str:
        return ", ".join(
            f"{name!r} {group.loaded_dtypes.get(name, layout.dtype).name} {layout.shape[1:]}"
            for name, layout in group.layouts.items()
        )

    @staticmethod
    def _unpicklable(results: Mapping[str, Sequence[Any]]) -> int:
        """Position of the first item whose results cannot be pickled."""
        for position in range(len(next(iter(results.values())))):
            try:
                pickle.dumps([values[position] for values in results.values()], protocol=5)
            except Exception:
                return position
        return 0


def _split(parts: Arrays, count: int) -> list[Arrays]:
    """One read-only mapping per item; scalars stay arrays, so that they can be written."""
    return [
        MappingProxyType({name: part[item, ...] for name, part in parts.items()})
        for item in range(count)
    ]


def _convert_parts(
    parts: Arrays, slot: Arrays, names: Mapping[str, Any], first: int, count: int
) -> None:
    """Convert what was loaded beside the slot into it."""
    for name in names:
        try:
            convert(name, parts[name], slot[name][first : first + count])
        except ValueRangeError as error:
            raise _ItemError(first + (error.item or 0), "converting") from error
        except Exception as error:
            raise _ItemError(first, "converting") from error


def _own_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result that stays as it is while further items are loaded."""
    return {
        key: value.copy() if isinstance(value, np.ndarray) and value.base is not None else value
        for key, value in result.items()
    }


def _checked_result(result: Any) -> Mapping[str, Any]:
    if not isinstance(result, Mapping):
        raise TypeError(
            f"the loader function returned {type(result).__name__}; "
            "expected a dict of additional results, or None"
        )
    return result


def _checked_batch_result(result: Any, count: int) -> dict[str, Any] | None:
    """The additional results of a batched loader: one value per item under each key."""
    if result is None:
        return None
    checked = {}
    for key, values in _checked_result(result).items():
        if not hasattr(values, "__len__") or len(values) != count:
            size = f"of {len(values)}" if hasattr(values, "__len__") else "without length"
            raise ValueError(
                f"the loader function returned {type(values).__name__} {size} under {key!r}; "
                f"expected a sequence of {count} values, one per item"
            )
        checked[key] = list(values)
    return checked or None


def _collect(results: Sequence[Mapping[str, Any] | None], count: int) -> dict[str, Any] | None:
    """Item results as ``{key: [value per item]}``, with None where an item has no such key."""
    keys: dict[str, None] = {}
    for result in results:
        if result is not None:
            keys.update(dict.fromkeys(result))
    if not keys:
        return None
    padded = [*results, *[None] * (count - len(results))]
    return {key: [None if r is None else r.get(key) for r in padded] for key in keys}


def _descriptors(run: _core.Run, data: Sequence[Any]) -> Sequence[Any]:
    """The descriptors of a run's items, as an array where the data is a range or an array."""
    if not isinstance(data, (range, np.ndarray)):
        return [data[index] for index in run.indices()]
    indices = np.empty(run.count, np.int64)
    run.fill_indices(indices.data)
    if isinstance(data, np.ndarray):
        return cast(Sequence[Any], data[indices])
    if data.step != 1:
        indices *= data.step
    if data.start != 0:
        indices += data.start
    return cast(Sequence[Any], indices)


def _poisoning(loader: Callable[..., Any], forget: Callable[[], None]) -> Callable[..., Any]:
    """The loader function, with what it leaves unwritten made an error."""

    def checked(descriptor: Any, arrays: Arrays, seed: Any) -> Any:
        _debug.poison(arrays, _debug.PATTERNS[0])
        result = loader(descriptor, arrays, seed)
        suspected = _debug.suspects(arrays, _debug.PATTERNS[0])
        if suspected:
            _debug.poison(arrays, _debug.PATTERNS[1])
            if _core.random_restart():
                forget()
            result = loader(descriptor, arrays, seed)
            _debug.check_written(arrays, suspected)
        return result

    return checked
