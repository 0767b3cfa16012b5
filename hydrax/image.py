"""Images for loader functions: decode to sRGB, change representation, write into a batch.

The way of an image is :func:`open_srgb` (a Pillow image in sRGB), any Pillow operation such as a
crop or a resize, then :func:`write_hwc` or :func:`write_chw` into the loader's array. The
``convert_*`` functions change arrays in place afterwards. This module runs in loader processes: it
needs Pillow and NumPy (``pip install 'hydrax[image]'``) and never imports JAX.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
from collections.abc import Sequence
from typing import IO, Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from hydrax.errors import ImageError

__all__ = [
    "CONVERT_PERCEPTUAL",
    "CONVERT_RELATIVE",
    "Coefs",
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

_FloatArray = npt.NDArray[np.floating[Any]]

CONVERT_PERCEPTUAL: Final[tuple[ImageCms.Intent, int]] = (
    ImageCms.Intent.PERCEPTUAL,
    int(ImageCms.Flags.HIGHRESPRECALC),
)
"""Perceptual intent: the whole gamut is squeezed so that colours keep their relations."""

CONVERT_RELATIVE: Final[tuple[ImageCms.Intent, int]] = (
    ImageCms.Intent.RELATIVE_COLORIMETRIC,
    int(ImageCms.Flags.HIGHRESPRECALC | ImageCms.Flags.BLACKPOINTCOMPENSATION),
)
"""Relative colorimetric intent with black point compensation: colours within sRGB stay exact."""


# --- Opening -----------------------------------------------------------------------------------

# What Pillow can make of RGB, or of RGBA where the mode has alpha.
_MODES: Final = frozenset(
    ["1", "CMYK", "F", "HSV", "I", "L", "LA", "La", "P", "RGB", "RGBA", "RGBX", "RGBa", "YCbCr"]
)
_PREMULTIPLIED: Final = {"La": "LA", "RGBa": "RGBA"}

# Colour space that a profile must declare to be usable for the pixels of a mode.
_PROFILE_SPACES: Final = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}

# Entries of Image.info that stop being true once the pixels are sRGB with a separate alpha.
_STALE_INFO: Final = ("icc_profile", "transparency")


class _ProfileError(Exception):
    """An embedded profile cannot be used; the text says why."""


def open_srgb(
    fp: str | os.PathLike[str] | IO[bytes] | Any,
    *,
    mode: str = "RGB",
    convert: tuple[ImageCms.Intent, int] = CONVERT_RELATIVE,
    formats: list[str] | tuple[str, ...] | None = None,
) -> Image.Image:
    """Open an image, decode it, and convert its pixels to sRGB.

    The embedded ICC profile (RGB, grey or CMYK) is applied; pixels without a profile are taken as
    sRGB. The EXIF orientation is applied. Of an animation the first frame is read.

    Greyscale of more than 8 bits is scaled, not clipped: 16-bit samples from their full range,
    32-bit integers (``"I"``) from 0 to 65535, and floating-point samples (``"F"``) from 0.0
    (black) to 1.0 (white).

    Args:
        fp: Path, binary file object (which stays open), or buffer with the encoded image, such as
            ``bytes``.
        mode: Pillow mode of the result. Transparency of any kind is kept by ``"RGBA"`` and
            ``"LA"``, premultiplied by ``"RGBa"`` and ``"La"``. Other modes drop it: nothing is
            composited, the colours under transparent pixels show.
        convert: Rendering intent and LittleCMS flags, :data:`CONVERT_RELATIVE` or
            :data:`CONVERT_PERCEPTUAL`. Where the profile lacks the intent, its own default intent
            is used.
        formats: Names of the formats to try, as in ``PIL.Image.open``; None tries all.

    Returns:
        A loaded image that holds no file. Its ``info`` has no profile, as sRGB is meant.

    Raises:
        ImageError: The content is empty, damaged, cut off, not an image, or larger than the limit
            of :func:`set_max_image_pixels`; names the file and the reason.
        FileNotFoundError, PermissionError, IsADirectoryError: As ``open`` raises them.
        ValueError: ``mode`` is not one that sRGB can be converted to, or ``convert`` names no
            intent.

    Warns:
        UserWarning: A profile is broken or does not fit the pixels, which are then left as they
            are; EXIF data are broken; or samples lie outside the range given above. The text names
            the file. A warnings filter turns this into an error.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("L", (4, 2), 128).save(file, "PNG")
        >>> image = open_srgb(file)
        >>> image.mode, image.size, image.getpixel((0, 0))
        ('RGB', (4, 2), (128, 128, 128))
    """
    if mode not in _MODES:
        raise ValueError(f"mode {mode!r} cannot be made from sRGB; use one of {sorted(_MODES)}")
    if formats is not None and not isinstance(formats, (list, tuple)):
        raise TypeError(f"formats must be a list or tuple, not {type(formats).__name__}")
    convert = (ImageCms.Intent(convert[0]), int(convert[1]))
    name = _name_of(fp)
    problems: list[str] = []
    with _opened(fp) as stream:
        try:
            with Image.open(stream, formats=formats) as image:
                image.load()
                result = _to_srgb(image, convert, problems)
        except MemoryError:
            raise
        except Image.DecompressionBombError as error:
            raise ImageError(
                f"cannot read image {name}: {error}; "
                "hydrax.image.set_max_image_pixels sets the limit"
            ) from error
        except UnidentifiedImageError as error:
            reason = "the file is empty" if _is_empty(stream) else "not an image of a known format"
            raise ImageError(f"cannot read image {name}: {reason}") from error
        except Exception as error:
            # Damaged files make Pillow's decoders raise nearly every built-in exception
            # (OSError, SyntaxError, ValueError, struct.error, IndexError, ...).
            detail = str(error) or type(error).__name__
            raise ImageError(f"cannot read image {name}: {detail}") from error
    _orient(result, problems)
    if mode != result.mode:
        result = _with_mode(result, mode)
    for problem in problems:
        warnings.warn(f"image {name}: {problem}", stacklevel=2)
    return result


def set_max_image_pixels(threshold: int | None) -> None:
    """Set from how many pixels on an image is refused as a decompression bomb.

    The limit is Pillow's own and holds for the whole process; forked loader processes inherit it,
    others set it in ``startup_func``. Pillow warns (``DecompressionBombWarning``) above half the
    limit.

    Args:
        threshold: Largest permitted width times height, at least 1; None for no limit.

    Raises:
        TypeError: ``threshold`` is neither an integer nor None.
        ValueError: ``threshold`` is less than 1.

    Example:
        >>> previous = Image.MAX_IMAGE_PIXELS
        >>> set_max_image_pixels(400_000_000)
        >>> Image.MAX_IMAGE_PIXELS = previous
    """
    if threshold is None:
        Image.MAX_IMAGE_PIXELS = None
        return
    if isinstance(threshold, bool) or not isinstance(threshold, (int, np.integer)):
        raise TypeError(f"threshold must be an int or None, not {type(threshold).__name__}")
    if threshold < 1:
        raise ValueError(f"threshold must be at least 1, not {threshold}")
    # Pillow refuses above twice its number; a half keeps odd thresholds exact.
    half, odd = divmod(int(threshold), 2)
    Image.MAX_IMAGE_PIXELS = cast("int", half + 0.5) if odd else half


def _name_of(fp: Any) -> str:
    """Return what to call ``fp`` in messages."""
    if isinstance(fp, (str, os.PathLike)):
        return repr(os.fspath(fp))
    name = getattr(fp, "name", None)
    return repr(name) if isinstance(name, (str, bytes)) else f"<{type(fp).__name__}>"


@contextlib.contextmanager
def _opened(fp: Any) -> Any:
    """Yield a binary stream of ``fp``; closes it only when it was opened here."""
    if isinstance(fp, (str, os.PathLike)):
        with open(fp, "rb") as stream:
            yield stream
    elif hasattr(fp, "read"):
        yield fp
    else:
        try:
            content = memoryview(fp)
        except TypeError:
            raise TypeError(
                f"fp must be a path, a binary file object or a buffer, not {type(fp).__name__}"
            ) from None
        yield io.BytesIO(content)


def _is_empty(stream: IO[bytes]) -> bool:
    try:
        stream.seek(0)
        return not stream.read(1)
    except (OSError, ValueError):
        return False


def _to_srgb(
    image: Image.Image, convert: tuple[ImageCms.Intent, int], problems: list[str]
) -> Image.Image:
    """Return a loaded image as L, LA, RGB or RGBA in sRGB, with its ``info`` kept."""
    profile = image.info.get("icc_profile")
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        result, alpha = _deep_grey_to_srgb(image, profile, convert, problems)
    else:
        colour, alpha = _split_alpha(image)
        result = _colour_to_srgb(colour, profile, convert, problems)
    if alpha is not None:
        result.putalpha(alpha)
    result.info = {key: value for key, value in image.info.items() if key not in _STALE_INFO}
    return result


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the pixels as L, RGB, CMYK or LAB, and the alpha channel as L if there is one.

    The colour key of a PNG (``info["transparency"]``) is compared with the stored samples, so it
    becomes alpha here, before any conversion.
    """
    mode, has_key = image.mode, "transparency" in image.info
    if mode in ("CMYK", "LAB"):
        return image, None
    if mode in ("1", "L", "LA", "La"):
        if mode in ("1", "L") and not has_key:
            return image.convert("L"), None
        image = image.convert("LA")
        return image.getchannel("L"), image.getchannel("A")
    if mode in ("RGBA", "RGBa", "PA") or has_key or (mode == "P" and _has_palette_alpha(image)):
        image = image.convert("RGBA")
        return image.convert("RGB"), image.getchannel("A")
    return image.convert("RGB"), None


