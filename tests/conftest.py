"""What holds for every test: strict JAX, a seed that a failure shows, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read by JAX when it is first imported, here and in the interpreters that tests start.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

import jax
import numpy as np
import psutil
import pytest

# A shell has what it starts in the background ignore Ctrl-C, and so all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Scripts for other interpreters and files for the type checker, not modules to import here.
collect_ignore_glob = ["isolated/*", "typing/*"]

RUN_SEED = int(os.environ.get("HYDRAX_TEST_SEED", time.time_ns() % 2**32))
SETTLE_S = 5.0
"""How long a process or a mapping that is on its way out may take."""

LARGE_MODULES = ("test_data_tensorflow", "test_huggingface")

OWN_FD = re.compile(r"/memfd:|anon_inode:\[(?:eventfd|pidfd)\]|pidfd:")
HELPER_PROCESS = re.compile(r"multiprocessing\.(?:forkserver|resource_tracker)")


def pytest_report_header() -> str:
    return f"HYDRAX_TEST_SEED={RUN_SEED} jax {jax.__version__} numpy {np.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules whose libraries make this process large come last: forks of it are then slow."""
    items.sort(key=lambda item: item.path.stem in LARGE_MODULES)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have counted: how often which outcome."""
    counts: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports(""):
        for what, found in report.user_properties if report.when == "teardown" else ():
            counts.setdefault(what, Counter()).update(found)
    for what, found in counts.items():
        terminalreporter.section(f"{found.total()} {what}")
        for outcome, count in sorted(found.items()):
            terminalreporter.line(f"{count:4d} x {outcome}")


def _seed_of(node: pytest.Item) -> int:
    """A seed of the test's own, the same whichever other tests run."""
    return zlib.crc32(node.nodeid.encode(), RUN_SEED)


@pytest.fixture
def test_seed(request: pytest.FixtureRequest) -> int:
    """A number that is another one for each test and, without HYDRAX_TEST_SEED, each run."""
    return _seed_of(request.node)


@pytest.fixture
def rng(test_seed: int) -> np.random.Generator:
    return np.random.default_rng(test_seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    setattr(item, f"{report.when}_passed", report.passed)
    if report.failed:
        report.sections.append(("seed", f"repeat with HYDRAX_TEST_SEED={RUN_SEED}"))
    return report


@pytest.fixture(scope="session", autouse=True)
def _jax_is_up() -> None:
    """What JAX opens at its first use, it opens before the first test is watched."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(3, np.float32)))
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect(_jax_is_up: None) -> None:
    """Collections need not look at all that libraries and earlier modules keep.

    There are several in every test, and forked processes copy what is looked at.
    """
    jax.clear_caches()
    gc.collect()
    gc.freeze()


def _held() -> Counter[str]:
    """What this process holds of the things that Hydrax makes, by kind."""
    held: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if OWN_FD.search(target):
            held[f"descriptor {target}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            held["mapping " + line.split(maxsplit=5)[5]] += 1
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = "(nobody waited for it)"
        except psutil.NoSuchProcess:
            continue
        if not HELPER_PROCESS.search(command):
            held[f"process {child.pid} {command}"] += 1
    # Semaphores there are never of Hydrax, but come and go with every other program.
    names = (name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
    held.update(f"/dev/shm/{name}" for name in names)
    return held


def _shared_inodes(pid: int) -> set[int]:
    """Inodes of the files in /dev/shm that a process has mapped, under whatever name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended, or belongs to somebody else
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line}


def _without_other_programs(held: Counter[str]) -> Counter[str]:
    """Leaves out names in /dev/shm, which is shared by all, that others have mapped."""
    inodes: dict[int, str] = {}
    for what in held:
        if what.startswith("/dev/shm/"):
            with contextlib.suppress(FileNotFoundError):
                inodes[os.stat(what).st_ino] = what
    if not inodes:
        return held
    this = psutil.Process()
    own = {this.pid, *(child.pid for child in this.children(recursive=True))}
    others = {
        inodes[inode]
        for pid in set(psutil.pids()) - own
        for inode in _shared_inodes(pid) & inodes.keys()
    }
    return Counter({what: count for what, count in held.items() if what not in others})


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test gives back its processes, descriptors, mappings and shared memory."""
    random.seed(_seed_of(request.node))
    np.random.seed(_seed_of(request.node))
    before = _held()
    yield
    if not getattr(request.node, "call_passed", False):
        return  # the traceback of a failure keeps its objects alive
    # Fixtures are torn down by now, but the item still holds what they returned.
    getattr(request.node, "funcargs", {}).clear()
    deadline = time.monotonic() + SETTLE_S
    left = _without_other_programs(_held() - before)
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        left &= _held() - before  # what another program puts into /dev/shm comes and goes
    if left:
        lines = (f"{count} x {what}" for what, count in left.items())
        pytest.fail("left behind:\n" + "\n".join(lines))
