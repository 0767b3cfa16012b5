"""Looking after disk caches: what is in one, whether it is sound, and how to empty it.

Also a program: ``python -m hydrax.cache verify|info|clear DIR``. How a cache comes into being is a
matter of :class:`hydrax.DataGroup`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hydrax._cache import (
    DESCRIPTOR_NAME,
    CacheFolder,
    DamagedFileError,
    Key,
    batch_files,
    layouts_of,
    read_descriptor,
    stale_files,
)
from hydrax._memory import format_nbytes
from hydrax.errors import CacheError, CacheMissingError

__all__ = ["CacheInfo", "DamagedFile", "clear", "info", "verify"]

_BATCH_NAME = re.compile(r"e(\d+)-b(\d+)\.batch")


@dataclass(frozen=True)
class CacheInfo:
    """What a cache is of, and how much is in it.

    Attributes:
        facts: What its content depends on: item count, batch size, seed, arrays and so on.
        batches_per_epoch: Batches of a whole epoch. With ``shuffle_later`` ``"itemwise"`` or
            ``"reseed"`` every epoch has its own.
        batch_count: Batches that are there, of all epochs.
        nbytes: Bytes of their files.
    """

    facts: Mapping[str, Any]
    batches_per_epoch: int
    batch_count: int
    nbytes: int


@dataclass(frozen=True)
class DamagedFile:
    """A file that a cache cannot use, and that a Dataloader counts as missing.

    Attributes:
        path: The file.
        reason: What is wrong with it.
    """

    path: str
    reason: str


def _descriptor(folder: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return read_descriptor(os.fspath(folder))
    except (FileNotFoundError, NotADirectoryError):
        path = os.path.join(folder, DESCRIPTOR_NAME)
        raise CacheMissingError(
            f"{os.fspath(folder)!r} is no cache: it has no {DESCRIPTOR_NAME}", path
        ) from None


def info(folder: str | os.PathLike[str]) -> CacheInfo:
    """What a cache is of, and how much is in it.

    Raises:
        CacheMissingError: There is no cache in the folder.
        CacheError: Its descriptor cannot be read.
    """
    facts = _descriptor(folder)
    try:
        whole, rest = divmod(facts["item count"], facts["batch_size"])
        per_epoch = whole + (rest > 0 and facts["remainder"] != "drop")
    except (KeyError, TypeError, ArithmeticError) as error:
        raise CacheError(f"the descriptor in {os.fspath(folder)!r} lacks {error}") from error
    sizes = [entry.stat(follow_symlinks=False).st_size for entry in batch_files(os.fspath(folder))]
    return CacheInfo(MappingProxyType(facts), per_epoch, len(sizes), sum(sizes))


def verify(folder: str | os.PathLike[str]) -> Iterator[DamagedFile]:
    """Read all of a cache, and yield the files that it cannot use.

    Raises:
        CacheMissingError: There is no cache in the folder.
        CacheError: Its descriptor cannot be read.

    Example:
        >>> import tempfile, hydrax
        >>> folder = tempfile.TemporaryDirectory()
        >>> group = hydrax.DataGroup(
        ...     2, range(4), loader_arrays={"x": ((), "i4", "i4")}, cache_location=folder.name
        ... )
        >>> def load(number, arrays, seed):
        ...     arrays["x"][...] = number
        >>> with hydrax.Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        ...     for batch in dataloader:
        ...         del batch
        >>> info(folder.name).batch_count, list(verify(folder.name))
        (2, [])
        >>> clear(folder.name)
        2
        >>> folder.cleanup()
    """
    facts = _descriptor(folder)
    try:
        layouts = layouts_of(facts)
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(
            f"the descriptor in {os.fspath(folder)!r} cannot be understood: {error}"
        ) from error
    facts = {name: value for name, value in facts.items() if name not in ("format", "version")}
    cache = CacheFolder(os.fspath(folder), facts, layouts, is_readonly=True)
    for entry in sorted(batch_files(os.fspath(folder)), key=lambda entry: entry.name):
        name = _BATCH_NAME.fullmatch(entry.name)
        if name is None:
            yield DamagedFile(entry.path, "its name is not that of a batch")
            continue
        try:
            cache.read(Key(int(name[1]), int(name[2])), None)
        except DamagedFileError as error:
            if os.path.lexists(error.path):  # it may have been removed meanwhile
                yield DamagedFile(error.path, error.reason)


def clear(folder: str | os.PathLike[str]) -> int:
    """Remove a cache from its folder: batches, descriptor, what ended jobs have left; nothing else.

    Jobs that use it go on, but may put batches into it again; end them before.

    Returns:
        How many batches there were.

    Raises:
        CacheMissingError: There is no cache in the folder.
        OSError: A file cannot be removed.
    """
    folder = os.fspath(folder)
    descriptor = os.path.join(folder, DESCRIPTOR_NAME)
    if not os.path.lexists(descriptor):  # one that cannot be read is removed all the same
        raise CacheMissingError(f"{folder!r} is no cache: it has no {DESCRIPTOR_NAME}", descriptor)
    count = 0
    for path in [entry.path for entry in batch_files(folder)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            count += 1
    for path in stale_files(folder):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    # Last, so that a clearing that was ended half way can be done again.
    os.unlink(descriptor)
    return count


def _print_info(folder: str) -> int:
    found = info(folder)
    print(f"{folder}: {found.batch_count} batches, {format_nbytes(found.nbytes)}")
    print(f"batches per epoch: {found.batches_per_epoch}")
    for name, value in found.facts.items():
        print(f"{name}: {value}")
    return 0


def _print_damaged(folder: str) -> int:
    count = 0
    for damaged in verify(folder):
        count += 1
        print(f"{damaged.path}: {damaged.reason}")
    print(f"{folder}: {info(folder).batch_count} batches, {count} damaged")
    return 1 if count else 0


def _print_cleared(folder: str) -> int:
    print(f"{folder}: {clear(folder)} batches removed")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status: 0, or 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hydrax.cache", description="Look after the folder of a disk cache."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, text in (
        ("verify", _print_damaged, "read everything; list damaged files, and exit with 1 for any"),
        ("info", _print_info, "show what the cache is of and how much is in it"),
        ("clear", _print_cleared, "remove the cache from its folder"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", help="the cache_location")
        command.set_defaults(run=run)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options.folder)
    except (CacheError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
