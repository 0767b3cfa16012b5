"""Loading a run of items: the calls of the loader function, and what becomes of their results.

The same code loads in a worker and, where ``loader_count`` is 0, in the main process. Imports no
JAX.
"""

from __future__ import annotations

import array
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from hydrax import _context, _core
from hydrax._convert import convert
from hydrax._debug import CheckedLoader, Checksums, checksums_of
from hydrax._failures import EXITS, LoadFailure, RunReport, describe_failure, is_of
from hydrax._item_errors import item_of
from hydrax._mapped import reads_of
from hydrax._ragged import with_lengths
from hydrax._random import ItemRandom
from hydrax._sequences import items_of, take_array
from hydrax._shared_items import readable
from hydrax._specs import ArrayLayout
from hydrax.errors import ValueRangeError

__all__ = ["ItemLoader", "LoadGroup", "LoadJob"]

# Item views are made once and kept, up to so many arrays; beyond that they are made as needed,
# so that a worker's own memory stays small.
_KEPT_VIEWS = 8192
# Bytes of items that are loaded at a time where they are to be converted.
_CONVERT_NBYTES = 256 * 1024
# The instruction of a pickle that looks up a class or function; without one nothing can go wrong.
_STACK_GLOBAL = b"\x93"

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class LoadGroup:
    """What a worker knows of one group.

    Attributes:
        data: The descriptors.
        layouts: What lies in a slot.
        loaded_dtypes: Array name to the dtype that the loader fills, for the arrays where it is
            not the slot's.
        ragged: Name of each ragged array to whether items that are too long are cut off.
        is_validation: Whether loaders get None as seed.
    """

    data: Sequence[Any]
    layouts: Mapping[str, ArrayLayout]
    loaded_dtypes: Mapping[str, np.dtype[Any]]
    ragged: Mapping[str, bool]
    is_validation: bool

    def __getstate__(self) -> dict[str, Any]:
        # A mappingproxy cannot be pickled.
        return {**self.__dict__, "layouts": dict(self.layouts)}


