"""The disk cache of a Dataloader: which batches are read from it, which are saved to it.

What a batch holds is known by its key, which is the same in all epochs that use the same content.
While a batch is being loaded or saved, no other with its key is planned, so that nothing is loaded
twice.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hydrax import _core
from hydrax._cache import (
    CachedBatch,
    CacheFolder,
    DamagedFileError,
    Key,
    batch_files,
    file_nbytes,
)
from hydrax._cache_reader import CacheReader, ReadTask
from hydrax._cache_values import encode_additional
from hydrax._cache_writer import CacheWriter, WriteTarget, WriteTask
from hydrax._convert import convert
from hydrax._datagroup import DataGroup
from hydrax._fingerprint import sample_fingerprint
from hydrax._memory import format_nbytes
from hydrax._schedule import PlannedBatch
from hydrax._specs import ArrayLayout, lay_out, placed_specs
from hydrax.errors import BatchTimeoutError, CacheError, CacheMissingError

if TYPE_CHECKING:
    import jax

__all__ = ["Caching", "GroupCache", "file_layouts"]

logger = logging.getLogger(__name__)

# Cached batches to look at ahead, in search of others for the workers to load.
_LOOK_AHEAD = 256
# How long to wait for a batch to be saved between two looks at whether waiting is to end.
_PIECE_S = 0.1
# Counting the bytes of a folder anew takes at most this share of the time.
_COUNT_SHARE = 0.05
_COUNT_EVERY_S = 1.0


class GroupCache:
    """The disk cache of one group.

    Args:
        group: The group, with a cache_location.
        place: Its place among the training, or the validation groups.
        layouts: Layouts of the arrays in a file.
        is_validation: Whether it is a validation group.
    """

    def __init__(
        self,
        group: DataGroup[Any],
        place: int,
        layouts: Mapping[str, ArrayLayout],
        *,
        is_validation: bool,
    ) -> None:
        assert group.cache_location is not None
        self._group = group
        self.is_user_made = group.is_cache_user_made
        self.can_load = bool(group.specs)
        self.can_save = self.can_load and not group.cache_readonly
        self.folder = CacheFolder(
            group.cache_location,
            _facts(group, place, layouts, is_validation=is_validation),
            layouts,
            is_readonly=not self.can_save,
        )
        self.target = WriteTarget(self.folder)
        self._used_nbytes = 0
        self._count_after = 0.0
        self._is_full = False

    def open(self) -> None:
        """Check or make the cache; see CacheFolder.open()."""
        try:
            self.folder.open()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.target.stop(error, 0)

    def takes(self, nbytes: int) -> bool:
        """Whether a file of so many bytes may be saved; counts it if so."""
        if not self.can_save or self.target.is_stopped:
            return False
        limit = self._group.cache_bytes
        if limit is None:
            return True
        if self._used_nbytes + nbytes <= limit and time.monotonic() >= self._count_after:
            self._count()  # other jobs may write to it, too
        if self._used_nbytes + nbytes > limit:
            if not self._is_full:
                self._is_full = True
                logger.info(
                    "the disk cache in %r holds %s of at most %s (cache_bytes) and takes no more "
                    "batches; those that are not in it are loaded each time",
                    self.folder.path,
                    format_nbytes(self._used_nbytes),
                    format_nbytes(limit),
                )
            return False
        self._used_nbytes += nbytes
        return True

    def _count(self) -> None:
        start = time.monotonic()
        used = 0
        for entry in batch_files(self.folder.path):
            try:
                used += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
        # What is on its way to the disk is not among these files.
        self._used_nbytes = max(used, self._used_nbytes)
        end = time.monotonic()
        self._count_after = end + max(_COUNT_EVERY_S, (end - start) / _COUNT_SHARE)


def _facts(
    group: DataGroup[Any], place: int, layouts: Mapping[str, ArrayLayout], *, is_validation: bool
) -> dict[str, Any]:
    """What decides the content of a group's cache, as JSON values under names for messages."""
    fingerprint = group.cache_fingerprint
    sample = None if fingerprint is not None else sample_fingerprint(group.data)
    if fingerprint is None and sample is None:
        logger.warning(
            "the descriptors of the data say nothing that lasts, so the disk cache in %r cannot be "
            "told from one of other data of the same length; give the DataGroup a "
            "cache_fingerprint, and change it with the data",
            group.cache_location,
        )
    return {
        "made by": "Batch.cache" if group.is_cache_user_made else "the loader function",
        "kind": "validation" if is_validation else "training",
        "place among the groups": place,
        "item count": len(group),
        "batch_size": group.batch_size,
        "seed": group.seed,
        "shuffle_first": group.shuffle_first,
        "shuffle_later": group.shuffle_later,
        "remainder": group.remainder,
        "arrays": [
            [name, list(layout.shape[1:]), layout.dtype.name] for name, layout in layouts.items()
        ],
        "cache_fingerprint": fingerprint,
        "sample of the data": sample,
    }


