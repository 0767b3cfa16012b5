"""Tokens: windows of 2,048 int32 from a uint16 memory map, batch 8."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import GRAIN, HYDRAX, HYDRAX_022, HYDRAX_BATCHED, IN_PROCESS, TORCH, Target

BATCH_SIZE = 8
WINDOW = 2_048
ITEM_COUNT = 25_000

TOKEN_LOADER = "Hydrax, TokenLoader"
TAKE = "bare np.take loop"
TAKE_TO_JAX = "np.take loop with jnp.asarray"

CONTENDERS = (
    HYDRAX,
    HYDRAX_BATCHED,
    TOKEN_LOADER,
    HYDRAX_022,
    TORCH,
    GRAIN,
    IN_PROCESS,
    TAKE,
    TAKE_TO_JAX,
)
_LABEL = "2,048 int32 from a uint16 memmap, batch 8"
_LOADER_LABEL = "2,048 uint16 from a memmap, batch 8, TokenLoader"
TARGETS = tuple(
    Target(label, "batches/s", (ours, "batches_per_s"), (reference, "batches_per_s"), limit)
    for label, ours, reference, limit in (
        (_LABEL, HYDRAX, HYDRAX_022, 4),
        (_LABEL, HYDRAX, TORCH, None),
        (_LABEL, HYDRAX, GRAIN, None),
        (_LABEL, HYDRAX, IN_PROCESS, None),
        (f"{_LABEL}, batched=True", HYDRAX_BATCHED, HYDRAX_022, None),
        (_LOADER_LABEL, TOKEN_LOADER, TAKE_TO_JAX, 0.9),
        # It hands nothing over: these 32 KB are copied in less time than one next() takes.
        (_LOADER_LABEL, TOKEN_LOADER, TAKE, None),
    )
)

TOKENS: np.ndarray
"""The memory map, ``(ITEM_COUNT * WINDOW,)`` uint16. Set by :func:`prepare`."""

_FILE_VARIABLE = "HYDRAX_BENCHMARK_TOKENS"


def prepare() -> None:
    """Map the file of tokens, unless this process inherited the map."""
    global TOKENS
    if "TOKENS" not in globals():
        TOKENS = np.memmap(os.environ[_FILE_VARIABLE], np.uint16, "r")


def load_item(index: int, arrays: Any, seed: int | None) -> None:
    """The loader function with a call an item."""
    start = index * WINDOW
    arrays["tokens"][:] = TOKENS[start : start + WINDOW]


def load_items(indices: Any, arrays: Any, seeds: Any) -> None:
    """The loader function with a call for a run of items."""
    arrays["tokens"][:] = TOKENS.reshape(ITEM_COUNT, WINDOW)[indices]


def get_window(index: int) -> np.ndarray:
    """The same item for loaders that stack items themselves."""
    start = index * WINDOW
    return TOKENS[start : start + WINDOW].astype(np.int32)


class TorchWindows:
    """The same items as a PyTorch map-style data set."""

    def __len__(self) -> int:
        return ITEM_COUNT

    def __getitem__(self, index: int) -> np.ndarray:
        return get_window(index)


def in_process_batches() -> Iterator[np.ndarray]:
    """The loader called in this process, into NumPy arrays made beforehand."""
    slots = [np.empty((BATCH_SIZE, WINDOW), np.int32) for _ in range(harness.DEPTH)]
    order = np.random.default_rng(0).permutation(ITEM_COUNT).tolist()
    while True:
        for start in range(0, ITEM_COUNT - BATCH_SIZE, BATCH_SIZE):
            array = slots[start // BATCH_SIZE % harness.DEPTH]
            for position, index in enumerate(order[start : start + BATCH_SIZE]):
                load_item(index, {"tokens": array[position]}, start)
            yield array


def take_batches() -> Iterator[np.ndarray]:
    """Windows as they lie in the file, taken into NumPy arrays made beforehand."""
    windows = TOKENS.reshape(ITEM_COUNT, WINDOW)
    slots = [np.empty((BATCH_SIZE, WINDOW), np.uint16) for _ in range(harness.DEPTH)]
    order = np.random.default_rng(0).permutation(ITEM_COUNT)
    while True:
        for start in range(0, ITEM_COUNT - BATCH_SIZE, BATCH_SIZE):
            array = slots[start // BATCH_SIZE % harness.DEPTH]
            np.take(windows, order[start : start + BATCH_SIZE], axis=0, out=array, mode="clip")
            yield array


def take_to_jax_batches() -> Iterator[Any]:
    """The same, each batch as a jax.Array of its own."""
    import jax.numpy as jnp

    return (jnp.asarray(array) for array in take_batches())


def measure(contender: str, seconds: float) -> harness.Result:
    """Batches per second of one contender."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        generator = np.random.default_rng(0)
        generator.integers(0, 50_000, ITEM_COUNT * WINDOW, np.uint16).tofile(path)
        os.environ[_FILE_VARIABLE] = str(path)
        prepare()
        return {"batches_per_s": rate_of(contender, seconds)}


def rate_of(contender: str, seconds: float) -> float:
    """Batches per second, once the file is there."""
    group = {
        "batch_size": BATCH_SIZE,
        "data": range(ITEM_COUNT),
        "loader_arrays": {"tokens": ((WINDOW,), np.int32, np.int32)},
    }
    if contender == HYDRAX_BATCHED:
        return harness.hydrax_rate(contender, load_items, prepare, group, seconds, batched=True)
    if contender in (HYDRAX, HYDRAX_022):
        return harness.hydrax_rate(contender, load_item, prepare, group, seconds)
    if contender == TOKEN_LOADER:
        from hydrax.loaders import TokenLoader

        loader = TokenLoader(TOKENS, WINDOW, targets=False)
        options = {"loader_arrays": loader.loader_arrays}
        return harness.hydrax_rate(contender, loader, None, group | options, seconds)
    batches: Iterator[Any]
    if contender == TORCH:
        batches = harness.torch_batches(TorchWindows(), BATCH_SIZE)
    elif contender == GRAIN:
        batches = harness.grain_batches(ITEM_COUNT, get_window, prepare, BATCH_SIZE)
    elif contender == TAKE:
        batches = take_batches()
    elif contender == TAKE_TO_JAX:
        batches = take_to_jax_batches()
    else:
        batches = in_process_batches()
    return harness.batches_per_second(batches, lambda batch: None, seconds)


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
