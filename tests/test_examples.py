"""The example programs run as they are, from a folder of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name, folder, *arguments, timeout_s=100):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def need_demo_packages():
    for name in ("sklearn", "matplotlib", "PIL", "tqdm"):
        pytest.importorskip(name, reason="needs hydrax[demo]")


def accuracies(text):
    return [float(found) for found in re.findall(r"held-out accuracy +([\d.]+)%", text)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_digits_reads_97_percent_of_held_out_digits_and_draws_its_picture(tmp_path):
    need_demo_packages()
    output = run_example("digits.py", tmp_path, timeout_s=280).stdout
    picture = Path("build", "demo", "digits.png")
    assert str(picture) in output
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "throughput" in output
    assert "waiting for data" in output
    assert len(list((tmp_path / "build" / "demo" / "digits").glob("*/*.png"))) == 1797
    assert accuracies(output)[-1] >= 97


def test_tokens_learns_what_follows(tmp_path):
    output = run_example("tokens.py", tmp_path, "--quick").stdout
    first, last = map(float, re.findall(r"\d\.\d\d", output))
    assert last < first - 1


def test_table_learns_and_goes_on_after_a_stop(tmp_path):
    pytest.importorskip("pandas", reason="needs hydrax[pandas]")
    output = run_example("table.py", tmp_path, "--quick").stdout
    found = accuracies(output)
    assert len(found) == 3
    assert found[-1] > 85
