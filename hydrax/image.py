"""Images for loader functions: decode to sRGB, change representation, write into a batch.

The way of an image is :func:`open_srgb` (a Pillow image in sRGB), any Pillow operation such as a
crop or a resize, then :func:`write_hwc` or :func:`write_chw` into the loader's array. The
``convert_*`` functions change arrays in place afterwards. This module runs in loader processes: it
needs Pillow and NumPy (``pip install 'hydrax[image]'``) and never imports JAX.
"""
# Pillow images to arrays and back are dealt with here. Opening is left to _image_open, changes of
# arrays in place to _image_convert; their names for the user are shown here as this module's own.

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

try:
    from PIL import Image, ImageCms
except ImportError as error:
    raise ImportError("hydrax.image needs Pillow; install hydrax[image]") from error

from hydrax import _image_open
from hydrax._image_convert import (
    checked_scale,
    convert_balanced_to_frac_chw,
    convert_balanced_to_frac_hwc,
    convert_frac_to_balanced_chw,
    convert_frac_to_balanced_hwc,
    convert_oklab_to_srgb_frac_chw,
    convert_oklab_to_srgb_frac_hwc,
    convert_srgb_to_oklab_frac_chw,
    convert_srgb_to_oklab_frac_hwc,
    is_floating,
)
from hydrax._image_open import (
    TooLargeImageError,
    UnknownImageError,
    open_srgb,
    set_max_image_pixels,
)

__all__ = [
    "CONVERT_PERCEPTUAL",
    "CONVERT_RELATIVE",
    "Coefs",
    "TooLargeImageError",
    "UnknownImageError",
    "convert_balanced_to_frac_chw",
    "convert_balanced_to_frac_hwc",
    "convert_frac_to_balanced_chw",
    "convert_frac_to_balanced_hwc",
    "convert_oklab_to_srgb_frac_chw",
    "convert_oklab_to_srgb_frac_hwc",
    "convert_srgb_to_oklab_frac_chw",
    "convert_srgb_to_oklab_frac_hwc",
    "from_srgb_hwc",
    "open_srgb",
    "set_max_image_pixels",
    "write_chw",
    "write_hwc",
]

CONVERT_PERCEPTUAL: Final[tuple[ImageCms.Intent, int]] = _image_open.CONVERT_PERCEPTUAL
"""Perceptual intent: the whole gamut is squeezed so that colours keep their relations."""

CONVERT_RELATIVE: Final[tuple[ImageCms.Intent, int]] = _image_open.CONVERT_RELATIVE
"""Relative colorimetric intent with black point compensation: colours within sRGB stay exact."""