def _has_palette_alpha(image: Image.Image) -> bool:
    return image.palette is not None and image.palette.mode.endswith("A")


def _colour_to_srgb(
    image: Image.Image,
    profile: bytes | None,
    convert: tuple[ImageCms.Intent, int],
    problems: list[str],
) -> Image.Image:
    """Return L, RGB, CMYK or LAB pixels as sRGB in L or RGB."""
    if image.mode == "LAB":  # says what its colours are by itself
        return _applied(image, _lab_transform(*convert))
    if profile:
        try:
            if image.mode == "L":
                return image.point(_grey_table(bytes(profile), *convert))
            transform = _profile_transform(bytes(profile), image.mode, *convert)
            if transform is not None:
                return _applied(image, transform)
        except (_ProfileError, ImageCms.PyCMSError) as error:
            problems.append(f"the colour profile is not used: {error}")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _deep_grey_to_srgb(
    image: Image.Image,
    profile: bytes | None,
    convert: tuple[ImageCms.Intent, int],
    problems: list[str],
) -> tuple[Image.Image, Image.Image | None]:
    """Return greyscale of more than 8 bits as sRGB in L, and its colour key as alpha."""
    samples = np.asarray(image)
    key = image.info.get("transparency")
    alpha = None
    if isinstance(key, int):
        alpha = Image.fromarray(np.where(samples == key, 0, 255).astype(np.uint8))
    white = 1.0 if image.mode == "F" else 65535.0
    tags = getattr(image, "tag_v2", None)
    if tags is not None and image.mode.startswith("I;"):
        bits = tags.get(258, 16)  # BitsPerSample; a 12-bit TIFF comes unscaled
        white = float((1 << (bits[0] if isinstance(bits, tuple) else bits)) - 1)
    levels = samples.astype(np.float64) * (255.0 / white)
    if not (np.min(levels, initial=0.0) >= 0.0 and np.max(levels, initial=0.0) <= 255.0):
        problems.append(
            f"samples of mode {image.mode} outside 0 to {white:g} are clipped; "
            "scale such data yourself with PIL.Image and NumPy"
        )
        levels = np.nan_to_num(levels).clip(0.0, 255.0)
    if profile:  # is made for 8 bits: the deep samples are looked up between the levels
        ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
        ramp = _colour_to_srgb(ramp, profile, convert, problems)
        levels = np.interp(levels, np.arange(256), np.asarray(ramp)[0])
    return Image.fromarray(np.rint(levels).astype(np.uint8)), alpha


