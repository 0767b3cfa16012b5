"""From a leased slot to jax.Arrays: as they lie on the CPU, or handed to another device.

On the CPU the arrays are the slot's memory, exported through DLPack, and the slot is free as soon
as the last of them dies. Elsewhere JAX copies from the slot, and holds it until the copy is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from hydrax import _core
from hydrax._specs import ALIGNMENT, ArrayLayout, dlpack_code

__all__ = ["NumpyImporter", "Placement", "canonical_dtypes", "slot_view"]

logger = logging.getLogger(__name__)

_WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")

Memory = _core.Lease | _core.Mapping

Importer = Callable[[Memory, int, tuple[int, ...], int, int], jax.Array]


def canonical_dtypes() -> Mapping[np.dtype[Any], np.dtype[Any]]:
    """JAX's replacements of the 64-bit dtypes: 32-bit ones, or none with ``jax_enable_x64``."""
    return {np.dtype(name): np.dtype(jax.dtypes.canonicalize_dtype(name)) for name in _WIDE_DTYPES}


def slot_view(memory: Memory, layout: ArrayLayout, item_count: int) -> np.ndarray[Any, Any]:
    """NumPy array over the first items of a leased slot or a mapped file.

    It holds the slot or the mapping as long as it or a view of it lives.
    """
    shape = (item_count, *layout.shape[1:])
    return np.ndarray(shape, layout.dtype, memoryview(memory), offset=layout.offset)


class _Array(NamedTuple):
    """What is known of one array before a batch comes."""

    name: str
    layout: ArrayLayout
    code: int | None  # DLPack type code; None where XLA cannot take it so
    bits: int


class Placement:
    """Makes the jax.Arrays of a batch.

    Arrays are placed uncommitted on JAX's default device, as ``jnp.asarray`` does, so that a jitted
    function with sharded parameters takes them too.

    Args:
        groups: For each group the layouts of its arrays in a slot, or in a file of the disk cache.
    """

    def __init__(self, groups: Iterable[Mapping[str, ArrayLayout]]) -> None:
        self._groups = [
            [
                _Array(name, layout, dlpack_code(layout.dtype), layout.dtype.itemsize * 8)
                for name, layout in layouts.items()
            ]
            for layouts in groups
        ]
        device = _default_device()
        self._import = _choose_importer(device) if device.platform == "cpu" else None

    def place(self, lease: Memory, group: int, item_count: int) -> dict[str, jax.Array]:
        """The first item_count items of a batch's arrays, in the layouts' order."""
        arrays = {}
        for name, layout, code, bits in self._groups[group]:
            if code is None:
                # XLA packs these. It gets a copy of its own, as it would hold the slot for long.
                arrays[name] = jax.device_put(slot_view(lease, layout, item_count).copy())
            elif self._import is None:
                arrays[name] = jax.device_put(slot_view(lease, layout, item_count))
            else:
                shape = layout.shape
                if shape[0] != item_count:
                    shape = (item_count, *shape[1:])
                arrays[name] = self._import(lease, layout.offset, shape, code, bits)
        return arrays


def _default_device() -> Any:
    config: Any = jax.config
    device = config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def _choose_importer(device: Any) -> Importer | None:
    """The quickest way to import a DLPack capsule that works with this JAX.

    ``jax.dlpack.from_dlpack`` spends nine tenths of its time on checks whose answers are known
    here. The function behind it is not public, so it is tried on an array first, and the public
    one is used if anything about the result is not as it should be.
    """
    try:
        direct = _direct_importer(device)
        probe = np.arange(32, dtype=np.float32)
        result = direct(_OwnMemory(probe), 0, (32,), 2, 32)  # type: ignore[arg-type]
        if (
            isinstance(result, jax.Array)
            and result.devices() == {device}
            and result.dtype == np.float32
            and not result.weak_type
            and np.array_equal(np.asarray(result), probe)
            and not result.committed
        ):
            return direct
    except Exception:  # whatever a private function may do in a version that is not known yet
        logger.debug("direct DLPack import does not work with this JAX", exc_info=True)
    return _public_importer(device)


class _OwnMemory:
    """Stands in for a lease where an array has memory of its own."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def capsule(self, *_: Any) -> Any:
        return self._array.__dlpack__()

    def tensor(self, *_: Any) -> Any:
        return self._array


def _direct_importer(device: Any) -> Importer:
    from jax._src import lib
    from jax._src.array import ArrayImpl

    to_buffer = cast(Any, lib)._jax.dlpack_managed_tensor_to_buffer
    make_array: Any = ArrayImpl
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def import_uncommitted(lease: Memory, offset: int, *spec: Any) -> jax.Array:
        array = to_buffer(lease.capsule(offset, *spec), device, None)
        # It is committed to its device, and a step whose parameters are not would be compiled once
        # for them and once more for its own results.
        try:
            aval, sharding = known[spec]
        except KeyError:
            aval, sharding = known[spec] = array.aval, array.sharding
        result: jax.Array = make_array(aval, sharding, [array], False, True)
        return result

    return import_uncommitted


def _public_importer(device: Any) -> Importer | None:
    """The documented way; None where only device_put gives what is wanted.

    Among several devices that is the case: it aliases aligned memory too, and leaves the array
    uncommitted, but lets go of the slot only at a later call into JAX.
    """
    if jax.device_count() > 1:
        return None
    return lambda lease, *spec: jax.dlpack.from_dlpack(lease.tensor(*spec), device=device)


class NumpyImporter:
    """Turns NumPy arrays into jax.Arrays on JAX's default device, as they lie if on the CPU.

    Memory that begins at a multiple of 64 bytes is not copied there, and must not be written to
    afterwards. The arrays are uncommitted.
    """

    def __init__(self) -> None:
        device = _default_device()
        self._import = _choose_importer(device) if device.platform == "cpu" else None

    def __call__(self, array: np.ndarray[Any, Any]) -> jax.Array:
        code = dlpack_code(array.dtype)
        if (
            self._import is None
            or code is None
            or array.size == 0
            or not array.flags.writeable  # DLPack before 1.0 cannot say so
            or _address(array) % ALIGNMENT
        ):
            placed: jax.Array = jax.device_put(array)
            return placed
        memory: Any = _OwnMemory(array)
        bits = 8 * array.dtype.itemsize
        return self._import(memory, 0, array.shape, code, bits)


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
