"""Ready-made loaders, on real files."""

from __future__ import annotations

import numpy as np

from hydrax import DataGroup, Dataloader

NUMBER = {"x": ((), np.int32, np.int32)}


class TestBatched:
    @staticmethod
    def load_rows(descriptors, arrays, seeds):
        arrays["x"][:] = descriptors
        return {"together": [len(descriptors)] * len(descriptors)}

    @staticmethod
    def run(loader, **options):
        group = DataGroup(4, range(8), loader_arrays=NUMBER)
        with Dataloader(loader, group, loader_count=0, end_at=("epoch", 1), **options) as batches:
            return [(batch.arrays["x"].tolist(), batch.additional["together"]) for batch in batches]

    def test_a_loader_function_can_say_itself_that_it_is_batched(self):
        def load(descriptors, arrays, seeds):
            return self.load_rows(descriptors, arrays, seeds)

        load.is_batched = True
        assert self.run(load) == [([0, 1, 2, 3], [4] * 4), ([4, 5, 6, 7], [4] * 4)]
        assert self.run(load) == self.run(self.load_rows, batched=True)

    def test_the_argument_counts_more_than_the_attribute(self):
        def load(descriptor, arrays, seed):
            arrays["x"][...] = descriptor
            return {"together": 1}

        load.is_batched = True
        assert self.run(load, batched=False) == [([0, 1, 2, 3], [1] * 4), ([4, 5, 6, 7], [1] * 4)]
