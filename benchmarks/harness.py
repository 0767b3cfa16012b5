"""What all benchmarks share: timing, counting memory, printing the result.

A benchmark is one file about one subject. It names its contenders and its targets and has
``measure(contender, seconds)``, which returns metric names with their values. Run as a script with
the name of a contender it measures that one and prints the result as one line of JSON, so that
``run.py`` can let contenders take turns, each in a fresh process of the Python that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HYDRAX = "Hydrax"
HYDRAX_BATCHED = "Hydrax, batched"
HYDRAX_022 = "Hydrax 0.2.2"
TORCH = "PyTorch"
TORCH_TUNED = "PyTorch, NumPy collate"
GRAIN = "Grain"
IN_PROCESS = "in-process loop"

PEERS = (HYDRAX_022, TORCH, TORCH_TUNED, GRAIN)
"""Contenders that run in the environment of the peers."""

WORKER_COUNT = 2
DEPTH = 3

Result = Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """A figure to reach, or with ``limit`` None one to report only.

    Attributes:
        ours: Contender and metric of the measured side.
        reference: Contender and metric to compare with; None compares with ``limit`` alone.
        limit: The ratio of ours to the reference, or the value itself without a reference.
        at_least: Whether ours is to be ``limit`` or more, rather than ``limit`` or less.
        label: What is measured, for the table.
        unit: Unit of the values, for the table.
        reference_label: What to call the reference in the table; its contender if None.
    """

    label: str
    unit: str
    ours: tuple[str, str]
    reference: tuple[str, str] | None
    limit: float | None
    at_least: bool = True
    reference_label: str | None = None


def batches_per_second(
    batches: Iterable[Any], consume: Callable[[Any], None], seconds: float
) -> float:
    """The steady rate of an endless or long run of batches.

    The first part of the run, half of ``seconds`` and 8 batches at least, is not counted: workers
    start, memory is touched for the first time, queues fill.

    Args:
        batches: Where the batches come from.
        consume: Called with each batch; it must not keep it.
        seconds: How long to count.

    Returns:
        Batches per second.
    """
    iterator = iter(batches)
    begin = time.perf_counter()
    warm = 0
    while warm < 8 or time.perf_counter() - begin < seconds / 2:
        consume(next(iterator))
        warm += 1
    count = 0
    begin = time.perf_counter()
    while True:
        consume(next(iterator))
        count += 1
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return count / elapsed


def hydrax_rate(
    contender: str,
    loader: Callable[..., Any],
    prepare: Callable[[], None] | None,
    group_options: Mapping[str, Any],
    seconds: float,
    **options: Any,
) -> float:
    """Batches per second of this project or of 0.2.2, which take the same program.

    Every array of a batch is taken as a ``jax.Array`` and then let go.

    Args:
        contender: One of the three Hydrax contenders.
        loader: The loader function.
        prepare: Makes the data ready in a worker that does not inherit them, as those of 0.2.2.
        group_options: What ``DataGroup`` is made with.
        seconds: How long to count.
        **options: Further options of the ``Dataloader``.
    """
    import hydrax

    with quiet_fork():
        dataloader = hydrax.Dataloader(
            loader,
            hydrax.DataGroup(shuffle_first=True, **group_options),
            loader_count=WORKER_COUNT,
            depth=DEPTH,
            startup_func=prepare,
            **options,
        )
        with dataloader:
            rate = batches_per_second(dataloader, take_arrays(contender), seconds)
            dataloader.interrupt()
        return rate


def take_arrays(contender: str) -> Callable[[Any], None]:
    """A consumer that takes all arrays of a batch and computes nothing.

    Hydrax 0.2.2 gets its memory back only at a later call into JAX, so for it such a call is made.
    """

    def consume(batch: Any) -> None:
        arrays = batch.arrays
        for name in arrays:
            arrays[name]

    if contender != HYDRAX_022:
        return consume

    import jax

    def consume_and_call_jax(batch: Any) -> None:
        consume(batch)
        jax.device_put(0)

    return consume_and_call_jax


def torch_batches(dataset: Any, batch_size: int, **options: Any) -> Iterator[Any]:
    """Endless batches of a PyTorch DataLoader, set up as its guide advises for speed.

    Batches are tensors; the way from there to a ``jax.Array`` is not charged.
    """
    import torch

    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=WORKER_COUNT,
        prefetch_factor=DEPTH,
        persistent_workers=True,
        multiprocessing_context="fork",
        **options,
    )
    while True:
        yield from loader


def grain_batches(
    item_count: int,
    load: Callable[[int], Any],
    prepare: Callable[[], None] | None,
    batch_size: int,
) -> Iterator[Any]:
    """Endless batches of Grain, set up as its guide advises for data that are in memory.

    Batches are NumPy arrays; the way from there to a ``jax.Array`` is not charged. Grain's workers
    start afresh, so ``prepare`` makes the data in each of them.
    """
    parse_absl_flags()
    import grain

    dataset = (
        grain.MapDataset.range(item_count)
        .shuffle(seed=0)
        .repeat(None)
        .map(load)
        .batch(batch_size, drop_remainder=True, batch_fn=np.stack)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .mp_prefetch(
            grain.MultiprocessingOptions(num_workers=WORKER_COUNT, per_worker_buffer_size=DEPTH),
            worker_init_fn=functools.partial(_prepare_worker, prepare),
        )
    )
    return iter(dataset)


def _prepare_worker(prepare: Callable[[], None] | None, index: int, count: int) -> None:
    if prepare is not None:
        prepare()


def numpy_collate(items: Sequence[Any]) -> Any:
    """For PyTorch: one tensor from the items' NumPy arrays, quicker than its own collate."""
    import torch

    return torch.from_numpy(np.stack(items))


def parse_absl_flags() -> None:
    """Grain reads absl flags, which must have been parsed once."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """Hide JAX's warning about fork: the workers of every contender stay out of JAX."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*fork\(\)", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message=r".*fork\(\)", category=DeprecationWarning)
        yield


def pss_nbytes(pid: int | str = "self") -> int:
    """Memory of a process in bytes, pages shared by n processes counted as 1/n each."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no Pss line")


def child_pids() -> list[int]:
    """The processes that this one started and that still run, their children included."""
    found = []
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children = [int(word) for word in (task / "children").read_text().split()]
                found += children
                waiting += children
    return found


def is_peer(contender: str) -> bool:
    """Whether the contender runs in the environment of the peers."""
    return contender in PEERS


def main(measure: Callable[[str, float], Result], contenders: Sequence[str]) -> None:
    """Measure the contender named on the command line; print its result as one line of JSON."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("contender", choices=contenders)
    parser.add_argument("--seconds", type=float, default=2.0, help="time counted, default 2")
    arguments = parser.parse_args()
    result = measure(arguments.contender, arguments.seconds)
    print(json.dumps(dict(result)), flush=True)
