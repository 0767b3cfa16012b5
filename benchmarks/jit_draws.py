"""Mini-batches in programs under ``jit``: draws in one scan, and maps over all data.

The program beside is the same with the data on the device: it takes the same rows by their numbers.
jax_sgmc runs in the environment of this project, whose tests compare with it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

SGMC = "jax_sgmc 0.1.5"

DRAW_COUNT = 2000
MB_SIZE = 32
SHAPE = (1024,)
ROW_COUNT = 20_000
CACHE_SIZES = (10, 100)
MAP_ROWS, MAP_SHAPE, MAP_MB_SIZE = 50_000, (64,), 256
CHAIN_COUNT = 4
SLOW_ITEM_S = 1e-3
SLOW_MB_SIZE, SLOW_CACHE_SIZE = 8, 4
WORKER_COUNT = 2
TURN_S = 0.2

CONTENDERS = (HYDRAX, SGMC)
TARGETS = (
    *(
        Target(
            f"draws, {cache} cached batches",
            "draws/s",
            (HYDRAX, f"draws_{cache}"),
            (SGMC, f"draws_{cache}"),
            limit,
        )
        for cache, limit in zip(CACHE_SIZES, (8.0, 4.0), strict=True)
    ),
    *(
        Target(
            f"a draw, {cache} cached batches",
            "µs",
            (HYDRAX, f"draw_{cache}_us"),
            (HYDRAX, "device_us"),
            1.5,
            at_least=False,
            reference_label="data on the device",
        )
        for cache in CACHE_SIZES
    ),
    Target("a draw of 8 bytes", "µs", (HYDRAX, "call_us"), None, 4.0, at_least=False),
    *(
        Target(
            f"full map, {cache} cached batches",
            "rows/s",
            (HYDRAX, f"map_{cache}"),
            (SGMC, f"map_{cache}"),
            limit,
        )
        for cache, limit in zip(CACHE_SIZES, (8.0, 4.0), strict=True)
    ),
    Target(
        f"{CHAIN_COUNT} chains under vmap",
        "µs",
        (HYDRAX, "vmap_us"),
        (HYDRAX, "chains_us"),
        1.3,
        at_least=False,
        reference_label="one after the other",
    ),
    Target(
        "a Python thread beside a scan",
        "loops/s",
        (HYDRAX, "thread_beside"),
        (HYDRAX, "thread_beside_other"),
        0.9,
        reference_label="beside a scan without draws",
    ),
    Target(
        "a Python thread beside a scan",
        "loops/s",
        (HYDRAX, "thread_beside"),
        (HYDRAX, "thread_alone"),
        None,
        reference_label="alone",
    ),
    Target(
        "draws of slow items",
        "items/s",
        (HYDRAX, "slow_items"),
        (HYDRAX, "slow_bare"),
        0.9,
        reference_label="the processes' own rate",
    ),
)


def loader_over(contender: str, values: np.ndarray) -> tuple[Any, Any]:
    """The module of the wrappers, and a loader over an array."""
    if contender == HYDRAX:
        from hydrax import data
        from hydrax.data.numpy_loader import NumpyDataLoader
    else:
        from jax_sgmc import data
        from jax_sgmc.data.numpy_loader import NumpyDataLoader
    return data, NumpyDataLoader(x=values)


def scan_draws(get_batch: Any, length: int) -> Callable[[Any], Any]:
    """A program that sums up its draws; returns the state and the sum."""
    import jax
    import jax.numpy as jnp

    def step(carry: Any, _: None) -> Any:
        state, total = carry
        state, batch = get_batch(state)
        return (state, total + jnp.sum(batch["x"])), None

    return lambda state: jax.lax.scan(step, (state, jnp.float32(0)), length=length)[0]


def seconds_per_run(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median times of calls, after one of each that is not counted.

    They take turns, as what else the machine does changes within seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begin = time.perf_counter()
    while any(len(found) < 3 for found in times.values()) or time.perf_counter() - begin < seconds:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def keep_drawing(program: Any, state: Any) -> Callable[[], None]:
    """A call that runs a program once, from the state where it ended before."""
    import jax

    kept = [state]

    def run() -> None:
        kept[0], _ = jax.block_until_ready(program(kept[0]))

    return run


def measure_draws(contender: str, seconds: float) -> dict[str, float]:
    """Draws a second by size of the cache, and what the same costs on the device."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROW_COUNT, *SHAPE)).astype(np.float32)
    data, loader = loader_over(contender, values)
    rows = jnp.asarray(rng.integers(ROW_COUNT, size=(DRAW_COUNT, MB_SIZE)))
    on_device = jnp.asarray(values)

    @jax.jit
    def device(values: Any) -> Any:
        def step(total: Any, rows: Any) -> Any:
            return total + jnp.sum(values[rows]), None

        return jax.lax.scan(step, jnp.float32(0), rows)[0]

    runs: dict[str, Callable[[], Any]] = {}
    releases = []
    for cache in CACHE_SIZES:
        init, get_batch, release = data.random_reference_data(loader, cache, MB_SIZE)
        program = jax.jit(scan_draws(get_batch, DRAW_COUNT))
        runs[f"draw_{cache}"] = keep_drawing(program, init(seed=0))
        releases.append(release)
    if contender == HYDRAX:
        runs["device"] = lambda: jax.block_until_ready(device(on_device))
    result = {}
    for name, per_run in seconds_per_run(runs, seconds * len(runs)).items():
        result[f"{name}_us"] = per_run / DRAW_COUNT * 1e6
        if name != "device":
            result[name.replace("draw_", "draws_")] = DRAW_COUNT / per_run
    for release in releases:
        release()
    return result


