"""Train a next-token model on windows of a token file, loaded by Hydrax a run at a time.

The file is a plain array of uint16 on disk, mapped into memory. With ``batched=True`` the loader
function is called once for a run of windows and reads them with one NumPy expression. Items are
positions in the file, so the data set is a ``range``: nothing is listed, packed or sent.

Usage:
    python examples/tokens.py [--quick]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hydrax

WINDOW = 64
BATCH_SIZE = 32
VOCABULARY = 128
WIDTH = 64

Params = dict[str, jax.Array]


def write_tokens(path: Path, count: int) -> None:
    """Write a text that has something to learn: each token mostly decides the next one."""
    generator = np.random.default_rng(0)
    follower = generator.permutation(VOCABULARY)
    is_surprise = generator.random(count) < 0.2
    surprise = generator.integers(0, VOCABULARY, count)
    tokens = np.empty(count, np.uint16)
    token = 0
    for position in range(count):
        token = int(surprise[position] if is_surprise[position] else follower[token])
        tokens[position] = token
    tokens.tofile(path)


class WindowLoader:
    """A loader function with the file that it reads.

    A worker is forked with the mapping, or, with another start method, opens the file itself.
    """

    def __init__(self, path: Path) -> None:
        tokens: np.ndarray = np.memmap(path, np.uint16, "r")
        # Every window of WINDOW + 1 tokens, as a view: nothing is read yet.
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens, WINDOW + 1)

    def __call__(
        self,
        starts: Sequence[int],
        arrays: Mapping[str, np.ndarray],
        seeds: Sequence[int] | None,
    ) -> None:
        """Fill ``arrays["tokens"]``, of shape ``(run, WINDOW + 1)``."""
        arrays["tokens"][:] = self.windows[np.asarray(starts)]


def init_params(key: jax.Array) -> Params:
    """An embedding and a layer that reads the next token from it."""
    embed_key, read_key = jax.random.split(key)
    return {
        "embed": jax.random.normal(embed_key, (VOCABULARY, WIDTH), jnp.float32) / math.sqrt(WIDTH),
        "read": jax.random.normal(read_key, (WIDTH, VOCABULARY), jnp.float32) / math.sqrt(WIDTH),
    }


@partial(jax.jit, donate_argnums=0)
def train_step(params: Params, tokens: jax.Array) -> tuple[Params, jax.Array]:
    """One step of gradient descent on windows of shape ``(B, WINDOW + 1)``."""

    def loss_of(params: Params) -> jax.Array:
        logits = params["embed"][tokens[:, :-1]] @ params["read"]
        log_chances = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_chances, tokens[:, 1:, None], axis=2).mean()

    loss, gradient = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 20 * g, params, gradient), loss


def main() -> None:
    """Write the file, train, tell."""
    parser = argparse.ArgumentParser(description="Train on windows of a token file.")
    parser.add_argument("--quick", action="store_true", help="a short file and 100 steps")
    steps = 100 if parser.parse_args().quick else 1_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        write_tokens(path, 20_000 if steps == 100 else 500_000)
        loader = WindowLoader(path)
        group = hydrax.DataGroup(
            BATCH_SIZE,
            range(len(loader.windows)),
            loader_arrays={"tokens": ((WINDOW + 1,), np.int32, jnp.int32)},
            shuffle_first=True,
        )
        dataloader = hydrax.Dataloader(
            loader, group, batched=True, loader_count=2, end_at=("batch", steps)
        )
        params = init_params(jax.random.key(0))
        losses = []
        with dataloader:
            for batch in dataloader:
                params, loss = train_step(params, batch.arrays["tokens"])
                losses.append(loss)
                del batch
    print(f"{steps} batches of {BATCH_SIZE} windows of {WINDOW} tokens")
    first, last = float(losses[0]), float(jnp.stack(losses[-20:]).mean())
    print(f"loss at the start {first:.2f}, over the last 20 batches {last:.2f}")


if __name__ == "__main__":
    main()
