"""A program that imports JAX, but starts it only after its loader processes: they can use it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import hydrax


def load(number, arrays, seed):
    arrays["x"][:] = jnp.full(4, number, jnp.float32) + 1


def place(arrays, layouts, additional, group):
    return {name: jnp.array(array) for name, array in arrays.items()}


if __name__ == "__main__":
    group = hydrax.DataGroup(5, range(20), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with hydrax.Dataloader(
        load, group, placement_func=place, end_at=("epoch", 1), timeout_sec=40
    ) as dataloader:
        print([float(batch.arrays["x"][0, 0]) for batch in dataloader])
