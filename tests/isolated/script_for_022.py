"""The program of the README of Hydrax 0.2.2, with its blanks filled in."""

import numpy as np

from hydrax import DataGroup, Dataloader, TrainingBatch, ValidationBatch
from hydrax.tqdm import tbatches


def my_loader(data, arrays, seed):
    arrays["image"][:] = data["value"]
    arrays["label"][0] = data["value"] % 10
    return {"seed": seed, "even": True} if data["value"] % 2 == 0 else {"seed": seed}


def make():
    my_data = [{"value": i} for i in range(60)]
    array_defs = {
        "image": ((8, 8, 3), np.uint8, np.float32),
        "label": ((1,), np.int32, np.int32),
    }
    train = DataGroup(5, my_data[20:], loader_arrays=array_defs, shuffle_first=True)
    valid = DataGroup(5, my_data[:20], loader_arrays=array_defs)
    return Dataloader(
        my_loader,
        train,
        validation=("epoch", 1, valid),
        end_at=("epoch", 5),
    )


def check(batch, counts):
    counts[type(batch)] += 1
    values = [data["value"] for data in batch.data]
    assert batch.arrays["image"].shape == (5, 8, 8, 3)
    assert batch.arrays["image"][:, 0, 0, 0].tolist() == values
    assert batch.arrays["label"][:, 0].tolist() == [value % 10 for value in values]
    evens = batch.get_additional("even", default=False)
    assert evens == [value % 2 == 0 for value in values]
    if isinstance(batch, TrainingBatch):
        assert batch.additional["seed"] == list(batch.seeds)
    elif isinstance(batch, ValidationBatch):
        assert batch.additional["seed"] == [None] * 5
        assert max(values) < 20


if __name__ == "__main__":
    counts = {TrainingBatch: 0, ValidationBatch: 0}
    dataloader = make()
    with dataloader:  # a with block is required
        for batch in dataloader:
            check(batch, counts)
            del batch  # important, release batch before waiting for next one or cleaning up

    for batch in tbatches(make(), report_interval=1000):
        check(batch, counts)
        del batch  # important, see above

    print(counts[TrainingBatch], counts[ValidationBatch])
