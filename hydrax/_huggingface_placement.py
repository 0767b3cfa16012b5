"""What was read from a Hugging Face data set as jax.Arrays on a device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from hydrax._placement import NumpyImporter

__all__ = ["Placer", "resolve_device"]


def resolve_device(device: Any) -> jax.Device | jax.sharding.Sharding | None:
    """The device or sharding that is meant.

    Args:
        device: A device, a sharding, the string of a device as ``str(device)`` has it, or None.

    Raises:
        TypeError: It is of another kind.
        ValueError: No device has this string; lists those there are.
    """
    if device is None or isinstance(device, (jax.Device, jax.sharding.Sharding)):
        return device
    if not isinstance(device, str):
        raise TypeError(
            f"device is {device!r}; expected a jax.Device, a Sharding, the string of a device such "
            f"as {str(jax.devices()[0])!r}, or None"
        )
    known = {str(found): found for found in _all_devices()}
    if device not in known:
        raise ValueError(f"device is {device!r}; there are {', '.join(map(repr, known))}")
    return known[device]


def _all_devices() -> list[jax.Device]:
    devices = list(jax.devices())
    if devices[0].platform != "cpu":
        devices += jax.devices("cpu")
    return devices


class Placer:
    """Turns arrays, and arrays in lists and dicts, into jax.Arrays.

    Args:
        device: As :func:`resolve_device` gives it. None places on JAX's default device, without
            committing the arrays to it.
    """

    def __init__(self, device: jax.Device | jax.sharding.Sharding | None) -> None:
        self._device = device
        self._import = NumpyImporter() if device is None else None

    def place(self, value: Any) -> Any:
        """The value with every array and every number by itself as a jax.Array.

        Arrays must not be written to afterwards.
        """
        if isinstance(value, np.ndarray):
            if self._import is not None:
                return self._import(value)
            return jax.device_put(value, self._device)
        if isinstance(value, list):
            return [self.place(element) for element in value]
        if isinstance(value, dict):
            return {key: self.place(element) for key, element in value.items()}
        if isinstance(value, (bool, int, float)):
            return jax.device_put(value, self._device)
        return value

    def place_column(self, name: str, value: Any) -> Any:
        """Like :meth:`place`, with the column named if a sharding does not fit it."""
        if not isinstance(self._device, jax.sharding.Sharding):
            return self.place(value)
        try:
            return self.place(value)
        except ValueError as error:
            raise ValueError(
                f"the sharding does not fit column {name!r} in this batch: {error}; choose columns "
                "that are one array whose first dimension it divides"
            ) from error
