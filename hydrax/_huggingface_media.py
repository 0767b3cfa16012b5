"""Images and sounds in Hugging Face data sets, decoded to NumPy arrays. Imports no JAX."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["decode_audio", "decoder_of"]


def decoder_of(feature: Any, name: str) -> Callable[[Any], Any] | None:
    """What turns a stored value of a feature into an array, or a dict of arrays; None: nothing.

    Raises:
        TypeError: Values of this feature cannot be arrays.
    """
    if not hasattr(feature, "decode_example") or not getattr(feature, "decode", True):
        return None
    kind = type(feature).__name__
    if kind == "Image":
        return lambda value: np.asarray(feature.decode_example(value))
    if kind == "Audio":
        return lambda value: decode_audio(feature, value)
    if kind in ("Translation", "TranslationVariableLanguages", "Json"):
        return None
    raise TypeError(
        f"column {name!r} has the feature {kind}, which cannot be brought to JAX; leave it out "
        "with columns=, or decode it with a loader function of your own"
    )


def decode_audio(feature: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Samples as float32 of shape ``(samples,)``, the mean of all channels, and their rate in Hz.

    The data set's own decoder is used if its packages are installed, else soundfile.
    """
    try:
        decoded = feature.decode_example(value)
        samples, rate = decoded["array"], decoded["sampling_rate"]
    except ImportError:
        samples, rate = _decode_with_soundfile(feature, value)
    return {"array": np.asarray(samples, np.float32), "sampling_rate": int(rate)}


def _decode_with_soundfile(feature: Any, value: dict[str, Any]) -> tuple[Any, int]:
    try:
        import soundfile
    except ImportError as error:
        raise ImportError(
            "sounds are decoded by what datasets[audio] installs, or by soundfile; "
            "install one of them"
        ) from error
    source = value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"])
    samples, rate = soundfile.read(source, dtype="float32", always_2d=True)
    if feature.sampling_rate not in (None, rate):
        raise ValueError(
            f"a sound has {rate} Hz, and the feature {feature.sampling_rate} Hz; "
            "to resample, install what datasets[audio] needs"
        )
    return samples.mean(axis=1), rate