class Caching:
    """The disk caches of a Dataloader's groups.

    Args:
        groups: The cache of each group, None for those without.
        depth: Batches to read ahead, and batches that may wait to be written.
        cacher_count: Threads that read ahead.
        timeout_s: How long to wait for the disk; None waits for ever.

    Attributes:
        read_count: Batches that came from the cache.
    """

    def __init__(
        self,
        groups: Sequence[GroupCache | None],
        depth: int,
        cacher_count: int,
        timeout_s: float | None,
    ) -> None:
        self._groups = groups
        self._depth = max(depth, 2)
        self._timeout_s = timeout_s
        self._reader = CacheReader(cacher_count)
        self._writer = CacheWriter(self._depth)
        self._reading: dict[int, ReadTask] = {}  # planned, by serial number, in order
        self._loading: set[Hashable] = set()  # keys of batches that workers are to load
        self._offered: Hashable = None  # of the batch that the user may be about to cache
        self._damaged: set[Hashable] = set()
        self._is_closed = False
        self.read_count = 0

    def open(self) -> None:
        """Check or make the caches.

        Raises:
            CacheError: One was made under other parameters.
            CacheMissingError: One that may only be read does not exist.
            OSError: One cannot be made.
        """
        for group in self._groups:
            if group is not None:
                group.open()

    @property
    def saved_count(self) -> int:
        """Batches that were saved."""
        return self._writer.saved_count

    def begin(self) -> None:
        """Another batch is asked for: the last one is not to be cached any more, if it is not."""
        self._offered = None

    def plan(self, planned: PlannedBatch) -> Literal["load", "read", "wait"]:
        """What to do about a batch: have it loaded, read it when its turn comes, or plan it later.

        A batch that is to be read is planned by this call, one to be loaded by published().
        """
        group = self._groups[planned.group_number]
        if group is None:
            return "load"
        if len(self._reading) >= _LOOK_AHEAD:
            return "wait"
        name = _name(planned)
        if name in self._loading or name == self._offered or self._writer.is_saving(name):
            return "wait"
        if group.can_load and (name in self._damaged or not group.folder.has(_key(planned))):
            return "load"
        self._reading[planned.plan.serial] = ReadTask(
            group.folder, _key(planned), planned.item_count
        )
        return "read"

    def published(self, planned: PlannedBatch) -> None:
        """The workers have been told to load a batch."""
        group = self._groups[planned.group_number]
        if group is not None and group.can_save and not group.target.is_stopped:
            self._loading.add(_name(planned))

    def is_read(self, planned: PlannedBatch) -> bool:
        """Whether a batch comes from the cache."""
        return planned.plan.serial in self._reading

    def first_read(self, pending: Iterable[PlannedBatch]) -> PlannedBatch | None:
        """The first batch that comes from the cache, if one does."""
        return next(filter(self.is_read, pending), None)

    def is_loading(self, pending: Iterable[PlannedBatch]) -> bool:
        """Whether any of these is loaded."""
        return not all(map(self.is_read, pending))

    def wait_for(self, planned: PlannedBatch, check: Callable[[], None]) -> None:
        """Wait until a batch that plan() put off is saved; nothing else may be planned."""
        self._loading.clear()
        end = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while not self._writer.wait(_name(planned), _PIECE_S):
            check()
            if end is not None and time.monotonic() > end:
                raise BatchTimeoutError(
                    f"no batch came within timeout_sec={self._timeout_s:g} seconds: saving "
                    f"{self._path(planned)} has not ended"
                )

    def take(
        self, planned: PlannedBatch, check: Callable[[], None]
    ) -> CachedBatch | CacheMissingError | None:
        """The content of a batch that is read; None if it has to be loaded after all.

        Args:
            planned: The batch.
            check: Called while this waits; raises if it is to end.
        """
        self._reader.read_ahead(islice(self._reading.items(), self._depth))
        end = None if self._timeout_s is None else time.monotonic() + self._timeout_s

        def check_all() -> None:
            check()
            if end is not None and time.monotonic() > end:
                raise BatchTimeoutError(
                    f"no batch came within timeout_sec={self._timeout_s:g} seconds: reading "
                    f"{self._path(planned)} has not ended"
                )

        serial = planned.plan.serial
        try:
            found = self._reader.take(serial, self._reading[serial], check_all)
        except DamagedFileError as error:
            del self._reading[serial]
            return self._missing(planned, error)
        del self._reading[serial]
        self.read_count += 1
        return found

    def _missing(self, planned: PlannedBatch, error: DamagedFileError) -> CacheMissingError | None:
        group = self._groups[planned.group_number]
        assert group is not None
        if not group.can_load:
            return CacheMissingError(
                f"batch {planned.epoch_batch} of epoch {planned.epoch} cannot be read from the "
                f"disk cache, {error.path}: {error.reason}; there are no loader_arrays to load it "
                "instead",
                error.path,
            )
        self._damaged.add(_name(planned))
        logger.warning("%s: %s; the batch is loaded again", error.path, error.reason)
        return None

    def save(
        self,
        planned: PlannedBatch,
        lease: _core.Lease,
        additional: Mapping[str, list[Any]] | None,
        *,
        is_copied: bool,
    ) -> bool:
        """Save a batch that has been loaded, if its group is to keep what is loaded.

        Args:
            planned: The batch.
            lease: Its memory, held until it is written.
            additional: Its additional results.
            is_copied: Whether somebody may change that memory as soon as this returns.

        Returns:
            Whether it is saved.

        Raises:
            CacheError: An additional result cannot be kept; names it.
        """
        group = self._groups[planned.group_number]
        if group is None:
            return False
        self._loading.discard(_name(planned))
        if group.is_user_made:
            self._offered = _name(planned)
            return False
        layouts = group.folder.layouts
        try:
            encoded = encode_additional(additional)
        except TypeError as error:
            raise CacheError(str(error)) from None
        if not group.takes(file_nbytes(layouts, encoded)):
            return False
        if is_copied:
            copy = np.array(np.frombuffer(lease, np.uint8))
            self._add(group, planned, lambda: memoryview(copy), encoded)
        else:
            self._add(group, planned, lambda: memoryview(lease), encoded)
        return True

    def save_made(
        self,
        planned: PlannedBatch,
        arrays: Mapping[str, jax.Array],
        additional: Mapping[str, Sequence[Any]] | None,
    ) -> None:
        """Save a batch that the user has made of a loaded one.

        Raises:
            RuntimeError: The Dataloader's block has been left.
            TypeError: An additional result cannot be kept; names it.
        """
        group = self._groups[planned.group_number]
        assert group is not None
        if self._is_closed:
            raise RuntimeError(
                "the Dataloader's with block has been left; a batch is cached inside of it"
            )
        layouts = group.folder.layouts
        encoded = encode_additional(additional)
        if group.takes(file_nbytes(layouts, encoded)):
            item_count = planned.item_count
            self._add(group, planned, lambda: _assemble(arrays, layouts, item_count), encoded)

    def _add(
        self,
        group: GroupCache,
        planned: PlannedBatch,
        memory: Callable[[], memoryview],
        encoded: bytes,
    ) -> None:
        name = _name(planned)
        self._damaged.discard(name)
        nbytes = file_nbytes(group.folder.layouts, encoded)
        self._writer.add(
            WriteTask(
                group.target, name, _key(planned), planned.item_count, memory, encoded, nbytes
            )
        )

    def failed(self, planned: PlannedBatch) -> None:
        """A batch could not be loaded."""
        self._loading.discard(_name(planned))

    def forget_plans(self) -> None:
        """All planned batches are to be planned anew."""
        self._reader.clear()
        self._reading.clear()
        self._loading.clear()
        self._offered = None

    def abandon(self) -> None:
        """In a process that the user forked: the threads are the parent's."""
        self._is_closed = True

    def close(self) -> None:
        """Save what is on its way, and end the threads."""
        self._is_closed = True
        self._reader.close()
        self._writer.close()

    def _path(self, planned: PlannedBatch) -> str:
        group = self._groups[planned.group_number]
        assert group is not None
        return os.fspath(group.folder.path_of(_key(planned)))


