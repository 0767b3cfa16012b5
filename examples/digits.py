"""Train a small network on images of handwritten digits, loaded from PNG files by Hydrax.

Writes scikit-learn's 1,797 digits as PNG files once, lets two loader processes decode and distort
them while JAX trains, and draws what came out. Needs ``pip install 'hydrax[demo]'``.

Usage:
    python examples/digits.py [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tqdm.auto import tqdm

import hydrax
from hydrax.image import open_srgb, write_hwc
from hydrax.tqdm import tbatches

SIZE = 16
"""Side of the images that the network sees; those in the files have 8 pixels."""
HELD_OUT = 360
BATCH_SIZE = 64
VALIDATION_BATCH_SIZE = 60  # divides HELD_OUT, as a last batch that is not full would be dropped
EPOCHS = 14
WORKERS = 2
LEARNING_RATE = 2e-3  # at the start; falls to zero at the end

Params = dict[str, jax.Array]
Moments = tuple[Params, Params, jax.Array]


# --- data -----------------------------------------------------------------------------------------


def write_files(folder: Path) -> list[Path]:
    """Write the digits as PNG files, one folder a class, unless they are there."""
    digits = load_digits()
    paths = []
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number:04}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(path)
        paths.append(path)
    return paths


def load_digit(path: Path, arrays: Mapping[str, np.ndarray], seed: int | None) -> None:
    """The loader function: runs in a worker and fills the arrays of one item."""
    angle, zoom, shift_x, shift_y = 0.0, 1.0, 0.0, 0.0
    if seed is not None:  # None is validation, which sees the digits as they are
        draw = random.Random(seed).uniform
        angle, zoom = draw(-0.2, 0.2), draw(0.9, 1.1)
        shift_x, shift_y = draw(-0.6, 0.6), draw(-0.6, 0.6)
    image = open_srgb(path, mode="L")
    # From a pixel of the result to its place in the file's image, turned about the middle.
    a, b = math.cos(angle) / zoom, math.sin(angle) / zoom
    scale_x, scale_y = image.width / SIZE, image.height / SIZE
    middle = SIZE / 2
    matrix = (
        a * scale_x,
        b * scale_x,
        (middle - (a + b) * middle) * scale_x + shift_x,
        -b * scale_y,
        a * scale_y,
        (middle - (a - b) * middle) * scale_y + shift_y,
    )
    image = image.transform((SIZE, SIZE), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    write_hwc(image, arrays["image"])
    arrays["label"][...] = int(path.parent.name)


def make_dataloader(paths: list[Path]) -> hydrax.Dataloader[Path]:
    """Split the files and make the loader: training, and validation after every epoch."""
    order = np.random.default_rng(0).permutation(len(paths))
    shuffled = [paths[index] for index in order]
    arrays = {
        "image": ((SIZE, SIZE, 1), np.uint8, jnp.uint8),
        "label": ((), np.int32, jnp.int32),
    }
    training = hydrax.DataGroup(
        BATCH_SIZE, shuffled[HELD_OUT:], loader_arrays=arrays, shuffle_first=True
    )
    held_out = hydrax.DataGroup(VALIDATION_BATCH_SIZE, shuffled[:HELD_OUT], loader_arrays=arrays)
    return hydrax.Dataloader(
        load_digit,
        training,
        validation=("epoch", 1, held_out),
        depth=6,
        loader_count=WORKERS,
        end_at=("epoch", EPOCHS),
    )


# --- model ----------------------------------------------------------------------------------------


def init_params(seed: int) -> Params:
    """Two convolutions and two dense layers, initialised after He."""
    shapes = {
        "conv_1": (3, 3, 1, 32),
        "conv_2": (3, 3, 32, 64),
        "dense_1": (SIZE * SIZE // 16 * 64, 64),
        "dense_2": (64, 10),
    }
    generator = np.random.default_rng(seed)
    params = {}
    for name, shape in shapes.items():
        weights = generator.normal(0, math.sqrt(2 / math.prod(shape[:-1])), shape)
        params[name] = jnp.asarray(weights, jnp.float32)
        params[f"{name}_bias"] = jnp.zeros(shape[-1], jnp.float32)
    return params


def apply(params: Params, images: jax.Array) -> jax.Array:
    """Logits of shape ``(B, 10)`` for uint8 images of shape ``(B, SIZE, SIZE, 1)``."""
    x = images.astype(jnp.float32) / 255 - 0.5
    for name in ("conv_1", "conv_2"):
        x = jax.lax.conv_general_dilated(
            x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[f"{name}_bias"])
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["dense_1"] + params["dense_1_bias"])
    return x @ params["dense_2"] + params["dense_2_bias"]


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    params: Params, moments: Moments, images: jax.Array, labels: jax.Array, rate: jax.Array
) -> tuple[Params, Moments, jax.Array]:
    """One step of Adam at a learning rate; returns the loss of the batch as well."""

    def loss_of(params: Params) -> jax.Array:
        log_chances = jax.nn.log_softmax(apply(params, images))
        return -jnp.take_along_axis(log_chances, labels[:, None], axis=1).mean()

    loss, gradient = jax.value_and_grad(loss_of)(params)
    first, second, step = moments
    step = step + 1.0
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
    rate = rate * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second
    )
    return params, (first, second, step), loss


@jax.jit
def predict(params: Params, images: jax.Array) -> jax.Array:
    """The most likely digit of each image, int32 of shape ``(B,)``."""
    return jnp.argmax(apply(params, images), axis=1).astype(jnp.int32)


@jax.jit
def init_moments(params: Params) -> Moments:
    """Adam's state before the first step."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return zeros(params), zeros(params), jnp.float32(0)


