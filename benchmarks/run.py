"""Run the benchmarks and print a table of figures, ratios and targets.

Usage:
    python benchmarks/run.py [--quick] [--only NAME ...] [--rounds N] [--seconds S]

Contenders take turns, each in a fresh process, for several rounds; the table shows medians. What
this project is compared with lives in an environment of its own, made from
``requirements-peers.txt`` on the first run (``--peers-python`` names one that is there already).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness

HERE = Path(__file__).resolve().parent
PEERS_FOLDER = HERE.parent / ".venv" / "peers"
REQUIREMENTS = HERE / "requirements-peers.txt"
BENCHMARKS = (
    "small_items",
    "large_items",
    "tokens",
    "cache",
    "rows",
    "jpeg_folder",
    "huggingface",
    "ready_batch",
    "jit_draws",
    "start_stop",
    "huge_range",
    "resume",
    "worker_death",
    "memory",
    "descriptors",
    "endurance",
)
PROCESS_LIMIT_S = 300

Values = dict[tuple[str, str], list[float]]


def peers_python(chosen: str | None) -> str:
    """The Python that has the peers; makes its environment where needed.

    Args:
        chosen: A Python to take as it is, or None.
    """
    if chosen is not None:
        return chosen
    python = PEERS_FOLDER / "bin" / "python"
    stamp = PEERS_FOLDER / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        report("installing the peers, once")
        venv.create(PEERS_FOLDER, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True)
        stamp.write_text(wanted)
    return str(python)


def measure(python: str, benchmark: str, contender: str, seconds: float) -> dict[str, float]:
    """Run one contender in a process of its own; an empty result says that it failed."""
    script = str(HERE / f"{benchmark}.py")
    command = [python, "-W", "ignore::UserWarning", script, contender, "--seconds", str(seconds)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    if harness.is_peer(contender):
        environment.pop("PYTHONPATH", None)  # could lead to this project in the place of 0.2.2
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        report(f"{benchmark}: {contender} took more than {PROCESS_LIMIT_S} s")
        return {}
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        report(f"{benchmark}: {contender} failed: {last[0]}")
        return {}
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_benchmark(
    name: str, module: Any, python_of_peers: str | None, rounds: int, seconds: float
) -> Values:
    """Let the contenders of one benchmark take turns; returns all values of each metric."""
    values: Values = defaultdict(list)
    for number in range(rounds):
        for contender in module.CONTENDERS:
            if harness.is_peer(contender):
                if python_of_peers is None:
                    continue
                python = python_of_peers
            else:
                python = sys.executable
            begin = time.perf_counter()
            result = measure(python, name, contender, seconds)
            shown = ", ".join(f"{metric} {value:,.4g}" for metric, value in result.items())
            report(
                f"{name} {number + 1}/{rounds}: {contender}: {shown}"
                f"  ({time.perf_counter() - begin:.1f} s)"
            )
            for metric, value in result.items():
                values[contender, metric].append(value)
    return values


def table_row(target: harness.Target, values: Values) -> str:
    """One line of the table, in Markdown."""
    ours = values.get(target.ours, [])
    if target.reference is None:
        compared, reference, ratio = "", [], median(ours)
    else:
        compared = target.reference_label or target.reference[0]
        reference = values.get(target.reference, [])
        # Of the same round, so that a machine that is slower for a while slows both.
        ratio = median([mine / its for mine, its in zip(ours, reference, strict=False)])
    if target.limit is None:
        wanted, met = "", ""
    else:
        sign = "≥" if target.at_least else "≤"
        unit = "" if target.reference else f" {target.unit}"
        wanted = f"{sign} {target.limit:.3g}{unit}"
        if ratio is None:
            met = "not measured"
        else:
            met = "yes" if (ratio >= target.limit) == target.at_least else "**no**"
    cells = (
        target.label,
        f"{figure(median(ours))} {target.unit}",
        compared,
        f"{figure(median(reference))} {target.unit}" if target.reference else "",
        f"{ratio:.3g}" if ratio is not None and target.reference else "",
        wanted,
        met,
    )
    return "| " + " | ".join(cells) + " |"


def median(values: list[float]) -> float | None:
    """The median, or None where nothing was measured."""
    return statistics.median(values) if values else None


def figure(value: float | None) -> str:
    """Three significant digits, thousands set off; a dash for what was not measured."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def machine() -> str:
    """The machine and the versions in one paragraph, without names of hosts or folders."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, {memory_nbytes / 2**30:.0f} GiB, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def versions(python: str | None, packages: tuple[str, ...]) -> str:
    """Names and versions of the packages that a Python has."""
    code = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    if python is None:
        return "none"
    done = subprocess.run(
        [python, "-I", "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return ", ".join(done.stdout.split("\n")[:-1])


def report(text: str) -> None:
    """Progress goes to stderr; stdout holds the table alone."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="Run the benchmarks; print a table.")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME")
    parser.add_argument("--rounds", type=int, help="rounds, default 5")
    parser.add_argument("--seconds", type=float, help="time counted for each, default 2")
    parser.add_argument("--peers-python", help="a Python that has the peers")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--json", type=Path, help="file for all values")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    seconds = arguments.seconds or (0.4 if arguments.quick else 2.0)

    python = None if arguments.no_peers else peers_python(arguments.peers_python)
    values_of = {}
    wanted = []
    for name in arguments.only:
        module = importlib.import_module(name)
        values_of[name] = run_benchmark(name, module, python, rounds, seconds)
        wanted += [(name, target) for target in module.TARGETS]
    if arguments.json:
        plain = {
            name: {f"{who}/{metric}": list_ for (who, metric), list_ in values.items()}
            for name, values in values_of.items()
        }
        arguments.json.write_text(json.dumps(plain, indent=2) + "\n")

    print("| What | Hydrax | Compared with | Its figure | Ratio | Target | Met |")
    print("| --- | ---: | --- | ---: | ---: | ---: | --- |")
    for name, target in wanted:
        print(table_row(target, values_of[name]))
    print()
    print(
        f"{harness.WORKER_COUNT} loader processes unless said; {seconds:g} s each; medians of "
        f"{rounds} round{'s' * (rounds > 1)}, ratios within a round."
    )
    print(f"Machine: {machine()}.")
    print(f"Hydrax: {versions(sys.executable, ('hydrax', 'jax', 'numpy'))}.")
    print(f"Peers: {versions(python, ('hydrax', 'torch', 'grain', 'jax', 'numpy'))}.")
    if any(target.ours not in values_of[name] for name, target in wanted):
        sys.exit("a benchmark of this project failed; see above")


if __name__ == "__main__":
    main()
