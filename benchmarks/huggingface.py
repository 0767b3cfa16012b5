"""Hugging Face data sets: 50,000 rows of an int64, 32 float32 and a string, in batches of 256."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
from harness import Target

ROW_COUNT = 50_000
BATCH_SIZE = 256

ITER_BATCHES = "Hydrax, iter_batches"
ITER_SHUFFLED = "Hydrax, iter_batches, shuffled"
LOADER = "Hydrax, data_group"
DATASETS = "datasets, jax format"
DATASETS_SHUFFLED = "datasets, jax format, shuffled"

CONTENDERS = (ITER_BATCHES, ITER_SHUFFLED, LOADER, DATASETS, DATASETS_SHUFFLED)
_LABEL = "50,000 rows of int64, 32 float32 and a string, batch 256"
TARGETS = (
    Target(_LABEL, "rows/s", (ITER_BATCHES, "rows_per_s"), (DATASETS, "rows_per_s"), 3),
    Target(
        f"{_LABEL}, shuffled",
        "rows/s",
        (ITER_SHUFFLED, "rows_per_s"),
        (DATASETS_SHUFFLED, "rows_per_s"),
        None,
    ),
    Target(
        f"{_LABEL}, shuffled by the Dataloader",
        "rows/s",
        (LOADER, "rows_per_s"),
        (DATASETS_SHUFFLED, "rows_per_s"),
        None,
    ),
)


def make_dataset() -> Any:
    """The rows."""
    datasets = importlib.import_module("datasets")  # `import` would find this very file's package
    generator = np.random.default_rng(0)
    features = datasets.Features(
        label=datasets.Value("int64"),
        x=datasets.Sequence(datasets.Value("float32"), length=32),
        text=datasets.Value("string"),
    )
    table = {
        "label": np.arange(ROW_COUNT),
        "x": list(generator.random((ROW_COUNT, 32), np.float32)),
        "text": [f"the text of row {row}" for row in range(ROW_COUNT)],
    }
    return datasets.Dataset.from_dict(table, features=features)


def batches_of(contender: str) -> Iterator[Any]:
    """Batches without end."""
    huggingface = importlib.import_module("hydrax.huggingface")
    dataset = make_dataset()
    if contender in (ITER_SHUFFLED, DATASETS_SHUFFLED):
        dataset = dataset.shuffle(seed=0)
    if contender in (ITER_BATCHES, ITER_SHUFFLED):
        rounds = (huggingface.iter_batches(dataset, BATCH_SIZE) for _ in itertools.count())
    else:
        formatted = dataset.with_format("jax")
        rounds = (formatted.iter(BATCH_SIZE) for _ in itertools.count())
    return itertools.chain.from_iterable(rounds)


def measure(contender: str, seconds: float) -> harness.Result:
    """Rows per second of one contender."""
    if contender == LOADER:
        return {"rows_per_s": BATCH_SIZE * loader_rate(seconds)}
    rate = harness.batches_per_second(batches_of(contender), lambda batch: None, seconds)
    return {"rows_per_s": BATCH_SIZE * rate}


def loader_rate(seconds: float) -> float:
    """Batches per second of a Dataloader."""
    import hydrax

    huggingface = importlib.import_module("hydrax.huggingface")
    group = huggingface.data_group(make_dataset(), BATCH_SIZE, shuffle_first=True)
    with hydrax.Dataloader(
        huggingface.load_rows, group, loader_count=harness.WORKER_COUNT, depth=harness.DEPTH
    ) as loader:
        for _ in range(20):
            next(loader)
        count = 0
        start = time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            next(loader)
            count += 1
    return count / passed


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
