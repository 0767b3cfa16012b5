import logging

import jax
import numpy as np
import pytest

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number
    arrays["wide"][...] = number
    return {"number": number}


def batches(remainder, *, items=10, size=4, loader_count=1, batched=False, later="repeat"):
    def load_run(numbers, arrays, seeds):
        arrays["x"][:] = np.asarray(numbers)[:, None]
        arrays["wide"][:] = numbers
        return {"number": list(numbers)}

    group = DataGroup(
        size,
        range(items),
        loader_arrays={"x": ((3,), np.float32, np.float32), "wide": ((), np.int64, np.int32)},
        remainder=remainder,
        shuffle_later=later,
    )
    dataloader = Dataloader(
        load_run if batched else load,
        group,
        loader_count=loader_count,
        batched=batched,
        end_at=("epoch", 2),
    )
    with dataloader:
        return [batch.copy() for batch in dataloader]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("loader_count", [0, 1, 3])
def test_short_gives_a_smaller_last_batch(loader_count, batched):
    found = batches("short", loader_count=loader_count, batched=batched)
    assert [len(batch) for batch in found] == [4, 4, 2, 4, 4, 2]
    for batch in found:
        assert batch.arrays["x"].shape == (len(batch), 3)
        assert batch.arrays["x"][:, 2].tolist() == list(batch.indices) == list(batch.data)
        assert batch.arrays["wide"].tolist() == batch.additional["number"] == list(batch.indices)
        assert batch.mask.tolist() == [True] * len(batch)
        assert len(batch.seeds) == len(batch) == batch.valid_count


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("loader_count", [0, 1, 3])
def test_pad_repeats_items_and_masks_them(loader_count, batched):
    found = batches("pad", loader_count=loader_count, batched=batched)
    assert [len(batch) for batch in found] == [4] * 6
    assert [batch.valid_count for batch in found] == [4, 4, 2, 4, 4, 2]
    last = found[2]
    assert last.mask.tolist() == [True, True, False, False]
    assert last.mask.dtype == np.bool_
    assert list(last.indices) == [8, 9, 8, 9]
    assert last.seeds[:2] == last.seeds[2:]
    assert last.arrays["wide"].tolist() == [8, 9, 8, 9] == last.additional["number"]


def test_pad_fills_up_from_a_single_item():
    last = batches("pad", items=5)[1]
    assert list(last.indices) == [4, 4, 4, 4]
    assert last.valid_count == 1


def test_drop_leaves_the_rest_out_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, "hydrax"):
        found = batches("drop")
    assert [list(batch.indices) for batch in found][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    said = [message for message in caplog.messages if "left out" in message]
    assert len(said) == 1
    assert "2 of 10 items" in said[0]


@pytest.mark.parametrize(("remainder", "items"), [("pad", 10), ("short", 10), ("drop", 8)])
def test_nothing_is_said_where_nothing_is_left_out(remainder, items, caplog):
    with caplog.at_level(logging.INFO, "hydrax"):
        batches(remainder, items=items)
    assert not [message for message in caplog.messages if "left out" in message]


@pytest.mark.parametrize("remainder", ["pad", "short"])
@pytest.mark.parametrize("later", ["repeat", "reseed", "itemwise", "batchwise"])
def test_every_item_of_an_epoch_is_accounted_for(later, remainder):
    found = batches(remainder, items=23, size=5, later=later)
    for epoch in range(2):
        items = [
            item
            for batch in found
            if batch.epoch == epoch
            for item, is_valid in zip(batch.indices, batch.mask, strict=True)
            if is_valid
        ]
        assert sorted(items) == list(range(23))


def test_pad_compiles_a_masked_function_once():
    compiled = 0

    @jax.jit
    def total(x, mask):
        nonlocal compiled
        compiled += 1
        return jax.numpy.where(mask[:, None], x, 0.0).sum()

    sums = [float(total(batch.arrays["x"], batch.mask)) for batch in batches("pad")]
    assert compiled == 1
    assert sum(sums[:3]) == 3 * sum(range(10))


def test_an_unknown_remainder_is_refused():
    with pytest.raises(ValueError, match="remainder"):
        DataGroup(2, range(3), loader_arrays={"x": ((), "f4", "f4")}, remainder="keep")
