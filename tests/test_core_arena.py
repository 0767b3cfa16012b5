import os
import pickle
import threading
import time

import numpy as np
import pytest

from hydrax import _core

# JAX warns of every fork; the children here touch nothing of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork")

FREE, RESERVING, FILLING, READY, LEASED = range(5)


def make_arena(slots=2, nbytes=4096, workers=1, capacity=8, batched=False):
    return _core.Arena(
        slot_count=slots,
        slot_nbytes=nbytes,
        worker_count=workers,
        group_count=1,
        batch_capacity=capacity,
        is_batched=batched,
    )


def make_plan(serial=0, items=4, **changes):
    fields = {
        "serial": serial,
        "epoch": 0,
        "first_position": 0,
        "order_key": 0,
        "order_count": 0,
        "seed_key": 1,
        "seed_start": 0,
        "group": 0,
        "item_count": items,
        "valid_count": items,
        "kind": _core.TRAINING,
    }
    return _core.Plan(**(fields | changes))


def load_all(arena, worker=0):
    """Complete everything that can be claimed without waiting; returns the runs."""
    runs = []
    while (run := arena.claim(worker, -1, 0)) is not None:
        runs.append((run.serial, run.first, run.count))
        run.complete(None)
    return runs


def soon(seconds=5.0):
    return time.monotonic_ns() + int(seconds * 1e9)


def test_runs_of_a_batch_cover_each_item_once():
    arena = make_arena()
    arena.publish(make_plan(items=8))
    runs = load_all(arena)
    assert [first for _, first, _ in runs] == np.cumsum([0, *(r[2] for r in runs[:-1])]).tolist()
    assert sum(count for _, _, count in runs) == 8


def test_a_batch_is_ready_only_when_its_last_item_is_done():
    arena = make_arena(workers=2)
    arena.publish(make_plan(items=2))
    first = arena.claim(0, -1, 0)
    second = arena.claim(1, -1, 0)
    assert (first.count, second.count) == (1, 1)
    second.complete(None)
    assert arena.take(0) is None
    first.complete(None)
    assert arena.take(0).serial == 0


def test_the_ring_takes_as_many_plans_as_it_has_room_and_then_says_no():
    arena = make_arena(slots=3)
    published = 0
    while arena.publish(make_plan(published)):
        published += 1
    assert published >= 4
    load_all(arena)
    assert arena.publish(make_plan(published))


def test_no_slot_is_filled_while_all_are_leased():
    arena = make_arena(slots=2)
    for serial in range(3):
        arena.publish(make_plan(serial))
    load_all(arena)
    leases = [arena.take(0), arena.take(1)]
    assert arena.slot_states() == [LEASED, LEASED]
    assert arena.claim(0, -1, 0) is None
    del leases[0]
    assert load_all(arena)
    assert arena.take(2) is not None


def test_the_slot_that_was_freed_last_is_filled_next():
    arena = make_arena(slots=3)
    for serial in range(4):
        arena.publish(make_plan(serial))
    load_all(arena)
    leases = {serial: arena.take(serial) for serial in range(3)}
    slots = {serial: lease.slot for serial, lease in leases.items()}
    del leases[2], leases[0]
    run = arena.claim(0, -1, 0)
    assert run.slot == slots[0]


def test_wait_returns_when_another_thread_completes_the_batch():
    arena = make_arena()
    arena.publish(make_plan())
    thread = threading.Timer(0.05, load_all, (arena,))
    thread.start()
    lease = arena.wait(0, soon())
    assert isinstance(lease, _core.Lease)
    thread.join()


def test_wait_ends_at_its_deadline():
    arena = make_arena()
    start = time.monotonic()
    assert arena.wait(0, soon(0.05)) == _core.TIMED_OUT
    assert 0.04 < time.monotonic() - start < 2