def measure_map(contender: str, seconds: float) -> dict[str, float]:
    """Rows a second of a map over all data."""
    import jax
    import jax.numpy as jnp

    values = np.random.default_rng(0).normal(size=(MAP_ROWS, *MAP_SHAPE)).astype(np.float32)
    data, loader = loader_over(contender, values)
    result = {}
    for cache in CACHE_SIZES:
        mapper, release = data.full_data_mapper(loader, cache, MAP_MB_SIZE)

        def fun(batch: Any, mask: Any, total: Any) -> Any:
            sums = jnp.sum(batch["x"], axis=1)
            return jnp.sum(sums * mask.astype(jnp.float32)), total

        program = jax.jit(lambda: mapper(fun, jnp.float32(0), masking=True))  # noqa: B023
        per_run = seconds_per_run(
            {"map": lambda: jax.block_until_ready(program())},  # noqa: B023
            seconds,
        )
        result[f"map_{cache}"] = MAP_ROWS / per_run["map"]
        release()
    return result


def measure_call(seconds: float) -> dict[str, float]:
    """What a draw of next to nothing costs."""
    import jax

    data, loader = loader_over(HYDRAX, np.zeros((1000,), np.float32))
    init, get_batch, release = data.random_reference_data(loader, 1000, 2)
    program = jax.jit(scan_draws(get_batch, 10_000))
    per_run = seconds_per_run({"call": keep_drawing(program, init(seed=0))}, seconds)
    release()
    return {"call_us": per_run["call"] / 10_000 * 1e6}