def _key(planned: PlannedBatch) -> Key:
    return Key(*planned.content)


def _name(planned: PlannedBatch) -> tuple[int, tuple[int, int]]:
    return planned.group_number, planned.content


def _assemble(
    arrays: Mapping[str, jax.Array], layouts: Mapping[str, ArrayLayout], item_count: int
) -> memoryview:
    """Arrays as they lie in a file; waits until JAX has computed them."""
    memory = np.zeros(max(layout.offset + layout.nbytes for layout in layouts.values()), np.uint8)
    for name, layout in layouts.items():
        target: np.ndarray[Any, Any] = np.ndarray(
            (item_count, *layout.shape[1:]), layout.dtype, memory, offset=layout.offset
        )
        source = np.asarray(arrays[name])
        if source.dtype == layout.dtype:
            np.copyto(target, source)
        else:
            convert(name, source, target)
    return memoryview(memory)


def file_layouts(
    group: DataGroup[Any], canonical: Mapping[np.dtype[Any], np.dtype[Any]] | None
) -> Mapping[str, ArrayLayout]:
    """Layouts of the arrays that a group's cache holds, None being those that loaders fill."""
    specs = group.cache_specs or ()
    return lay_out(
        specs if canonical is None else placed_specs(specs, canonical), group.batch_size
    )[0]