class Coefs:
    """Coefficients between sRGB bytes and another representation, for any dtype.

    A table of two rows, divisor and offset, with one column for each channel or one for all:
    a byte ``x`` becomes ``x / divisor - offset``, and :func:`from_srgb_hwc` goes back.

    Args:
        coefs: Table of shape ``(2, channels)`` or ``(2, 1)``; the divisors are not zero.

    Raises:
        ValueError: The table has another shape, a divisor is zero, or a number is not finite.

    Attributes:
        FRACTIONAL: [0, 255] to [0, 1], for any number of channels.
        IMAGENET_SRGB: The mean and standard deviation of ImageNet, for RGB.
        IMAGENET_SRGB_ALPHA: The same for RGBA, with alpha in [0, 1].

    Example:
        >>> Coefs.balanced()["float32"]
        array([[127.5, 127.5, 127.5],
               [  1. ,   1. ,   1. ]], dtype=float32)
    """

    FRACTIONAL: ClassVar[Coefs]
    IMAGENET_SRGB: ClassVar[Coefs]
    IMAGENET_SRGB_ALPHA: ClassVar[Coefs]

    def __init__(self, coefs: npt.ArrayLike) -> None:
        table = np.array(coefs, dtype=np.float64)
        if table.ndim != 2 or table.shape[0] != 2 or table.shape[1] < 1:
            raise ValueError(f"coefs must have shape (2, channels), not {table.shape}")
        if not np.isfinite(table).all() or not table[0].all():
            raise ValueError("coefs must be finite, with divisors (first row) other than zero")
        table.flags.writeable = False
        self._tables: dict[np.dtype[Any], npt.NDArray[Any]] = {table.dtype: table}

    def __getitem__(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return the table in ``dtype``, shape ``(2, channels)``; read-only and kept."""
        dtype = np.dtype(dtype)
        table = self._tables.get(dtype)
        if table is None:
            table = self._tables[np.dtype(np.float64)].astype(dtype)
            table.flags.writeable = False
            self._tables[dtype] = table
        return table

    def __repr__(self) -> str:
        return f"Coefs({self[np.float64].tolist()})"

    @staticmethod
    def balanced(scale: float = 1.0, *, alpha: bool = False) -> Coefs:
        """Return the coefficients from [0, 255] to ``[-scale, scale]`` for RGB.

        Args:
            scale: Largest value of the representation, above zero.
            alpha: Add a fourth column that takes alpha to [0, 1].

        Raises:
            ValueError: ``scale`` is not a finite number above zero.

        Example:
            >>> Coefs.balanced(0.5, alpha=True)
            Coefs([[255.0, 255.0, 255.0, 255.0], [0.5, 0.5, 0.5, 0.0]])
        """
        scale = checked_scale(scale)
        divisors, offsets = [127.5 / scale] * 3, [scale] * 3
        return Coefs([[*divisors, 255.0], [*offsets, 0.0]] if alpha else [divisors, offsets])


_IMAGENET_MEAN: Final = np.array([0.485, 0.456, 0.406])
_IMAGENET_STD: Final = np.array([0.229, 0.224, 0.225])

Coefs.FRACTIONAL = Coefs([[255.0], [0.0]])
Coefs.IMAGENET_SRGB = Coefs([255.0 * _IMAGENET_STD, _IMAGENET_MEAN / _IMAGENET_STD])
Coefs.IMAGENET_SRGB_ALPHA = Coefs(
    [[*(255.0 * _IMAGENET_STD), 255.0], [*(_IMAGENET_MEAN / _IMAGENET_STD), 0.0]]
)


def write_hwc(
    image: Image.Image | npt.ArrayLike, array: npt.NDArray[Any], coefs: Coefs | None = None
) -> None:
    """Write an image into an array of shape ``(height, width, channels)``.

    Args:
        image: Pillow image, or array-like of shape ``(..., height, width, channels)`` or
            ``(height, width)``. Pixels of mode ``"1"`` count as 0 and 255; those of mode ``"P"``
            are the palette's indices.
        array: Destination of the same shape; ``(height, width)`` will do for one channel. Leading
            dimensions that only ``array`` has are filled with copies.
        coefs: Representation to convert to, such as :attr:`Coefs.FRACTIONAL`; ``array`` is then
            of a floating dtype. None writes the values as they are, 0 to 255 for Pillow images.

    Raises:
        ValueError: The shapes differ (both are named), or ``coefs`` is for other channels.
        TypeError: ``array`` is not a NumPy array, or its dtype cannot hold the values.

    Example:
        >>> array = np.empty((2, 4, 3), "float32")
        >>> write_hwc(Image.new("RGB", (4, 2), (255, 51, 0)), array, Coefs.FRACTIONAL)
        >>> array[0, 0]
        array([1. , 0.2, 0. ], dtype=float32)
    """
    _write(image, array, coefs, chw=False)


def write_chw(
    image: Image.Image | npt.ArrayLike, array: npt.NDArray[Any], coefs: Coefs | None = None
) -> None:
    """Write an image into an array of shape ``(channels, height, width)``.

    Takes and raises what :func:`write_hwc` does, ``image`` being in HWC order too; only the order
    of ``array`` differs.

    Example:
        >>> array = np.empty((3, 2, 4), "uint8")
        >>> write_chw(Image.new("RGB", (4, 2), (255, 51, 0)), array)
        >>> array[:, 0, 0]
        array([255,  51,   0], dtype=uint8)
    """
    _write(image, array, coefs, chw=True)


def _write(image: Any, array: Any, coefs: Coefs | None, *, chw: bool) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array must be a numpy.ndarray, not {type(array).__name__}")
    if isinstance(image, Image.Image) and image.mode == "1":
        image = image.convert("L")
    source = np.asarray(image)
    if source.ndim == 2:
        source = source[..., np.newaxis]
    if array.ndim == 2:
        target = array[..., np.newaxis]
    else:
        target = np.moveaxis(array, -3, -1) if chw and array.ndim > 2 else array
    if source.ndim < 3 or target.shape[-source.ndim :] != source.shape:
        shape = source.shape
        if chw and source.ndim > 2:
            shape = (*shape[:-3], shape[-1], *shape[-3:-1])
        raise ValueError(
            f"image of shape {np.shape(image)} (height, width, channels) needs an array of shape "
            f"{shape}, not {array.shape}; resize or convert the image, or change loader_arrays"
        )
    if coefs is None:
        _copy_values(source, target)
        return
    if not is_floating(array.dtype):
        raise TypeError(
            f"coefs give fractions, which an array of dtype {array.dtype} cannot hold; use a "
            "floating dtype in loader_arrays, or no coefs"
        )
    divisor, offset = _columns(coefs, source.shape[-1], _work_dtype(array.dtype))
    if array.dtype.itemsize < 4:  # half precision: round once, at the end
        values = np.empty(source.shape, np.float32)
        _scale(source, values, divisor, offset)
        target[...] = values
    else:
        _scale(source, target, divisor, offset)


def _copy_values(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    if not is_floating(target.dtype) and not np.can_cast(source.dtype, target.dtype, "safe"):
        raise TypeError(
            f"values of dtype {source.dtype} may not fit an array of dtype {target.dtype}; "
            "convert the image first, or change loader_arrays"
        )
    if target.flags.c_contiguous:
        target[...] = source
    else:  # channels first: plane by plane, long runs instead of runs of three
        for channel in range(source.shape[-1]):
            target[..., channel] = source[..., channel]


def _scale(
    source: npt.NDArray[Any],
    target: npt.NDArray[Any],
    divisor: npt.NDArray[Any],
    offset: npt.NDArray[Any],
) -> None:
    """Write ``source / divisor - offset`` into ``target``, both in HWC order.

    Broadcasting over a last axis of three costs ten times the arithmetic, so the work is laid out
    in long runs: all values at once, whole rows, or single channels.
    """
    if len(divisor) == 1:
        _scale_run(source, target, divisor[0], offset[0])
    elif source.flags.c_contiguous and target.flags.c_contiguous:
        width = source.shape[-2]
        _scale_run(
            source.reshape(*source.shape[:-2], -1),
            target.reshape(*target.shape[:-2], -1),
            np.tile(divisor, width),
            np.tile(offset, width),
        )
    else:
        for channel in range(source.shape[-1]):
            _scale_run(
                source[..., channel], target[..., channel], divisor[channel], offset[channel]
            )


def _scale_run(
    source: npt.NDArray[Any], target: npt.NDArray[Any], divisor: Any, offset: Any
) -> None:
    np.divide(source, divisor, out=target, casting="same_kind")
    if np.any(offset):
        np.subtract(target, offset, out=target)


def _columns(
    coefs: Coefs, channels: int, dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return divisors and offsets, of length 1 where all channels share them."""
    if not isinstance(coefs, Coefs):
        raise TypeError(f"coefs must be a hydrax.image.Coefs, not {type(coefs).__name__}")
    table = coefs[dtype]
    if table.shape[1] not in (1, channels):
        raise ValueError(f"coefs are for {table.shape[1]} channels, the image has {channels}")
    if (table == table[:, :1]).all():
        table = table[:, :1]
    return table[0], table[1]


def from_srgb_hwc(
    image: npt.ArrayLike, coefs: Coefs, *, mode: str | None = None, copy: bool = False
) -> Image.Image:
    """Make a Pillow image of an sRGB array, the way back from :func:`write_hwc`.

    Values are rounded, and clipped to what a byte holds.

    Args:
        image: Array-like of shape ``(height, width, channels)`` or ``(height, width)``.
        coefs: The coefficients that the representation was made with; their inverse is applied.
        mode: Pillow mode with as many 8-bit channels; by default ``"L"``, ``"LA"``, ``"RGB"`` or
            ``"RGBA"``, by the number of channels.
        copy: False lets the conversion use a writable float32 or float64 ``image`` as its scratch
            space, which saves a copy and leaves other values there.

    Raises:
        ValueError: The shape is not that of an image, or ``mode`` or ``coefs`` is for another
            number of channels.

    Warns:
        RuntimeWarning: There were NaNs; they become 0.

    Example:
        >>> image = from_srgb_hwc(np.full((2, 4, 3), 0.2), Coefs.FRACTIONAL)
        >>> image.mode, image.size, image.getpixel((0, 0))
        ('RGB', (4, 2), (51, 51, 51))
    """
    given = np.asarray(image)
    channels = 1 if given.ndim == 2 else given.shape[-1] if given.ndim == 3 else 0
    if not 1 <= channels <= 4:
        raise ValueError(
            f"image must have shape (height, width) or (height, width, 1 to 4), not {given.shape}"
        )
    mode = ("L", "LA", "RGB", "RGBA")[channels - 1] if mode is None else mode
    if mode in ("1", "I", "F") or mode.startswith("I;") or Image.getmodebands(mode) != channels:
        raise ValueError(f"mode {mode!r} does not have {channels} 8-bit channels")
    usable = given.dtype in (np.float32, np.float64) and given.flags.writeable
    values: npt.NDArray[Any] = given
    if copy or not usable:
        values = given.astype(_work_dtype(given.dtype))
    pixels = values.reshape(*values.shape[:2], channels)
    divisor, offset = _columns(coefs, channels, pixels.dtype)
    for channel in range(channels if len(divisor) > 1 else 1):
        plane = pixels[..., channel] if len(divisor) > 1 else pixels
        if offset[channel]:
            np.add(plane, offset[channel], out=plane)
        np.multiply(plane, divisor[channel], out=plane)
    missing = np.isnan(pixels)
    if missing.any():
        warnings.warn("NaNs in the image become 0", RuntimeWarning, stacklevel=2)
        pixels[missing] = 0
    np.rint(pixels, out=pixels)
    np.clip(pixels, 0, 255, out=pixels)
    size = (pixels.shape[1], pixels.shape[0])
    return Image.frombytes(mode, size, pixels.astype(np.uint8).tobytes())


def _work_dtype(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    return np.float64 if dtype == np.float64 else np.float32


# Wherever a name is defined, help(), pickle and the pages find it here.
for _name in __all__:
    if callable(globals()[_name]):
        globals()[_name].__module__ = __name__
del _name
