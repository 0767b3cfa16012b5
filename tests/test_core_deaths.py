"""The core survives the death of a worker at every instruction; core/deaths.c kills it there."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CC") or shutil.which("cc") or sysconfig.get_config_var("CC")
NOT_ALLOWED = 77
SOURCES = sorted((ROOT / "csrc").glob("hx_[!x]*.c"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not SOURCES, reason="the sources of the core are not here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="core/deaths.c knows x86-64 only")
def test_nothing_is_lost_when_a_worker_is_killed_at_any_instruction(tmp_path):
    program = tmp_path / "deaths"
    flags = "-std=c11 -D_GNU_SOURCE -O2 -g -pthread -Wl,-z,now -Wall -Wextra -Werror"
    sources = [*SOURCES, ROOT / "tests/core/deaths.c"]
    command = [*shlex.split(COMPILER), *shlex.split(flags), f"-I{ROOT / 'csrc'}", *sources]
    subprocess.run([*command, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=280)
    if done.returncode == NOT_ALLOWED:
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr
    assert "nothing was lost" in done.stdout
