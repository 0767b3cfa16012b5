"""Dividing data among the processes of a distributed program."""

from __future__ import annotations

import pickle
import socket

import numpy as np
import pytest
from isolated.run import finish, start

from hydrax import process_share

PROGRAM = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
import numpy as np
from jax.experimental import multihost_utils
from hydrax import DataGroup, Dataloader, process_share

def load(number, arrays, seed):
    arrays["x"][...] = number

def group(data, batch_size):
    return DataGroup(
        batch_size, process_share(data), loader_arrays={"x": ((), np.int32, np.int32)},
        shuffle_first=True,
    )

steps = total = 0
with Dataloader(
    load, group(range(101), 1), validation=("epoch", 1, group(list(range(101)), 5)),
    end_at=("epoch", 2), timeout_sec=30,
) as dataloader:
    for batch in dataloader:
        both = multihost_utils.process_allgather(batch.arrays["x"].sum())
        steps += 1
        total += int(both.sum()) if batch.is_training else 0
        del batch
print(steps, total)
"""


@pytest.mark.parametrize("make", [range, np.arange, lambda n: list(range(n))])
@pytest.mark.parametrize(("length", "count"), [(101, 2), (12, 4), (7, 7), (9, 1)])
def test_shares_are_equally_long_and_have_no_item_in_common(make, length, count):
    shares = [list(process_share(make(length), index, count)) for index in range(count)]
    assert {len(share) for share in shares} == {length // count}
    taken = sorted(item for share in shares for item in share)
    assert taken == list(range(length // count * count))


def test_a_share_is_a_sequence_and_can_be_pickled():
    share = process_share(["a", "b", "c", "d", "e"], 1, 2)
    assert (len(share), share[0], share[-1], list(share[:1])) == (2, "b", "d", ["b"])
    assert list(pickle.loads(pickle.dumps(share))) == ["b", "d"]
    with pytest.raises(IndexError):
        share[2]


def test_wrong_shares_are_refused():
    with pytest.raises(ValueError, match="process_index is 2"):
        process_share(range(10), 2, 2)
    with pytest.raises(ValueError, match="3 items"):
        process_share(range(3), 0, 4)
    with pytest.raises(TypeError, match="both"):
        process_share(range(3), 0)


def test_one_process_alone_has_all():
    assert list(process_share(range(5))) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_processes_with_an_odd_item_take_the_same_number_of_steps(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    processes = [start(str(program), str(index), address) for index in range(2)]
    for process in processes:
        returncode, stdout, stderr = finish(process)
        assert returncode == 0, stderr
        # Two epochs of 50 training and 10 validation batches; item 100 is left out.
        assert stdout.splitlines()[-1] == f"120 {2 * sum(range(100))}"
