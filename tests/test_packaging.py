"""What the installed package promises: one version, types, one extension for all Pythons."""

from __future__ import annotations

import ast
import ctypes
import importlib.metadata
import inspect
from pathlib import Path

import hydrax
from hydrax import _core

PACKAGE = Path(hydrax.__file__).parent


def test_installed_version_is_the_one_the_package_states() -> None:
    assert importlib.metadata.version("hydrax") == hydrax.__version__


def test_package_carries_its_types() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core.pyi").is_file()


def test_extension_is_built_for_every_python_from_the_oldest_on() -> None:
    assert Path(_core.__file__).name == "_core.abi3.so"


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("rest", ctypes.c_char * 64),
    )


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("rest", ctypes.c_char * 512),
    )


def test_handlers_run_with_the_oldest_jaxlib_whichever_they_were_built_with() -> None:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
        pointer_of(_core.draw_handler(), None)
    )
    metadata = _Metadata()
    extension = _Extension(kind=1, metadata=ctypes.pointer(metadata))  # asks for the version
    frame = _CallFrame(extension_start=ctypes.pointer(extension))
    assert handler(ctypes.addressof(frame)) is None
    # Of jaxlib 0.10; XLA refuses what is newer than itself.
    assert (metadata.version.major, metadata.version.minor) == (0, 3)


def test_stub_describes_every_public_name_of_the_extension() -> None:
    tree = ast.parse((PACKAGE / "_core.pyi").read_text())
    described: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                described.add(node.name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                described.add(name)
    described = {name for name in described if not name.startswith("_")}
    public = {name for name, _ in inspect.getmembers(_core) if not name.startswith("_")}
    assert described == public


def test_extras_that_the_documentation_names_exist() -> None:
    extras = set(importlib.metadata.metadata("hydrax").get_all("Provides-Extra") or [])
    assert {"all", "huggingface", "image", "pandas", "tqdm", "demo", "test"} <= extras


def test_every_public_name_exists_and_is_documented() -> None:
    for name in hydrax.__all__:
        value = getattr(hydrax, name)
        assert name == "__version__" or inspect.getdoc(value), f"hydrax.{name} has no docstring"