@dataclass(frozen=True)
class LoadJob:
    """Everything that a worker is to do; the same for all workers of a Dataloader.

    With ``skips_items``, an item that cannot be loaded leaves zeros in its place, and the run goes
    on with the next one.
    """

    loader_func: Callable[..., Any]
    startup_func: Callable[[], None] | None
    groups: tuple[LoadGroup, ...]
    training_group_count: int
    is_batched: bool
    is_debug: bool
    nice: int
    skips_items: bool

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
        self._data = tuple(readable(group.data) for group in job.groups)
        self._slots: dict[tuple[int, int], Arrays] = {}
        self._views: dict[tuple[int, int], list[Arrays]] = {}
        self._kept = 0
        self._reads = [reads_of(group.data) for group in job.groups]
        self._scratch: dict[int, Arrays] = {}
        self._random = ItemRandom()
        self._checksums: Checksums = {}
        self.last_error: BaseException | None = None

    @property
    def random(self) -> ItemRandom:
        """The global generators' switch."""
        return self._random

    def load(self, run: _core.Run) -> None:
        """Load a run's items and end the run, failed if an item fails that is not skipped.

        An ``Exception`` of the loader function ends there. Another ``BaseException`` fails the run
        too, and goes on in the main process, where it means something.
        """
        group = self._job.groups[run.group]
        skipped: dict[int, LoadFailure] = {}
        self._checksums = {}
        previous = _context.set_run(run, self._job.training_group_count)
        try:
            load = self._load_batched if self._job.is_batched else self._load_items
            results = load(run, group, skipped)
            reads = self._reads[run.group]
            if reads is not None:
                reads.note_run(run)
            run.complete(self._pack(run, group, results, skipped))
        except _ItemError as failed:
            cause = failed.__cause__
            assert cause is not None
            self.last_error = cause
            run.fail(failed.item, pickle.dumps(tuple(self._describe(group, failed))))
            if not _context.is_worker() and not is_of(cause, Exception):
                raise cause from None
        except BaseException as error:  # no room for the results, or a signal's handler raised
            self.last_error = error
            self.fail(run, error, "keeping the results of")
            if not _context.is_worker() and not is_of(error, Exception):
                raise
        finally:
            _context.set_run(*previous)

    def fail(self, run: _core.Run, error: BaseException, stage: str) -> None:
        """End a run as failed without loading it."""
        run.fail(run.first, pickle.dumps(tuple(describe_failure(error, "", stage))))

    def _describe(self, group: LoadGroup, failed: _ItemError) -> LoadFailure:
        assert failed.__cause__ is not None
        return describe_failure(failed.__cause__, self._describe_arrays(group), failed.stage)

    def _skip(self, group: LoadGroup, failed: _ItemError, skipped: dict[int, LoadFailure]) -> None:
        """Note that an item is left out; raises what failed where that is not to be."""
        assert failed.__cause__ is not None
        if not self._job.skips_items or is_of(failed.__cause__, EXITS):
            raise failed
        skipped[failed.item] = self._describe(group, failed)

    def _pack(
        self,
        run: _core.Run,
        group: LoadGroup,
        results: dict[str, list[Any]] | None,
        skipped: dict[int, LoadFailure],
    ) -> bytes | None:
        """The bytes that a run leaves for the main process; None if it has nothing to say."""
        packed: bytes | None = None
        if results is not None:
            _forget_results(results, run.first, skipped)
            try:
                packed = _packed(results)
            except BaseException:  # the classes of the results may do anything
                if not self._find_unpicklable(run, group, results, skipped):
                    raise
                _forget_results(results, run.first, skipped)
                packed = _packed(results)
        if not skipped and not self._job.is_debug:
            return packed
        slot = self._slot_arrays(run.slot, run.group, group)
        for item in skipped:
            # Whatever was loaded until it failed, or is there from an earlier batch.
            _clear({name: whole[item, ...] for name, whole in slot.items()})
            self._checksums.pop(item, None)
        return pickle.dumps(RunReport(packed, skipped, self._checksums), protocol=5)

    def _checked(self, loader_func: Callable[..., Any], first: int) -> Callable[..., Any]:
        """The loader function for single items from `first` on, as debug mode calls it."""
        loader = CheckedLoader(loader_func, self._random.forget)
        items = itertools.count(first)

        def load_and_sum(descriptor: Any, arrays: Arrays, seed: int | None) -> Any:
            result = loader(descriptor, arrays, seed)
            self._checksums[next(items)] = checksums_of(arrays)
            return result

        return load_and_sum

    def _sum_slot(self, slot: Arrays, first: int, count: int) -> None:
        """Keep the checksums of items as they lie in the slot."""
        for item in range(first, first + count):
            parts = {name: whole[item, ...] for name, whole in slot.items()}
            self._checksums[item] = checksums_of(parts)

    def _find_unpicklable(
        self,
        run: _core.Run,
        group: LoadGroup,
        results: Mapping[str, Sequence[Any]],
        skipped: dict[int, LoadFailure],
    ) -> bool:
        """Skip the items whose results cannot be sent, or raise the first of them.

        Returns:
            Whether there are any.
        """
        is_found = False
        for position in range(run.count):
            try:
                _packed({key: values[position] for key, values in results.items()})
            except BaseException as error:
                failed = _ItemError(run.first + position, "sending the result of")
                failed.__cause__ = error
                self._skip(group, failed, skipped)
                is_found = True
        return is_found

    def _load_items(
        self, run: _core.Run, group: LoadGroup, skipped: dict[int, LoadFailure]
    ) -> dict[str, list[Any]] | None:
        """One call of the loader function per item. Returns ``{key: [value per item]}``."""
        if group.loaded_dtypes:
            return self._load_converted(run, group, skipped)
        results: list[Any] = []
        views = self._item_views(run, group)
        self._load_stretch(run, group, run.first, views, results, skipped)
        return _collect(results, run.count)

    def _load_stretch(
        self,
        run: _core.Run,
        group: LoadGroup,
        first: int,
        views: Sequence[Arrays],
        results: list[Any],
        skipped: dict[int, LoadFailure],
    ) -> None:
        """Load len(views) items, from the batch's item `first` on, into views."""
        item = first
        while True:
            try:
                self._call_each(run, group, item, views[item - first :], results)
                return
            except _ItemError as failed:
                self._skip(group, failed, skipped)
                item = failed.item + 1
            finally:
                run.check()  # the loader function may have forked

    def _call_each(
        self,
        run: _core.Run,
        group: LoadGroup,
        first: int,
        views: Sequence[Arrays],
        results: list[Any],
    ) -> None:
        """Load len(views) items, until one fails."""
        loader = self._job.loader_func
        begin = run.begin
        forget = self._random.forget
        start = first - run.first
        indices = run.indices()[start : start + len(views)]
        seeds = run.seeds()[start : start + len(views)]
        given: Sequence[int | None] = [None] * len(seeds) if group.is_validation else seeds
        item = first
        has_results = False
        try:
            descriptors = items_of(self._data[run.group], indices)
            if group.ragged:
                loader = with_lengths(loader, group.ragged, is_batched=False)
            if self._job.is_debug:
                loader = self._checked(loader, first)
            for position, (view, seed, item_seed) in enumerate(
                zip(views, given, seeds, strict=True)
            ):
                if begin(item, item_seed):
                    forget()
                result = loader(descriptors[position], view, seed)
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

    def _load_converted(
        self, run: _core.Run, group: LoadGroup, skipped: dict[int, LoadFailure]
    ) -> dict[str, list[Any]] | None:
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
            self._load_stretch(run, group, first, _split(parts, count), results, skipped)
            try:
                _convert_parts(parts, slot, scratch, first, count)
            except _ItemError as failed:
                if failed.item not in skipped:  # or it is what an item left that had failed
                    self._skip(group, failed, skipped)
                self._convert_each(group, parts, slot, first, count, skipped)
            if self._job.is_debug:
                self._sum_slot(slot, first, count)
        return _collect(results, run.count)

    def _convert_each(
        self,
        group: LoadGroup,
        parts: Arrays,
        slot: Arrays,
        first: int,
        count: int,
        skipped: dict[int, LoadFailure],
    ) -> None:
        """Convert what was loaded item by item, and skip those that do not fit."""
        for item in range(first, first + count):
            if item not in skipped:
                part = {name: array[item - first :][:1] for name, array in parts.items()}
                try:
                    _convert_parts(part, slot, group.loaded_dtypes, item, 1)
                except _ItemError as failed:
                    self._skip(group, failed, skipped)

    def _load_batched(
        self, run: _core.Run, group: LoadGroup, skipped: dict[int, LoadFailure]
    ) -> dict[str, list[Any]] | None:
        """One call of the loader function for the whole run, or where it fails for each item."""
        try:
            return self._call_for(run, group, run.first, run.count)
        except _ItemError as failed:
            # Raises what is not to be skipped. Which item it is is found by calling for each.
            self._skip(group, failed, skipped)
            if run.count == 1:
                return None
        skipped.clear()
        results: dict[str, list[Any]] = {}
        for position in range(run.count):
            try:
                found = self._call_for(run, group, run.first + position, 1)
            except _ItemError as failed:
                self._skip(group, failed, skipped)
                continue
            for key, (value,) in (found or {}).items():
                results.setdefault(key, [None] * run.count)[position] = value
        return results or None

    def _call_for(
        self, run: _core.Run, group: LoadGroup, first: int, count: int
    ) -> dict[str, list[Any]] | None:
        """One call of the loader function for `count` items of a run."""
        slot = self._slot_arrays(run.slot, run.group, group)
        parts = {name: whole[first : first + count] for name, whole in slot.items()}
        for name, dtype in group.loaded_dtypes.items():
            parts[name] = np.empty((count, *slot[name].shape[1:]), dtype)
        start = first - run.first
        seeds: array.array[int] = array.array("q", bytes(8 * run.count))
        run.fill_seeds(seeds)
        seeds = seeds[start : start + count]
        try:
            if run.begin(first, seeds[0]):
                self._random.forget()
            loader = self._job.loader_func
            if group.ragged:
                loader = with_lengths(loader, group.ragged, is_batched=True)
            if self._job.is_debug:
                loader = CheckedLoader(loader, self._random.forget)
            descriptors = _descriptors(run, self._data[run.group], start, count)
            result = loader(
                descriptors, MappingProxyType(parts), None if group.is_validation else seeds
            )
            results = _checked_batch_result(result, count)
        except BaseException as error:
            raise _ItemError(first + item_of(error, count), "loading") from error
        finally:
            run.check()
        if group.loaded_dtypes:
            _convert_parts(parts, slot, group.loaded_dtypes, first, count)
        if self._job.is_debug:
            self._sum_slot(slot, first, count)
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
        """Arrays of the loader's dtypes, for some items at a time; in debug mode, for one."""
        scratch = self._scratch.get(group_number)
        if scratch is None:
            item_nbytes = sum(
                group.layouts[name].element_count // group.layouts[name].shape[0] * dtype.itemsize
                for name, dtype in group.loaded_dtypes.items()
            )
            batch_size = next(iter(group.layouts.values())).shape[0]
            count = max(1, min(batch_size, _CONVERT_NBYTES // max(item_nbytes, 1)))
            if self._job.is_debug:
                count = 1
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


def _split(parts: Arrays, count: int) -> list[Arrays]:
    """One read-only mapping per item; scalars stay arrays, so that they can be written."""
    return [
        MappingProxyType({name: part[item, ...] for name, part in parts.items()})
        for item in range(count)
    ]


def _clear(arrays: Arrays) -> None:
    """Make all bytes of some C-contiguous arrays zero."""
    for part in arrays.values():
        part.reshape(-1).view(np.uint8)[:] = 0


def _forget_results(results: Mapping[str, list[Any]], first: int, skipped: Iterable[int]) -> None:
    """Take out what items returned that are skipped."""
    for item in skipped:
        for values in results.values():
            values[item - first] = None


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


def _packed(results: Mapping[str, Any]) -> bytes:
    """Results pickled; raises, too, what rebuilding them raises.

    The main process has them from one pickle, so that there a single one costs those of all items.
    """
    packed = pickle.dumps(results, protocol=5)
    if _STACK_GLOBAL in packed:
        pickle.loads(packed)
    return packed


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


def _checked_batch_result(result: Any, count: int) -> dict[str, list[Any]] | None:
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


def _collect(
    results: Sequence[Mapping[str, Any] | None], count: int
) -> dict[str, list[Any]] | None:
    """Item results as ``{key: [value per item]}``, with None where an item has no such key."""
    keys: dict[str, None] = {}
    for result in results:
        if result is not None:
            keys.update(dict.fromkeys(result))
    if not keys:
        return None
    padded = [*results, *[None] * (count - len(results))]
    return {key: [None if r is None else r.get(key) for r in padded] for key in keys}


def _descriptors(run: _core.Run, data: Sequence[Any], start: int, count: int) -> Sequence[Any]:
    """Descriptors of some of a run's items, as an array where the data is a range or an array."""
    indices = np.empty(run.count, np.int64)
    run.fill_indices(indices.data)
    return take_array(data, indices[start : start + count])
