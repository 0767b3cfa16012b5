"""A folder of JPEG files, 500x375, decoded and scaled to uint8 224x224x3, batch 32."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import numpy as np
from harness import HYDRAX, Target
from PIL import Image

BATCH_SIZE = 32
CLASS_COUNT = 8
IMAGES_PER_CLASS = 32
SIZE = 224
BARE = "two bare Pillow processes"

CONTENDERS = (HYDRAX, BARE)
TARGETS = (
    Target(
        "JPEG folder, 500x375 to 224x224x3, batch 32, ImageFolder",
        "images/s",
        (HYDRAX, "images_per_s"),
        (BARE, "images_per_s"),
        0.95,
    ),
)


def make_files(folder: str) -> None:
    """JPEG files with detail at all scales, as photographs have: about 80 KB each."""
    rng = np.random.default_rng(0)
    for number in range(CLASS_COUNT):
        Path(folder, f"class{number}").mkdir()
        for index in range(IMAGES_PER_CLASS):
            image = np.zeros((375, 500, 3), np.float32)
            for cells in (4, 16, 64, 256):
                noise = rng.integers(0, 256, (cells, cells, 3), np.uint8)
                image += np.asarray(Image.fromarray(noise).resize((500, 375)), np.float32) / 4
            path = Path(folder, f"class{number}", f"{index}.jpg")
            Image.fromarray(image.astype(np.uint8)).save(path, quality=90)


def bare_images(folder: str, first: int) -> Iterator[np.ndarray]:
    """Every second file, decoded and scaled by Pillow into a NumPy array made beforehand."""
    paths = sorted(str(path) for path in Path(folder).rglob("*.jpg"))
    order = np.random.default_rng(0).permutation(len(paths))[first::2].tolist()
    batch = np.empty((BATCH_SIZE, SIZE, SIZE, 3), np.uint8)
    number = 0
    while True:
        for index in order:
            with Image.open(paths[index]) as file:
                image = file.convert("RGB")
            # The whole middle, as ImageFolder takes it.
            box = (62.5, 0, 437.5, 375)
            image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
            batch[number % BATCH_SIZE] = np.asarray(image)
            number += 1
            if number % BATCH_SIZE == 0:
                yield batch


def bare_rate(folder: str, seconds: float) -> float:
    """Batches per second of two processes that hand nothing over."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(harness.WORKER_COUNT)
    rates = context.SimpleQueue()

    def fill(first: int) -> None:
        barrier.wait()
        batches = bare_images(folder, first)
        rates.put(harness.batches_per_second(batches, lambda batch: None, seconds))

    processes = [
        context.Process(target=fill, args=(first,)) for first in range(harness.WORKER_COUNT)
    ]
    for process in processes:
        process.start()
    total = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def hydrax_rate(folder: str, seconds: float) -> float:
    """Batches per second of Hydrax."""
    from hydrax.loaders import ImageFolder

    loader = ImageFolder(folder, SIZE)
    group = {
        "batch_size": BATCH_SIZE,
        "data": loader.paths,
        "loader_arrays": loader.loader_arrays,
    }
    return harness.hydrax_rate(HYDRAX, loader, None, group, seconds)


def measure(contender: str, seconds: float) -> harness.Result:
    """Images per second of one contender."""
    seconds = max(seconds, 4.0)  # a batch takes long
    with tempfile.TemporaryDirectory() as folder:
        make_files(folder)
        rate = bare_rate if contender == BARE else hydrax_rate
        return {"images_per_s": rate(folder, seconds) * BATCH_SIZE}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
