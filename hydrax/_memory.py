"""How much memory there is to take."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["available_nbytes", "format_nbytes"]

# What cgroup v1 reports where there is no limit is close to 2**63.
_UNLIMITED = 2**60


def available_nbytes() -> int:
    """Bytes that an arena can take: of the machine, its control groups, this process's limits."""
    limits = [_machine_available(), _process_available(), _largest_file()]
    limits.extend(_group_available())
    return min(limits)


def format_nbytes(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least one.

    Example:
        >>> format_nbytes(3 * 2**20), format_nbytes(17)
        ('3.0 MiB', '17 bytes')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _process_available() -> int:
    """Bytes of addresses left to this process (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(limit - pages * resource.getpagesize(), 0)


def _largest_file() -> int:
    """Bytes that a file may have (``ulimit -f``): in the eyes of the kernel an arena is one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _group_available() -> list[int]:
    """Bytes left under the memory limit of each control group that this process is in."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
            if not (root / "cgroup.controllers").exists():
                root = root / "unified"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path may name the host's group; the root is then the container's.
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(root):
                break
            limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                left.append(max(limit - usage, 0) + _reclaimable(folder))
    return left


def _reclaimable(folder: Path) -> int:
    """Bytes of page cache in a control group, which the kernel gives back under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
