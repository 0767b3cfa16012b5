"""Memory that is mapped from files, and read here and there: kept from filling a process.

Pages that were read stay mapped until the kernel runs short of memory, and around each page that is
missing it reads others ahead. For rows taken at random from a file much larger than the memory
both is waste: a process seems to grow without end, and most of what the disk delivers is never
looked at. The file's pages stay in the page cache, where all processes find them again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from hydrax import _core
from hydrax._sequences import whole_of

__all__ = ["MappedReads", "reads_of"]

_KEPT_NBYTES = 32 * 2**20
"""About so much stays mapped in a process."""
_AROUND_NBYTES = 64 * 1024
"""What a row can bring with it: the kernel maps so much around a page if it is in the cache."""
_RANDOM_ROW_NBYTES = 16 * 1024
"""Rows up to this size are read without reading ahead."""

_madvise: Any = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedReads:
    """Reads of rows from memory of which some may be mapped from files.

    Args:
        addresses: Some address in each piece of memory that rows are read from.
        row_nbytes: Bytes of a row.
    """

    def __init__(self, addresses: Iterable[int], row_nbytes: int) -> None:
        self._addresses = np.unique(np.fromiter(addresses, np.int64))
        self._row_nbytes = row_nbytes
        self._pid = 0
        self._mappings: list[tuple[int, int]] = []
        self._is_random = False
        self._nbytes = 0

    def note(self, count: int, *, is_random: bool) -> None:
        """So many rows were read; lets go of what is mapped if that was enough of them."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._mappings = _file_mappings(self._addresses)
            self._is_random = False
            self._nbytes = 0
        if not self._mappings:
            return
        if is_random and not self._is_random:
            self._is_random = True
            if self._row_nbytes <= _RANDOM_ROW_NBYTES:
                self._advise(mmap.MADV_RANDOM)
        self._nbytes += count * (self._row_nbytes + (_AROUND_NBYTES if is_random else 0))
        if self._nbytes >= _KEPT_NBYTES:
            self._nbytes = 0
            self._advise(mmap.MADV_DONTNEED)

    def note_run(self, run: _core.Run) -> None:
        """The rows of a run were read."""
        indices = run.indices()
        self.note(run.count, is_random=run.count == 1 or indices[-1] - indices[0] != run.count - 1)

    def _advise(self, advice: int) -> None:
        for start, nbytes in self._mappings:
            _madvise(start, nbytes, advice)  # advice only: if it is not taken, nothing is lost


def _file_mappings(addresses: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Start and bytes of the mappings of files that the addresses lie in.

    Only those of which nothing can be lost: what is shared with the file, or what has no page that
    differs from the file's and cannot be written to.
    """
    found = []
    span = (0, 0)
    is_candidate = is_shared = False
    with open("/proc/self/smaps") as file:
        for line in file:
            header = _HEADER.match(line)
            if header is not None:
                start, end = (int(bound, 16) for bound in header.group(1, 2))
                permissions, inode, path = header.group(3, 4, 5)
                first = np.searchsorted(addresses, start)
                is_shared = permissions[3] == "s"
                is_candidate = (
                    inode != "0"
                    and not path.startswith("/memfd:")
                    and (is_shared or permissions[1] == "-")
                    and bool(first < len(addresses) and addresses[first] < end)
                )
                span = (start, end - start)
            elif (
                is_candidate
                and line.startswith("Anonymous:")
                and (is_shared or line.split()[1] == "0")
            ):
                found.append(span)
    return found


_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)")


def reads_of(data: Any) -> MappedReads | None:
    """For data that is a memory map of a file, or some items of one; None for other data."""
    data = whole_of(data)
    if not isinstance(data, np.memmap) or data.mode == "c" or data.size == 0:
        return None
    address = data.__array_interface__["data"][0]
    return MappedReads([address], data.nbytes // len(data))
