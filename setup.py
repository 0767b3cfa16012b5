"""Builds the C core, ``hydrax._core``; everything else about the package is in pyproject.toml.

Environment variables:
    HYDRAX_WERROR=1: warnings of the C compiler are errors; for development.
    HYDRAX_SANITIZE=1: build with AddressSanitizer and UndefinedBehaviorSanitizer. The module then
        loads only where libasan was loaded first; ``make sanitize`` does this.
"""

import importlib.util
import os
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup

OLDEST_PYTHON = (3, 11)

if not sys.platform.startswith("linux"):
    raise SystemExit(
        f"hydrax runs on Linux only (it needs memfd_create, eventfd and pidfd_open); "
        f"this is {sys.platform}"
    )
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "hydrax is built for Python's limited API, which free-threaded builds of Python do not "
        "have; use a standard build of Python"
    )


def is_set(variable: str) -> bool:
    """Whether the environment variable asks for something: neither empty nor 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def xla_include() -> str:
    """Folder of the XLA FFI header, which jaxlib ships. JAX itself is not imported."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        include = os.path.join(folder, "include")
        if os.path.exists(os.path.join(include, "xla", "ffi", "api", "c_api.h")):
            return include
    raise SystemExit("hydrax is built with the XLA FFI header of jaxlib 0.10 or later: install it")


compile_args = ["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
link_args = ["-pthread"]
options = {"bdist_wheel": {"py_limited_api": f"cp{OLDEST_PYTHON[0]}{OLDEST_PYTHON[1]}"}}
if is_set("HYDRAX_SANITIZE"):
    sanitize = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    compile_args += ["-UNDEBUG", "-O1", "-g", "-fno-sanitize-recover=undefined", *sanitize]
    link_args += sanitize
    options["build"] = {"build_base": "build/sanitize"}  # never mistaken for the usual build
if is_set("HYDRAX_WERROR"):
    compile_args.append("-Werror")

core = Extension(
    "hydrax._core",
    sources=sorted(glob("csrc/hx_*.c") + glob("csrc/py_*.c")),
    depends=["setup.py", *sorted(glob("csrc/*.h"))],
    include_dirs=["csrc", xla_include()],
    define_macros=[
        ("_GNU_SOURCE", "1"),
        ("Py_LIMITED_API", f"0x{OLDEST_PYTHON[0]:02X}{OLDEST_PYTHON[1]:02X}0000"),
    ],
    py_limited_api=True,
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)

setup(
    ext_modules=[core],
    options=options,
)
