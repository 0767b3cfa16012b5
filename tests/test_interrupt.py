"""An interrupted run says how far it came, and goes on from there."""

import logging
import os
import signal

import numpy as np
import pytest

from hydrax import Batch, DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][...] = number


def make(**options):
    group = DataGroup(2, range(10), loader_arrays={"x": ((), np.int32, np.int32)})
    held_out = DataGroup(2, range(4), loader_arrays={"x": ((), np.int32, np.int32)})
    options = {"end_at": ("epoch", 2), "validation": ("epoch", 1, held_out), **options}
    return Dataloader(load, group, timeout_sec=20, **options)


def numbers(dataloader):
    return [(batch.is_training, list(batch.indices)) for batch in map(Batch.copy, dataloader)]


def ctrl_c(dataloader):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "by"), [(ctrl_c, "Ctrl+C"), (Dataloader.interrupt, "interrupt()")]
)
def test_an_interrupted_run_tells_its_last_batch_and_goes_on_after_it(stop, by, caplog):
    with make() as dataloader:
        whole = numbers(dataloader)
    with make() as dataloader, caplog.at_level(logging.INFO, "hydrax"):
        assert dataloader.delivered_batch is None
        for batch in dataloader:
            if batch.is_training and batch.batch_num == 6:
                stop(dataloader)
        assert dataloader.interrupted is True
        assert dataloader.delivered_batch == 6
        state = dataloader.get_state()
    assert dataloader.delivered_batch == 6
    (message,) = [text for text in caplog.messages if "stopped" in text]
    assert message == (
        f"stopped by {by} after training batch 6 (epoch 1, batch 1); get_state() goes on from there"
    )
    resumed = make()
    resumed.set_state(state)
    with resumed:
        # 5 training and 2 validation batches of epoch 0, and 2 of epoch 1, had been delivered.
        assert numbers(resumed) == whole[9:]


def test_validation_does_not_change_the_last_training_batch():
    with make(end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            assert dataloader.delivered_batch == (batch.batch_num if batch.is_training else 4)
            del batch
    assert dataloader.delivered_batch == 4


def test_a_run_that_is_stopped_before_its_start_says_so(caplog):
    with (
        make(deterministic=False) as dataloader,
        caplog.at_level(logging.INFO, "hydrax"),
    ):
        dataloader.interrupt()
        assert numbers(dataloader) == []
    assert "stopped by interrupt() before the first training batch" in caplog.messages


def test_a_state_that_is_set_begins_anew():
    with make() as dataloader:
        state = dataloader.get_state()
        next(dataloader)
        assert dataloader.delivered_batch == 0
        dataloader.set_state(state)
        assert dataloader.delivered_batch is None
        next(dataloader)
        assert dataloader.delivered_batch == 0
