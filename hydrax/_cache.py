"""Files of the disk cache: what lies in them, how they are written, and when they are trusted.

A cache is a folder of one descriptor, ``cache.json``, and one file for each batch. A file gets its
name only when all of it is on the disk, and is believed only if its length and checksums are right
and it belongs to this very cache. Nothing in it is code. Knows nothing of a Dataloader.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from hydrax import _core
from hydrax._cache_values import decode_additional
from hydrax._specs import ALIGNMENT, ArrayLayout, lay_out, parse_specs
from hydrax.errors import CacheError, CacheMissingError

__all__ = [
    "CacheFolder",
    "CachedBatch",
    "DamagedFileError",
    "Key",
    "PendingFile",
    "batch_files",
    "file_nbytes",
    "layouts_of",
    "read_descriptor",
    "stale_files",
]

DESCRIPTOR_NAME = "cache.json"
BATCH_SUFFIX = ".batch"
TEMPORARY_SUFFIX = ".tmp"

# More than a descriptor has; there may be anything under its name.
_DESCRIPTOR_NBYTES = 2**24

_FORMAT = "hydrax-cache"
_VERSION = 1
_MAGIC = b"HXBATCH\0"
# Magic, version, and the fields of _Header; behind it the checksum of all that.
_HEADER = struct.Struct("<8sIIQQQQQQQ")
_CHECK = struct.Struct("<Q")
_HEADER_NBYTES = 128
assert _HEADER.size + _CHECK.size <= _HEADER_NBYTES
assert _HEADER_NBYTES % ALIGNMENT == 0


class Key(NamedTuple):
    """Which batch of a group: what its content depends on, whatever the epoch it is used in.

    Attributes:
        epoch: Epoch that its order and seeds belong to.
        batch: Its number in that order.
    """

    epoch: int
    batch: int

    @property
    def file_name(self) -> str:
        """Name of the batch's file."""
        return f"e{self.epoch}-b{self.batch}{BATCH_SUFFIX}"


class _Header(NamedTuple):
    """What the first bytes of a file say."""

    item_count: int
    identity: int  # of the cache
    epoch: int
    batch: int
    arrays_nbytes: int
    additional_nbytes: int
    arrays_check: int
    additional_check: int


class _Known(NamedTuple):
    """A file that is known to be right."""

    stamp: tuple[int, int, int, int]  # changes when the file does
    nbytes: int


class CachedBatch(NamedTuple):
    """A batch as it lies in its file.

    Attributes:
        mapping: Memory that the arrays lie in, at the layouts' offsets, and what else is behind.
        additional: Key to one value per item, or None.
    """

    mapping: _core.Mapping
    additional: dict[str, list[Any]] | None


