"""Imports a module that trains while it is being imported: this file, under another name."""

import importlib
import sys
from pathlib import Path

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    import fractions  # an import in the loader must not wait for the one going on

    arrays["x"][:] = fractions.Fraction(number)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("at_import")
else:
    group = DataGroup(10, range(100), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(load, group, end_at=("epoch", 1), timeout_sec=10) as dataloader:
        print(sum(1 for _ in dataloader))
