"""Train a classifier on the rows of a pandas table, loaded by Hydrax.

``RowData`` makes a row of the table an item. The loader function turns the row, text and missing
values included, into numbers, and can send small things that are no arrays along in a dict. Stops
in the middle and goes on from there, as after a checkpoint. Needs ``pip install 'hydrax[pandas]'``.

Usage:
    python examples/table.py [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import hydrax
from hydrax.pandas import RowData

SPECIES = ("oak", "birch", "pine")
BATCH_SIZE = 32
Params = dict[str, jax.Array]


def make_table(row_count: int) -> pd.DataFrame:
    """A table of trees: species as text, measures of which some are missing, an answer."""
    generator = np.random.default_rng(0)
    species = generator.integers(0, len(SPECIES), row_count)
    height_m = generator.normal(18 - 3 * species, 3)
    age = np.where(generator.random(row_count) < 0.1, np.nan, generator.uniform(5, 90, row_count))
    is_healthy = height_m + 3 * species - 0.05 * np.nan_to_num(age, nan=45) > 15.5
    return pd.DataFrame(
        {
            "name": [f"tree {number}" for number in range(row_count)],
            "species": np.array(SPECIES)[species],
            "height_m": height_m,
            "age": age,
            "is_healthy": is_healthy,
        }
    )


def load_tree(
    row: pd.Series[Any], arrays: Mapping[str, np.ndarray], seed: int | None
) -> dict[str, Any]:
    """The loader function: one row into the arrays of one item."""
    features = arrays["features"]
    features[:3] = [row["species"] == species for species in SPECIES]
    features[3] = (row["height_m"] - 15) / 5
    age_is_known = not np.isnan(row["age"])
    features[4] = (row["age"] - 45) / 25 if age_is_known else 0
    features[5] = age_is_known
    arrays["is_healthy"][...] = row["is_healthy"]
    return {"name": row["name"]}


@jax.jit
def logits_of(params: Params, features: jax.Array) -> jax.Array:
    """Logits of being healthy, ``(B,)``, for features ``(B, 6)``."""
    return features @ params["weights"] + params["bias"]


@partial(jax.jit, donate_argnums=0)
def train_step(params: Params, features: jax.Array, is_healthy: jax.Array) -> Params:
    """One step of gradient descent on the logistic loss."""

    def loss_of(params: Params) -> jax.Array:
        signs = jnp.where(is_healthy, jnp.float32(1), jnp.float32(-1))
        return jax.nn.softplus(-signs * logits_of(params, features)).mean()

    gradient = jax.grad(loss_of)(params)
    return {name: value - 0.5 * gradient[name] for name, value in params.items()}


def make_dataloader(table: pd.DataFrame, **options: Any) -> hydrax.Dataloader[pd.Series[Any]]:
    """The loader: four fifths to train on, the rest for validation after each epoch."""
    arrays = {"features": ((6,), np.float32, jnp.float32), "is_healthy": ((), bool, jnp.bool_)}
    training_count = len(table) * 4 // 5
    training = hydrax.DataGroup(
        BATCH_SIZE, RowData(table.iloc[:training_count]), loader_arrays=arrays, shuffle_first=True
    )
    held_out = hydrax.DataGroup(
        BATCH_SIZE, RowData(table.iloc[training_count:]), loader_arrays=arrays
    )
    validation = ("epoch", 1, held_out)
    return hydrax.Dataloader(load_tree, training, validation=validation, loader_count=2, **options)


def train(params: Params, dataloader: hydrax.Dataloader[pd.Series[Any]]) -> Params:
    """Train to the end of the loader; tell how each validation run went."""
    correct: list[bool] = []
    mistaken: list[str] = []
    with dataloader:
        for batch in dataloader:
            features, is_healthy = batch.arrays["features"], batch.arrays["is_healthy"]
            if batch.is_training:
                params = train_step(params, features, is_healthy)
            else:
                is_right = np.asarray((logits_of(params, features) > 0) == is_healthy)
                names = batch.get_additional("name")
                mistaken += [name for name, right in zip(names, is_right, strict=True) if not right]
                correct += is_right.tolist()
                if len(correct) == dataloader.batches_per_validation * BATCH_SIZE:
                    print(
                        f"held-out accuracy {np.mean(correct):.1%}, "
                        f"wrong for {', '.join(mistaken[:3])} ..."
                    )
                    correct, mistaken = [], []
            del batch, features, is_healthy
    return params


def main() -> None:
    """Train two epochs, stop, and go on for a third from where it stopped."""
    parser = argparse.ArgumentParser(description="Train on the rows of a table.")
    parser.add_argument("--quick", action="store_true", help="a small table")
    table = make_table(1_000 if parser.parse_args().quick else 20_000)
    params = {"weights": jnp.zeros(6, jnp.float32), "bias": jnp.float32(0)}
    params = train(params, make_dataloader(table, end_at=("epoch", 2)))
    print("stopped after 2 epochs; going on")
    train(params, make_dataloader(table, start_at=(2, 0), end_at=("epoch", 3)))


if __name__ == "__main__":
    main()