def test_close_ends_the_waits_of_workers_and_trainer():
    arena = make_arena()
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(arena.wait(0, None))),
        threading.Thread(target=lambda: results.append(arena.claim(0, -1, None))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    arena.close()
    for thread in threads:
        thread.join(5)
    assert set(results) == {_core.CLOSED, None}


def test_kick_ends_one_wait():
    arena = make_arena()
    arena.kick()
    assert arena.wait(0, soon()) == _core.INTERRUPTED
    assert arena.wait(0, soon(0.01)) == _core.TIMED_OUT


def test_wait_names_a_watched_process_that_ends():
    arena = make_arena(workers=2)
    pid = os.fork()
    if pid == 0:
        time.sleep(0.05)
        os._exit(0)
    fd = os.pidfd_open(pid)
    try:
        arena.watch(1, fd)
        assert arena.wait(0, soon()) == 1
    finally:
        arena.watch(1, -1)
        os.close(fd)
        os.waitpid(pid, 0)


def test_a_ready_batch_comes_before_the_news_of_a_dead_worker():
    arena = make_arena()
    arena.publish(make_plan())
    pid = os.fork()
    if pid == 0:
        load_all(arena)
        os._exit(0)
    fd = os.pidfd_open(pid)
    try:
        arena.watch(0, fd)
        assert isinstance(arena.wait(0, soon()), _core.Lease)
    finally:
        arena.watch(0, -1)
        os.close(fd)
        os.waitpid(pid, 0)


def test_a_worker_that_dies_with_the_mutex_held_does_not_lock_out_the_others():
    """Killed at random moments while it claims and completes as fast as it can."""
    for delay in np.linspace(0.0005, 0.01, 30):
        arena = make_arena(slots=4, workers=2)
        pid = os.fork()
        if pid == 0:
            while True:
                run = arena.claim(0, -1, None)
                run.complete(None)
        serial = 0
        stop = time.monotonic() + delay
        while time.monotonic() < stop:
            while arena.publish(make_plan(serial)):
                serial += 1
            if (lease := arena.take(None)) is not None:
                del lease
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        while arena.publish(make_plan(serial)):
            serial += 1
        # The other worker can still claim and complete, and does not hang on the mutex.
        load_all(arena, worker=1)


def test_results_come_back_as_they_were_written():
    arena = make_arena(workers=2)
    arena.publish(make_plan(items=2))
    runs = [arena.claim(0, -1, 0), arena.claim(1, -1, 0)]
    runs[1].complete(b"second")
    runs[0].complete(pickle.dumps(list(range(100_000))))
    lease = arena.take(0)
    records = {first: payload for _, first, payload in lease.records()}
    assert records[1] == b"second"
    assert pickle.loads(records[0]) == list(range(100_000))


def test_a_failed_run_fails_the_batch_without_loading_the_rest():
    arena = make_arena()
    arena.publish(make_plan(items=8))
    run = arena.claim(0, -1, 0)
    run.fail(run.first, b"why")
    assert load_all(arena) == []
    assert arena.take(0).records() == [(_core.RECORD_ERROR, 0, b"why")]


def test_a_run_can_be_ended_once_only():
    arena = make_arena()
    arena.publish(make_plan())
    run = arena.claim(0, -1, 0)
    run.complete(None)
    with pytest.raises(RuntimeError, match="ended"):
        run.complete(None)


def test_a_tensor_reads_the_slot_and_keeps_it_leased():
    arena = make_arena()
    arena.publish(make_plan(items=1))
    run = arena.claim(0, -1, 0)
    view = np.ndarray((16,), np.int32, arena, offset=run.slot * arena.slot_nbytes)
    view[:] = np.arange(16)
    run.complete(None)
    lease = arena.take(0)
    array = np.from_dlpack(lease.tensor(0, (4, 4), 0, 32))
    del lease
    assert array.ctypes.data == view.ctypes.data
    assert array.tolist() == np.arange(16).reshape(4, 4).tolist()
    assert LEASED in arena.slot_states()
    part = array[1:]
    del array
    assert LEASED in arena.slot_states()
    del part
    assert LEASED not in arena.slot_states()


def test_an_unconsumed_capsule_gives_its_lease_back():
    arena = make_arena()
    arena.publish(make_plan())
    load_all(arena)
    lease = arena.take(0)
    capsules = [
        lease.capsule(0, (4,), 2, 32),
        lease.tensor(0, (4,), 2, 32).__dlpack__(max_version=(1, 0)),
        lease.tensor(0, (4,), 2, 32).__dlpack__(),
    ]
    del lease
    assert LEASED in arena.slot_states()
    capsules.clear()
    assert LEASED not in arena.slot_states()


@pytest.mark.parametrize(
    "spec", [(0, (4097,), 1, 8), (4096, (1,), 1, 8), (0, (2**40, 2**40), 1, 8), (0, (-1,), 1, 8)]
)
def test_a_tensor_outside_its_slot_is_refused(spec):
    arena = make_arena()
    arena.publish(make_plan())
    load_all(arena)
    lease = arena.take(0)
    with pytest.raises(ValueError, match="slot"):
        lease.tensor(*spec)


def test_a_forked_copy_of_a_lease_does_not_free_the_slot():
    arena = make_arena()
    arena.publish(make_plan())
    load_all(arena)
    lease = arena.take(0)
    pid = os.fork()
    if pid == 0:
        del lease
        os._exit(0)
    os.waitpid(pid, 0)
    assert LEASED in arena.slot_states()
    del lease
    assert LEASED not in arena.slot_states()


def test_attach_sees_the_same_memory():
    arena = make_arena()
    other = _core.Arena.attach(*(os.dup(fd) for fd in arena.fds))
    np.frombuffer(arena, np.uint8)[:3] = [1, 2, 3]
    assert bytes(memoryview(other)[:3]) == b"\x01\x02\x03"
    assert other.address != arena.address


def test_attach_refuses_a_file_that_is_no_arena(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    fds = [os.open(path, os.O_RDWR) for _ in range(4)]
    with pytest.raises(ValueError, match="not an arena"):
        _core.Arena.attach(*fds)


def test_an_arena_gives_back_memory_and_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        arena = make_arena(nbytes=2**20)
        arena.publish(make_plan())
        load_all(arena)
        del arena
    assert len(os.listdir("/proc/self/fd")) == before


def test_items_and_seeds_are_functions_of_the_plan():
    plan = make_plan(items=8, order_key=5, order_count=100, first_position=3)
    again = make_plan(items=8, order_key=5, order_count=100, first_position=3)
    assert plan.indices() == again.indices() == [_core.permute(5, 100, 3 + i) for i in range(8)]
    assert plan.seeds() == again.seeds()
    assert all(0 <= seed < 2**31 for seed in plan.seeds())