def compile_steps() -> None:
    """Compile for both batch sizes, so that the time measured is that of training."""
    params = init_params(0)
    shape = (SIZE, SIZE, 1)
    labels = jnp.zeros(BATCH_SIZE, jnp.int32)
    predict(params, jnp.zeros((VALIDATION_BATCH_SIZE, *shape), jnp.uint8))
    images = jnp.zeros((BATCH_SIZE, *shape), jnp.uint8)
    rate = jnp.float32(0)
    train_step(params, init_moments(params), images, labels, rate)[2].block_until_ready()


# --- training -------------------------------------------------------------------------------------


@dataclass
class History:
    """What is told and drawn at the end."""

    losses: list[float] = field(default_factory=list)
    idle_us: list[int] = field(default_factory=list)
    """Microseconds that ``next`` waited, for each training and validation batch."""
    accuracies: list[float] = field(default_factory=list)
    image_count: int = 0
    seconds: float = 0.0
    images: Any = None
    labels: Any = None
    predictions: Any = None


def train(dataloader: hydrax.Dataloader[Path]) -> History:
    """Train to the end of the loader."""
    params = init_params(1)
    moments = init_moments(params)
    history = History()
    step_count = dataloader.last_batch or 1
    correct = 0
    seen = 0
    begin = time.perf_counter()
    for batch in tbatches(dataloader, description="training"):
        history.idle_us.append(dataloader.idle_usec())
        history.image_count += len(batch)
        images, labels = batch.arrays["image"], batch.arrays["label"]
        if isinstance(batch, hydrax.TrainingBatch):
            rate = jnp.float32(LEARNING_RATE * (1 - batch.batch_num / step_count))
            params, moments, loss = train_step(params, moments, images, labels, rate)
            history.losses.append(float(loss))  # waits for the step: what follows is idle time only
        else:
            predictions = predict(params, images)
            correct += int((predictions == labels).sum())
            seen += len(batch)
            if seen == len(batch):  # arrays that are kept are copied: the slot is for later batches
                kept = batch.copy()
                history.images = np.asarray(kept.arrays["image"])
                history.labels = np.asarray(kept.arrays["label"])
                history.predictions = np.asarray(predictions)
            if seen == HELD_OUT:
                history.accuracies.append(correct / seen)
                mean_loss = np.mean(history.losses[-dataloader.batches_per_epoch :])
                tqdm.write(
                    f"epoch {len(history.accuracies):2}: loss {mean_loss:.3f}, "
                    f"held-out accuracy {correct / seen:.1%}"
                )
                correct = seen = 0
        del batch, images, labels  # the slot is free for the workers from here on
    history.seconds = time.perf_counter() - begin
    return history


# --- picture --------------------------------------------------------------------------------------

INK, SOFT, BLUE, ORANGE, RED = "#1f2430", "#8a8f9c", "#2a6fdb", "#e07b1a", "#d1332e"


