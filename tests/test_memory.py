"""How much memory there is, and what is said where it runs out."""

import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from isolated.run import run_script

from hydrax import DataGroup, Dataloader
from hydrax._memory import available_nbytes, format_nbytes


def test_available_memory_is_positive_and_at_most_what_the_machine_has():
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert 0 < available_nbytes() <= total


def test_sizes_read_in_the_largest_fitting_unit():
    assert [format_nbytes(n) for n in (0, 1023, 1024, 5 * 2**30, 2**41)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "5.0 GiB",
        "2.0 TiB",
    ]


def test_a_limit_of_the_process_itself_counts():
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, before[1]))
    try:
        assert available_nbytes() <= 2**30
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_limit_on_the_size_of_files_counts():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        assert available_nbytes() == 2**20
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def memory_group():
    """A control group of which the memory can be limited: its folder, and the limit's file."""
    for root, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(root) / f"hydrax-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / name).exists():
                yield folder, name
                return
        finally:
            folder.rmdir()
    pytest.skip("no control group can be made here")


def test_a_memory_limit_is_told_at_construction_and_at_the_start(memory_group):
    result = run_script("memory_limit.py", str(memory_group[0]), memory_group[1])
    assert re.fullmatch(
        r"(ArenaMemoryError: 4 batches .* need 512.0 MiB .* [0-9.]+ MiB .* are available; .*\n){2}",
        result.stdout,
    ), result
    assert (result.returncode, result.stderr) == (0, "")


def test_the_kernel_is_to_end_loader_processes_before_the_main_process():
    def load(number, arrays, seed):
        arrays["x"][...] = int(Path("/proc/self/oom_score_adj").read_text())

    before = int(Path("/proc/self/oom_score_adj").read_text())
    group = DataGroup(1, range(2), loader_arrays={"x": ((), np.int32, np.int32)})
    with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        found = {int(batch.arrays["x"][0]) for batch in dataloader}
    assert found == {max(before, 500)}
    assert int(Path("/proc/self/oom_score_adj").read_text()) == before