def measure_vmap(seconds: float) -> dict[str, float]:
    """Chains under vmap against the same chains one after the other."""
    import jax
    import jax.numpy as jnp

    values = np.zeros((ROW_COUNT // 4, *SHAPE), np.float32)
    data, loader = loader_over(HYDRAX, values)
    init, get_batch, release = data.random_reference_data(loader, 10, MB_SIZE)
    scan = scan_draws(get_batch, DRAW_COUNT // CHAIN_COUNT)
    states = [init(seed=seed) for seed in range(CHAIN_COUNT)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    single = jax.jit(scan)
    runs = [keep_drawing(single, state) for state in states]

    def one_after_the_other() -> None:
        for run in runs:
            run()

    vmapped = keep_drawing(jax.jit(jax.vmap(scan)), stacked)
    per_run = seconds_per_run({"chains": one_after_the_other, "vmap": vmapped}, 2 * seconds)
    release()
    return {f"{name}_us": found / DRAW_COUNT * 1e6 for name, found in per_run.items()}


def measure_thread(seconds: float) -> dict[str, float]:
    """Loops of a Python thread alone, beside a scan that draws, and beside one that does not.

    What counts is the GIL, so the second scan is what to compare with: both take a processor. They
    take turns, as what else the machine does changes within seconds.
    """
    import jax
    import jax.numpy as jnp

    data, loader = loader_over(HYDRAX, np.zeros((1000, 8), np.float32))
    init, get_batch, release = data.random_reference_data(loader, 1000, 2, worker_count=1)
    drawing = keep_drawing(jax.jit(scan_draws(get_batch, 20_000)), init(seed=0))
    draw_nothing = scan_draws(lambda state: (state + 1, {"x": jnp.sin(state)}), 200_000)
    other = keep_drawing(jax.jit(draw_nothing), jnp.zeros(8))

    def loops_beside(run: Callable[[], None] | None) -> float:
        is_done = threading.Event()

        def keep_running() -> None:
            while run is not None and not is_done.is_set():
                run()

        thread = threading.Thread(target=keep_running)
        thread.start()
        time.sleep(TURN_S / 10)
        count = 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < TURN_S:
            count += 1
        is_done.set()
        thread.join()
        return count / TURN_S

    drawing()
    other()
    runs = {"thread_beside": drawing, "thread_beside_other": other, "thread_alone": None}
    counts: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(3, round(seconds / TURN_S))):
        for name, run in runs.items():
            counts[name].append(loops_beside(run))
    release()
    return {name: statistics.median(values) for name, values in counts.items()}


def load_slowly(number: int, arrays: Any, seed: int | None) -> None:
    """A loader function that takes a millisecond, which it does not compute."""
    time.sleep(SLOW_ITEM_S)
    arrays["x"][...] = number


def measure_slow(seconds: float) -> dict[str, float]:
    """Items a second where loading is what takes the time."""
    import jax

    import hydrax
    from hydrax import data
    from hydrax.data.arena_loader import ArenaDataLoader

    group = hydrax.DataGroup(1, range(10_000), loader_arrays={"x": ((8,), "f4", "f4")})
    loader = ArenaDataLoader(load_slowly, group, worker_count=WORKER_COUNT)
    init, get_batch, release = data.random_reference_data(loader, SLOW_CACHE_SIZE, SLOW_MB_SIZE)
    length = 100
    run = keep_drawing(jax.jit(scan_draws(get_batch, length)), init(seed=0))
    bare = bare_rate()
    per_run = seconds_per_run({"draws": run}, max(seconds, 1.0))["draws"]
    release()
    return {"slow_items": length * SLOW_MB_SIZE / per_run, "slow_bare": (bare + bare_rate()) / 2}


def bare_rate() -> float:
    """Items a second of as many threads as there are loader processes: they only sleep."""
    arrays = {"x": np.zeros(8, np.float32)}

    def load_some() -> None:
        for number in range(300):
            load_slowly(number, arrays, None)

    threads = [threading.Thread(target=load_some) for _ in range(WORKER_COUNT)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return WORKER_COUNT * 300 / (time.perf_counter() - begin)


def measure(contender: str, seconds: float) -> dict[str, float]:
    """All figures of a contender."""
    share = seconds / 4
    with harness.quiet_fork():
        result = {**measure_draws(contender, share), **measure_map(contender, share)}
        if contender == HYDRAX:
            for part in (measure_call, measure_vmap, measure_thread, measure_slow):
                result.update(part(share))
    return result


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
