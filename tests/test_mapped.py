"""Data in mapped files, much larger than the memory."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hydrax._mapped import MappedReads

ISOLATED = Path(__file__).parent / "isolated"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memmap", "arrow"])
def test_30_gb_on_disk_train_in_little_private_memory(kind: str, tmp_path: Path) -> None:
    if kind == "arrow":
        pytest.importorskip("datasets")
    command = [sys.executable, str(ISOLATED / "mapped.py"), kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300


def test_only_what_is_shared_with_a_file_is_let_go_of(tmp_path: Path) -> None:
    values = np.arange(2**20, dtype=np.int64)
    values.tofile(tmp_path / "values")
    private = np.memmap(tmp_path / "values", np.int64, "c")
    private[:] = -1
    shared = np.memmap(tmp_path / "values", np.int64, "r+")
    shared[7] = 70
    memory = np.arange(2**20, dtype=np.int64)
    addresses = [array.ctypes.data for array in (private, shared, memory)]
    reads = MappedReads(addresses, 8)
    for _ in range(3):
        reads.note(2**20, is_random=True)
    sealed = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)  # no file at all
    sealed[:4] = b"kept"
    reads = MappedReads([np.frombuffer(sealed, np.uint8).ctypes.data], 8)
    reads.note(2**20, is_random=True)
    assert sealed[:4] == b"kept"
    assert (private == -1).all()
    assert (memory == values).all()
    assert shared[7] == 70
    assert shared[8] == 8


def test_pages_that_were_read_do_not_stay_mapped(tmp_path: Path) -> None:
    np.zeros(2**20, np.int64).tofile(tmp_path / "values")
    mapped = np.memmap(tmp_path / "values", np.int64, "r")

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split(str(tmp_path / "values"))[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    mapped.sum()
    assert resident() > 4000
    reads = MappedReads([mapped.ctypes.data], ctypes.sizeof(ctypes.c_int64))
    reads.note(1000, is_random=True)
    assert resident() == 0
