"""Opening of images for :mod:`hydrax.image`: decode, apply profile and orientation, give sRGB.

Every kind of file and of damage ends here, in a Pillow image or an ImageError. What becomes of the
pixels in arrays is left to :mod:`hydrax.image`, which also shows the public names to the user.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
from typing import IO, Any, Final, cast

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from hydrax.errors import ImageError

__all__ = ["CONVERT_PERCEPTUAL", "CONVERT_RELATIVE", "open_srgb", "set_max_image_pixels"]

# Described in hydrax.image.
CONVERT_PERCEPTUAL: Final[tuple[ImageCms.Intent, int]] = (
    ImageCms.Intent.PERCEPTUAL,
    int(ImageCms.Flags.HIGHRESPRECALC),
)
CONVERT_RELATIVE: Final[tuple[ImageCms.Intent, int]] = (
    ImageCms.Intent.RELATIVE_COLORIMETRIC,
    int(ImageCms.Flags.HIGHRESPRECALC | ImageCms.Flags.BLACKPOINTCOMPENSATION),
)

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


class UnknownImageError(ImageError, UnidentifiedImageError):
    """The content is no image of a known format; also caught as Pillow's error."""


class TooLargeImageError(ImageError, Image.DecompressionBombError):
    """The image has more pixels than the limit; also caught as Pillow's error."""


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
            of :func:`set_max_image_pixels`; names the file and the reason. It is an
            :class:`UnknownImageError` or a :class:`TooLargeImageError` where Pillow has its own.
        FileNotFoundError, PermissionError, IsADirectoryError: As ``open`` raises them.
        TypeError: ``formats`` or ``convert`` is of the wrong kind.
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
    if not isinstance(convert, (tuple, list)) or len(convert) != 2:
        raise TypeError(
            f"convert is {convert!r}; expected an intent and flags, such as CONVERT_RELATIVE"
        )
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
            raise TooLargeImageError(
                f"cannot read image {name}: {error}; "
                "hydrax.image.set_max_image_pixels sets the limit"
            ) from error
        except UnidentifiedImageError as error:
            reason = "the file is empty" if _is_empty(stream) else "not an image of a known format"
            raise UnknownImageError(f"cannot read image {name}: {reason}") from error
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
