"""Conversions of image arrays in place for :mod:`hydrax.image`: balanced values and Oklab.

The ``convert_*`` functions check what the user gave at one door, :func:`_colour_planes`, and then
work on one plane per channel, whatever the order of the axes. Pillow images, bytes and the way
from them to fractions and back are left to :mod:`hydrax.image`, which also shows the public names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "checked_scale",
    "convert_balanced_to_frac_chw",
    "convert_balanced_to_frac_hwc",
    "convert_frac_to_balanced_chw",
    "convert_frac_to_balanced_hwc",
    "convert_oklab_to_srgb_frac_chw",
    "convert_oklab_to_srgb_frac_hwc",
    "convert_srgb_to_oklab_frac_chw",
    "convert_srgb_to_oklab_frac_hwc",
    "is_floating",
]

_FloatArray = npt.NDArray[np.floating[Any]]


def convert_frac_to_balanced_hwc(image: _FloatArray, scale: float = 1.0) -> None:
    """Change [0, 1] to ``[-scale, scale]`` in place; alpha is left as it is.

    Args:
        image: Floating array of shape ``(..., height, width, channels)``; of two channels the
            second is alpha, of four the fourth.
        scale: Largest value of the balanced representation, above zero.

    Raises:
        TypeError: ``image`` is not a NumPy array of a floating dtype.
        ValueError: The shape is not that of images, ``image`` is read-only, or ``scale`` is not a
            finite number above zero.

    Example:
        >>> image = np.array([[[0.0, 0.5, 1.0]]])
        >>> convert_frac_to_balanced_hwc(image)
        >>> image
        array([[[-1.,  0.,  1.]]])
    """
    _balance(_colour_planes(image, -1), scale)


def convert_frac_to_balanced_chw(image: _FloatArray, scale: float = 1.0) -> None:
    """Do :func:`convert_frac_to_balanced_hwc` for ``(..., channels, height, width)``."""
    _balance(_colour_planes(image, -3), scale)


def convert_balanced_to_frac_hwc(image: _FloatArray, scale: float = 1.0) -> None:
    """Change ``[-scale, scale]`` to [0, 1] in place; alpha is left as it is.

    Takes and raises what :func:`convert_frac_to_balanced_hwc` does.

    Example:
        >>> image = np.array([[[-2.0, 0.0, 2.0]]])
        >>> convert_balanced_to_frac_hwc(image, 2.0)
        >>> image
        array([[[0. , 0.5, 1. ]]])
    """
    _unbalance(_colour_planes(image, -1), scale)


def convert_balanced_to_frac_chw(image: _FloatArray, scale: float = 1.0) -> None:
    """Do :func:`convert_balanced_to_frac_hwc` for ``(..., channels, height, width)``."""
    _unbalance(_colour_planes(image, -3), scale)


def _balance(planes: Sequence[npt.NDArray[Any]], scale: float) -> None:
    scale = checked_scale(scale)
    for plane in planes:
        np.multiply(plane, plane.dtype.type(2.0 * scale), out=plane)
        np.subtract(plane, plane.dtype.type(scale), out=plane)


def _unbalance(planes: Sequence[npt.NDArray[Any]], scale: float) -> None:
    scale = checked_scale(scale)
    for plane in planes:
        np.add(plane, plane.dtype.type(scale), out=plane)
        np.divide(plane, plane.dtype.type(2.0 * scale), out=plane)


def checked_scale(scale: float) -> float:
    if not (scale > 0.0 and np.isfinite(scale)):
        raise ValueError(f"scale must be a finite number above zero, not {scale!r}")
    return float(scale)


def _colour_planes(
    image: Any, channel_axis: int, *, colour: bool = False
) -> list[npt.NDArray[Any]]:
    """Return writable views of an image's channels without alpha; the door of ``convert_*``.

    Args:
        image: What the user gave.
        channel_axis: -1 for HWC, -3 for CHW.
        colour: Whether three colour channels are needed.
    """
    if not isinstance(image, np.ndarray) or not is_floating(image.dtype):
        kind = getattr(image, "dtype", type(image).__name__)
        raise TypeError(f"image must be a numpy.ndarray of a floating dtype, not {kind}")
    order = (
        "(..., height, width, channels)" if channel_axis == -1 else "(..., channels, height, width)"
    )
    channels = image.shape[channel_axis] if image.ndim >= 3 else 0
    if channels not in ((3, 4) if colour else (1, 2, 3, 4)):
        raise ValueError(
            f"image must have shape {order} with {'3 or 4' if colour else '1 to 4'} channels, "
            f"not {image.shape}"
        )
    if not image.flags.writeable:
        raise ValueError("image is read-only, but is changed in place; give a copy")
    channels_first = np.moveaxis(image, channel_axis, 0)
    return list(channels_first[: channels - (channels in (2, 4))])


def is_floating(dtype: np.dtype[Any]) -> bool:
    # The narrow floats of JAX (bfloat16, float8_*) are of NumPy's kind "V".
    return dtype.kind == "f" or "float" in dtype.name


# --- Oklab -------------------------------------------------------------------------------------

# Björn Ottosson, "A perceptual color space for image processing", 2020,
# https://bottosson.github.io/posts/oklab/: linear sRGB to cone responses, and their cube roots
# to Oklab. Each row makes one output. The inverses are computed, so that round trips are exact.
_LMS_FROM_LINEAR: Final = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_OKLAB_FROM_LMS: Final = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
_LINEAR_FROM_LMS: Final = np.linalg.inv(_LMS_FROM_LINEAR)
_LMS_FROM_OKLAB: Final = np.linalg.inv(_OKLAB_FROM_LMS)

_CHUNK_PIXELS: Final = 8192  # a few float64 planes of this size stay in the second-level cache


def convert_srgb_to_oklab_frac_hwc(image: _FloatArray) -> None:
    """Convert sRGB fractions to Oklab in place; alpha is left as it is.

    [0, 1] is the range of sRGB; values beyond it, also below zero, are converted by the curve
    continued with its sign. Results are right to 1e-6 for float32, to 1e-12 for float64.

    Args:
        image: Floating array of shape ``(..., height, width, 3 or 4)``, of any strides.

    Raises:
        TypeError: ``image`` is not a NumPy array of a floating dtype.
        ValueError: The shape is not that of RGB(A) images, or ``image`` is read-only.

    Source:
        Björn Ottosson, https://bottosson.github.io/posts/oklab/ (matrices); IEC 61966-2-1 (sRGB).

    Example:
        >>> image = np.array([[[1.0, 0.0, 0.0]]], "float32")
        >>> convert_srgb_to_oklab_frac_hwc(image)
        >>> image.round(4)
        array([[[0.628 , 0.2249, 0.1258]]], dtype=float32)
    """
    _convert(_colour_planes(image, -1, colour=True), _oklab_from_srgb)


def convert_srgb_to_oklab_frac_chw(image: _FloatArray) -> None:
    """Do :func:`convert_srgb_to_oklab_frac_hwc` for ``(..., 3 or 4, height, width)``."""
    _convert(_colour_planes(image, -3, colour=True), _oklab_from_srgb)


def convert_oklab_to_srgb_frac_hwc(image: _FloatArray) -> None:
    """Convert Oklab to sRGB fractions in place; alpha is left as it is.

    The inverse of :func:`convert_srgb_to_oklab_frac_hwc`, which says what is taken and raised.
    Colours outside the gamut of sRGB come out beyond [0, 1] and are not clipped.

    Example:
        >>> image = np.array([[[0.62796, 0.22486, 0.12585]]])
        >>> convert_oklab_to_srgb_frac_hwc(image)
        >>> abs(image.round(3))
        array([[[1., 0., 0.]]])
    """
    _convert(_colour_planes(image, -1, colour=True), _srgb_from_oklab)


def convert_oklab_to_srgb_frac_chw(image: _FloatArray) -> None:
    """Do :func:`convert_oklab_to_srgb_frac_hwc` for ``(..., 3 or 4, height, width)``."""
    _convert(_colour_planes(image, -3, colour=True), _srgb_from_oklab)


def _convert(planes: list[npt.NDArray[Any]], kernel: Any) -> None:
    """Apply ``kernel(three float64 planes, single)`` to three planes of any strides, in place.

    The iterator hands out float64 buffers of a chunk's size and writes them back, so the
    temporaries do not grow with the batch. ``single`` says that float32 powers are exact enough.
    """
    single = planes[0].dtype != np.float64
    with (
        np.errstate(invalid="ignore", over="ignore"),
        np.nditer(
            planes,
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_flags=[["readwrite"]] * 3,
            op_dtypes=[np.dtype(np.float64)] * 3,
            casting="unsafe",
            buffersize=_CHUNK_PIXELS,
        ) as chunks,
    ):
        for chunk in chunks:
            kernel(chunk, single)


def _oklab_from_srgb(planes: Sequence[npt.NDArray[Any]], single: bool) -> None:
    for plane in planes:
        _linear_from_srgb(plane, single)
    lms = _matrix_product(_LMS_FROM_LINEAR, planes)
    roots = [_cube_root(plane, single) for plane in lms]
    for plane, result in zip(planes, _matrix_product(_OKLAB_FROM_LMS, roots), strict=True):
        plane[...] = result


def _srgb_from_oklab(planes: Sequence[npt.NDArray[Any]], single: bool) -> None:
    lms = [root * root * root for root in _matrix_product(_LMS_FROM_OKLAB, planes)]
    for plane, result in zip(planes, _matrix_product(_LINEAR_FROM_LMS, lms), strict=True):
        _srgb_from_linear(result, single)
        plane[...] = result


def _matrix_product(
    matrix: npt.NDArray[np.float64], planes: Sequence[npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    x, y, z = planes
    return [a * x + b * y + c * z for a, b, c in matrix]


def _linear_from_srgb(plane: npt.NDArray[Any], single: bool) -> None:
    size = np.abs(plane)
    curve = _power((size + 0.055) / 1.055, 2.4, single)
    np.copysign(np.where(size <= 0.04045, size / 12.92, curve), plane, out=plane)


def _srgb_from_linear(plane: npt.NDArray[Any], single: bool) -> None:
    size = np.abs(plane)
    curve = 1.055 * _power(size, 1 / 2.4, single) - 0.055
    np.copysign(np.where(size <= 0.04045 / 12.92, size * 12.92, curve), plane, out=plane)


def _power(base: npt.NDArray[Any], exponent: float, single: bool) -> npt.NDArray[Any]:
    if single:
        base = base.astype(np.float32)
    result: npt.NDArray[Any] = np.power(base, exponent)
    return result


def _cube_root(plane: npt.NDArray[Any], single: bool) -> npt.NDArray[Any]:
    root: npt.NDArray[Any]
    if not single:
        root = np.cbrt(plane)
        return root
    # A float32 power and one Newton step take a third of the time of cbrt and, unlike a float32
    # result, are exact enough for the differences of roots that Oklab's a and b are.
    size = np.abs(plane)
    root = np.power(size.astype(np.float32), np.float32(1 / 3)).astype(np.float64)
    square = root * root
    root -= (root * square - size) / (3.0 * square + 1e-20)  # the last term keeps 0 at 0
    np.copysign(root, plane, out=root)
    return root