class DamagedFileError(Exception):
    """A batch's file is there but cannot be used.

    Attributes:
        path: The file.
        reason: What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class PendingFile:
    """A written file that has no name of its own yet; commit() or abandon() ends it.

    Attributes:
        key: Its batch.
        path: The name that it has until then.
        fd: Open descriptor, which holds the lock that tells others that the file is in use.
        nbytes: Its size.
    """

    key: Key
    path: str
    fd: int
    nbytes: int

    def abandon(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        os.close(self.fd)


def file_nbytes(layouts: Mapping[str, ArrayLayout], additional: bytes) -> int:
    """Size of the file of a batch."""
    return _HEADER_NBYTES + _arrays_nbytes(layouts) + len(additional)


def _arrays_nbytes(layouts: Mapping[str, ArrayLayout]) -> int:
    return max(layout.offset + layout.nbytes for layout in layouts.values())


def _parts(
    memory: memoryview, layouts: Mapping[str, ArrayLayout], item_count: int
) -> Iterator[tuple[int, memoryview]]:
    """Offset and bytes of the first items of each array."""
    for layout in layouts.values():
        nbytes = layout.nbytes // layout.shape[0] * item_count
        yield layout.offset, memory[layout.offset : layout.offset + nbytes]


def _checksum(parts: Iterator[tuple[int, memoryview]]) -> int:
    checksum = 0
    for _, part in parts:
        checksum = _core.checksum(part, checksum)
    return checksum


class CacheFolder:
    """The cache of one group.

    Args:
        path: The folder.
        facts: What decides the content, as JSON values under names for messages.
        layouts: Layouts of the arrays in a file, with room for a whole batch.
        is_readonly: Whether nothing is ever written.
    """

    def __init__(
        self,
        path: str,
        facts: Mapping[str, Any],
        layouts: Mapping[str, ArrayLayout],
        *,
        is_readonly: bool,
    ) -> None:
        self.path = os.path.abspath(path)  # whatever the working directory becomes
        self._prefix = os.path.join(self.path, "")
        self._descriptor = {"format": _FORMAT, "version": _VERSION, **facts}
        self._layouts = layouts
        self._batch_size = next(iter(layouts.values())).shape[0]
        self._arrays_nbytes = _arrays_nbytes(layouts)
        self._is_readonly = is_readonly
        self._identity = _identity(self._descriptor)
        self._verified: dict[Key, _Known] = {}

    @property
    def layouts(self) -> Mapping[str, ArrayLayout]:
        """Layouts of the arrays in a file."""
        return self._layouts

    def open(self) -> None:
        """Check the descriptor, or make the folder and its descriptor where there is none.

        Raises:
            CacheError: There is one of another cache; names what differs.
            CacheMissingError: There is none, and nothing may be written.
            OSError: The folder cannot be made, read or written.
        """
        path = os.path.join(self.path, DESCRIPTOR_NAME)
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = read_descriptor(self.path)
        if found is None:
            if self._is_readonly:
                raise CacheMissingError(f"there is no cache to read from in {self.path!r}", path)
            self._make_descriptor(path)
            found = read_descriptor(self.path)  # another job may have been quicker
        wanted = json.loads(json.dumps(self._descriptor))
        differences = [
            f"{name} was {_brief(found.get(name))} and is {_brief(wanted.get(name))}"
            for name in {**wanted, **found}
            if found.get(name) != wanted.get(name)
        ]
        if differences:
            raise CacheError(
                f"the cache in {self.path!r} was made under other parameters: "
                f"{'; '.join(differences)}; give another cache_location, or empty this one with "
                f"python -m hydrax.cache clear {self.path}"
            )
        if not self._is_readonly:
            for stale in stale_files(self.path):
                with contextlib.suppress(OSError):
                    os.unlink(stale)

    def _make_descriptor(self, path: str) -> None:
        os.makedirs(self.path, exist_ok=True)
        temporary = os.path.join(self.path, f"{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
        fd = _create(temporary)
        try:
            _write_all(fd, json.dumps(self._descriptor, indent=1).encode(), 0)
            os.fsync(fd)
            try:
                # Fails if another job has made its own meanwhile, which a rename would replace.
                os.link(temporary, path)
            except FileExistsError:
                pass
            except OSError:  # this file system has no links
                os.rename(temporary, path)
            _sync_folder(self.path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            os.close(fd)

    def path_of(self, key: Key) -> str:
        """Path of a batch's file."""
        return self._prefix + key.file_name

    def has(self, key: Key) -> bool:
        """Whether a batch has a file, or had a good one; read() finds out about it."""
        return key in self._verified or os.path.exists(self.path_of(key))

    def read(self, key: Key, item_count: int | None) -> CachedBatch:
        """Map a batch's file, with all of it in memory and checked.

        The arrays are checked when the file is first read here, unless it was written here, and
        whenever it is another file or has been changed since.

        Args:
            key: Which batch.
            item_count: Its items; None takes what the file says.

        Raises:
            DamagedFileError: It is not what it should be, or is missing; says why.
        """
        path = self.path_of(key)
        try:
            found = self._reopen(path, key, may_wait=True)
            if found is None:
                known, mapping = self._verify(path, key, item_count)
                self._verified[key] = known
                found = CachedBatch(mapping, self._additional(path, mapping))
        except DamagedFileError:
            self._verified.pop(key, None)
            raise
        return found

    def read_now(self, key: Key) -> CachedBatch | None:
        """What read() returns, if all of the file is known to be right and in memory already."""
        try:
            return self._reopen(self.path_of(key), key, may_wait=False)
        except DamagedFileError:
            return None

    def _reopen(self, path: str, key: Key, *, may_wait: bool) -> CachedBatch | None:
        known = self._verified.get(key)
        if known is None:
            return None
        mapping = _core.Mapping.reopen(path, known.stamp, known.nbytes, _HEADER_NBYTES, may_wait)
        if mapping is None:
            return None
        return CachedBatch(mapping, self._additional(path, mapping))

    def _verify(self, path: str, key: Key, item_count: int | None) -> tuple[_Known, _core.Mapping]:
        try:
            # Whatever somebody may have put there, opening it must not wait.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise DamagedFileError(path, "it is missing") from None
        except OSError as error:
            raise DamagedFileError(path, f"it cannot be opened: {error.strerror}") from error
        try:
            return self._verify_open(fd, path, key, item_count)
        except OSError as error:
            raise DamagedFileError(path, f"it cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def _verify_open(
        self, fd: int, path: str, key: Key, item_count: int | None
    ) -> tuple[_Known, _core.Mapping]:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFileError(path, "it is no plain file")
        header = _parse_header(path, os.pread(fd, _HEADER_NBYTES, 0))
        self._check_header(path, header, key, item_count, status.st_size)
        mapping = _core.Mapping(fd, status.st_size, _HEADER_NBYTES)
        mapping.populate()
        memory = memoryview(mapping)
        if _checksum(_parts(memory, self._layouts, header.item_count)) != header.arrays_check:
            raise DamagedFileError(path, "the checksum of its arrays is wrong")
        if _core.checksum(memory[self._arrays_nbytes :], 0) != header.additional_check:
            raise DamagedFileError(path, "the checksum of its additional results is wrong")
        return _Known(_stamp(status), status.st_size), mapping

    def _additional(self, path: str, mapping: _core.Mapping) -> dict[str, list[Any]] | None:
        try:
            return decode_additional(bytes(memoryview(mapping)[self._arrays_nbytes :]))
        except ValueError as error:
            raise DamagedFileError(path, str(error)) from error

    def _check_header(
        self, path: str, header: _Header, key: Key, item_count: int | None, nbytes: int
    ) -> None:
        """Check what a header says against what is wanted, and against the size of the file."""
        if item_count is None and 1 <= header.item_count <= self._batch_size:
            item_count = header.item_count
        wanted = (item_count, self._identity, *key, self._arrays_nbytes)
        if header[: len(wanted)] != wanted:
            raise DamagedFileError(path, "it belongs to another cache or another batch")
        wanted_nbytes = _HEADER_NBYTES + header.arrays_nbytes + header.additional_nbytes
        if nbytes != wanted_nbytes:
            raise DamagedFileError(path, f"it has {nbytes} bytes instead of {wanted_nbytes}")

    def write(
        self, key: Key, item_count: int, memory: memoryview, additional: bytes
    ) -> PendingFile:
        """Write a batch to a file that commit() gives its name.

        Args:
            key: Which batch.
            item_count: Its items.
            memory: Its arrays, at the layouts' offsets.
            additional: Its additional results, encoded.

        Raises:
            OSError: It could not be written, for lack of room above all. Nothing is left of it.
        """
        header = _Header(
            item_count,
            self._identity,
            *key,
            self._arrays_nbytes,
            len(additional),
            _checksum(_parts(memory, self._layouts, item_count)),
            _core.checksum(additional, 0),
        )
        packed = _HEADER.pack(_MAGIC, _VERSION, *header)
        packed += _CHECK.pack(_core.checksum(packed, 0))
        nbytes = _HEADER_NBYTES + self._arrays_nbytes + len(additional)
        path = os.path.join(self.path, f"{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
        pending = PendingFile(key, path, _create(path), nbytes)
        try:
            os.ftruncate(pending.fd, nbytes)
            _write_all(pending.fd, packed, 0)
            for offset, part in _parts(memory, self._layouts, item_count):
                _write_all(pending.fd, part, _HEADER_NBYTES + offset)
            _write_all(pending.fd, additional, _HEADER_NBYTES + self._arrays_nbytes)
        except BaseException:
            pending.abandon()
            raise
        return pending

    def commit(self, files: Sequence[PendingFile]) -> list[Key]:
        """Have files on the disk, and then under their names, in place of what had those before.

        Returns:
            The batches that are saved now: all of them, unless somebody has removed a file.

        Raises:
            OSError: A file could not be brought to the disk.
        """
        left = list(files)
        saved = []
        try:
            for file in files:
                os.fsync(file.fd)
            while left:
                file = left[0]
                with contextlib.suppress(FileNotFoundError):
                    os.rename(file.path, self.path_of(file.key))
                    saved.append(file.key)
                    self._verified[file.key] = _Known(_stamp(os.fstat(file.fd)), file.nbytes)
                os.close(left.pop(0).fd)
            _sync_folder(self.path)
        finally:
            for file in left:
                file.abandon()
        return saved


def _parse_header(path: str, data: bytes) -> _Header:
    if len(data) < _HEADER_NBYTES:
        raise DamagedFileError(path, f"it has {len(data)} bytes, less than its header")
    magic, version, *fields = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedFileError(path, "it is no file of a cache")
    if _CHECK.unpack_from(data, _HEADER.size)[0] != _core.checksum(data[: _HEADER.size], 0):
        raise DamagedFileError(path, "the checksum of its header is wrong")
    if version != _VERSION:
        raise DamagedFileError(path, f"it has version {version}; this Hydrax reads {_VERSION}")
    return _Header(*fields)


def read_descriptor(folder: str) -> dict[str, Any]:
    """The descriptor of the cache in a folder.

    Raises:
        OSError: It cannot be read; FileNotFoundError if there is none.
        CacheError: It is damaged, or is of something else.
    """
    path = os.path.join(folder, DESCRIPTOR_NAME)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            found = json.loads(file.read(_DESCRIPTOR_NBYTES))
    except (ValueError, RecursionError) as error:
        raise CacheError(f"the descriptor {path!r} of a cache cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CacheError(f"{path!r} is not the descriptor of a cache that this Hydrax reads")
    return cast(dict[str, Any], found)


def _identity(descriptor: Mapping[str, Any]) -> int:
    """A number that a cache's files carry, so that a file of another cache is not taken."""
    return _core.checksum(json.dumps(descriptor, sort_keys=True).encode(), 0)


def layouts_of(descriptor: Mapping[str, Any]) -> Mapping[str, ArrayLayout]:
    """Layouts of the arrays in the files of a cache, from its descriptor."""
    arrays = {name: (shape, dtype, dtype) for name, shape, dtype in descriptor["arrays"]}
    return lay_out(parse_specs("arrays", arrays), descriptor["batch_size"])[0]


def batch_files(folder: str) -> Iterator[os.DirEntry[str]]:
    """The files of batches in a folder, and what else has such a name."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(BATCH_SUFFIX) and not entry.is_dir(follow_symlinks=False):
                yield entry


def stale_files(folder: str) -> Iterator[str]:
    """Temporary files that a job left behind when it was ended; those in use are locked."""
    with os.scandir(folder) as entries:
        names = [entry.path for entry in entries if entry.name.endswith(TEMPORARY_SUFFIX)]
    for path in names:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue  # it has got its name meanwhile, or is not ours to remove
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except OSError:
            pass  # in use, or there are no locks here
        finally:
            os.close(fd)


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    """What is another one once a file has been replaced or written to."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _create(path: str) -> int:
    """Make a new file, locked for as long as it is open."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):  # there are no locks here
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left.nbytes:
        count = os.pwrite(fd, left, offset)
        left = left[count:]
        offset += count


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _brief(value: Any) -> str:
    return f"{value!r:.120}"