def draw(history: History, batches_per_epoch: int, path: Path) -> None:
    """Draw one batch with its predictions, the loss, and how long training waited for data."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": SOFT,
            "axes.labelcolor": INK,
            "xtick.color": SOFT,
            "ytick.color": SOFT,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
        }
    )
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(13, 6), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.12, 1), wspace=0.03)
    left, right = halves
    draw_digits(left, history)
    loss_axes, idle_axes = right.subplots(2, 1)
    draw_loss(loss_axes, history, batches_per_epoch)
    draw_idle(idle_axes, history)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_digits(figure: Any, history: History) -> None:
    """The images of a held-out batch, each with what the network says."""
    wrong = int((history.predictions != history.labels).sum())
    figure.suptitle(
        f"One held-out batch: {len(history.labels)} digits, {wrong or 'none'} read wrong",
        fontweight="bold",
        fontsize=12,
    )
    axes_of_digits = figure.subplots(6, 10).flat
    for axes, image, label, prediction in zip(
        axes_of_digits, history.images, history.labels, history.predictions, strict=True
    ):
        axes.imshow(image[..., 0], cmap="gray_r", vmin=0, vmax=255)
        axes.set_xticks([])
        axes.set_yticks([])
        is_right = prediction == label
        color = BLUE if is_right else RED
        axes.spines[:].set(color="#d8dbe2" if is_right else RED, linewidth=1 if is_right else 2)
        axes.spines["top"].set_visible(True)
        text = f"{prediction}" if is_right else f"{prediction}, is {label}"
        axes.set_title(text, color=color, fontsize=10, loc="center", pad=2)


def draw_loss(axes: Any, history: History, batches_per_epoch: int) -> None:
    """Loss of each batch and held-out accuracy of each epoch."""
    losses = history.losses
    ends = np.arange(1, len(history.accuracies) + 1)
    axes.plot(np.arange(1, len(losses) + 1) / batches_per_epoch, losses, color=BLUE, linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("loss", color=BLUE)
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"Loss, and held-out accuracy up to {max(history.accuracies):.1%}")
    accuracy_axes = axes.twinx()
    accuracy_axes.plot(
        ends, np.multiply(history.accuracies, 100), color=ORANGE, marker="o", markersize=4
    )
    accuracy_axes.set_ylabel("accuracy, %", color=ORANGE)
    accuracy_axes.set_ylim(min(80, *(100 * value for value in history.accuracies)) - 2, 100.5)


def draw_idle(axes: Any, history: History) -> None:
    """How long training waited for each batch."""
    idle_ms = np.divide(history.idle_us, 1e3)
    axes.fill_between(np.arange(1, len(idle_ms) + 1), idle_ms, color=BLUE, alpha=0.35, linewidth=0)
    axes.plot(np.arange(1, len(idle_ms) + 1), idle_ms, color=BLUE, linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("waited, ms")
    share = idle_ms.sum() / 1e3 / history.seconds
    axes.set_title(f"Waiting for data: {share:.1%} of the time")


# --- program --------------------------------------------------------------------------------------


def main() -> None:
    """Write the files, train, tell, draw."""
    parser = argparse.ArgumentParser(description="Train on images of digits, loaded by Hydrax.")
    parser.add_argument("--folder", type=Path, default=Path("build", "demo"))
    folder = parser.parse_args().folder

    files = folder / "digits"
    paths = write_files(files)
    dataloader = make_dataloader(paths)
    print(f"Digits as PNG files: {len(paths):,} in {files}, {HELD_OUT} of them held out")
    print(
        f"Loading: {WORKERS} loader processes, an arena of {dataloader.arena_nbytes / 1e3:,.0f} kB"
    )
    compile_steps()
    history = train(dataloader)

    picture = folder / "digits.png"
    draw(history, dataloader.batches_per_epoch, picture)
    idle_s = sum(history.idle_us) / 1e6
    print()
    print(f"held-out accuracy  {history.accuracies[-1]:.1%}")
    print(
        f"throughput         {history.image_count / history.seconds:,.0f} images/s "
        f"({history.image_count:,} images in {history.seconds:.1f} s)"
    )
    print(f"waiting for data   {idle_s:.2f} s ({idle_s / history.seconds:.1%} of the time)")
    print(f"picture            {picture}")


if __name__ == "__main__":
    main()