def _applied(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    result = ImageCms.applyTransform(image, transform)
    assert result is not None  # only an in-place transform returns None
    return result


@functools.lru_cache(maxsize=1)
def _srgb_profile() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


@functools.lru_cache(maxsize=4)
def _lab_transform(intent: ImageCms.Intent, flags: int) -> ImageCms.ImageCmsTransform:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    return ImageCms.buildTransform(
        lab, _srgb_profile(), "LAB", "RGB", intent, cast("ImageCms.Flags", flags)
    )


@functools.lru_cache(maxsize=16)
def _profile_transform(
    profile: bytes, mode: str, intent: ImageCms.Intent, flags: int
) -> ImageCms.ImageCmsTransform | None:
    """Return the transform to sRGB, None if it would change nothing.

    The images of a data set share few profiles, and setting up a CMYK transform takes longer than
    decoding a small image: hence the cache.

    Raises:
        _ProfileError: The profile is broken, or is for other pixels than those of ``mode``.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    except (OSError, ImageCms.PyCMSError) as error:
        raise _ProfileError(f"it cannot be read ({error})") from error
    space = source.profile.xcolor_space.strip()
    if space != _PROFILE_SPACES[mode]:
        raise _ProfileError(f"it is for {space} pixels, these are {mode}")
    if ImageCms.isIntentSupported(source, intent, ImageCms.Direction.INPUT) != 1:
        # A plain number: the header of a damaged profile may hold one that is no intent.
        intent = cast("ImageCms.Intent", ImageCms.getDefaultIntent(source))
    if mode == "L":
        # The optimised transform samples the curve too coarsely where a linear profile is dark.
        flags |= ImageCms.Flags.NOOPTIMIZE
    try:
        transform = ImageCms.buildTransform(
            source, _srgb_profile(), mode, "RGB", intent, cast("ImageCms.Flags", flags)
        )
        return None if mode == "RGB" and _keeps_colours(transform) else transform
    except ImageCms.PyCMSError as error:
        raise _ProfileError(f"it cannot be used ({error})") from error


@functools.lru_cache(maxsize=16)
def _grey_table(profile: bytes, intent: ImageCms.Intent, flags: int) -> list[int]:
    """Return the sRGB level of each of the 256 grey levels of a profile."""
    transform = _profile_transform(profile, "L", intent, flags)
    assert transform is not None  # only pixels in RGB can need none
    ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
    return list(_applied(ramp, transform).convert("L").tobytes())


def _keeps_colours(transform: ImageCms.ImageCmsTransform) -> bool:
    """Whether the transform moves no colour by more than the one level that rounding may cost.

    Most profiles found in photographs are sRGB itself; leaving such pixels alone is exact and
    saves the transform.
    """
    steps = np.linspace(0, 255, 18).round().astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(1, -1, 3)
    grey = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, np.newaxis], (1, 256, 3))
    colours = np.concatenate([cube, grey], axis=1)
    converted = np.asarray(_applied(Image.fromarray(colours), transform))
    return bool(np.abs(converted.astype(np.int16) - colours).max() <= 1)


def _orient(image: Image.Image, problems: list[str]) -> None:
    """Turn the image as its EXIF data say, and remove that entry from ``info``."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:  # parsing damaged EXIF raises nearly every built-in exception
        detail = str(error) or type(error).__name__
        problems.append(f"the EXIF orientation is not used: {detail}")


def _with_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert L, LA, RGB or RGBA pixels to any mode of ``_MODES``."""
    opaque = {"LA": "L", "RGBA": "RGB"}.get(image.mode)
    straight = _PREMULTIPLIED.get(mode, mode)
    if straight not in ("LA", "RGBA"):
        # Pillow would build a palette with alpha, or multiply by it, on some of these ways.
        return (image if opaque is None else image.convert(opaque)).convert(mode)
    image = image.convert(straight)
    return image if mode == straight else image.convert(mode)


# --- Representation: bytes to floating point and back ------------------------------------------


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
        scale = _checked_scale(scale)
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
    if not _is_floating(array.dtype):
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
    if not _is_floating(target.dtype) and not np.can_cast(source.dtype, target.dtype, "safe"):
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
    scale = _checked_scale(scale)
    for plane in planes:
        np.multiply(plane, plane.dtype.type(2.0 * scale), out=plane)
        np.subtract(plane, plane.dtype.type(scale), out=plane)


def _unbalance(planes: Sequence[npt.NDArray[Any]], scale: float) -> None:
    scale = _checked_scale(scale)
    for plane in planes:
        np.add(plane, plane.dtype.type(scale), out=plane)
        np.divide(plane, plane.dtype.type(2.0 * scale), out=plane)


def _checked_scale(scale: float) -> float:
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
    if not isinstance(image, np.ndarray) or not _is_floating(image.dtype):
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


def _is_floating(dtype: np.dtype[Any]) -> bool:
    # The narrow floats of JAX (bfloat16, float8_*) are of NumPy's kind "V".
    return dtype.kind == "f" or "float" in dtype.name


def _work_dtype(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    return np.float64 if dtype == np.float64 else np.float32


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
