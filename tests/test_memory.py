import re
import resource
from pathlib import Path

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
