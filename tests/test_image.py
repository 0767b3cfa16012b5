"""hydrax.image: decoding to sRGB, representations, Oklab."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("PIL", reason="hydrax.image needs Pillow")

from PIL import Image, ImageCms, ImageFile, PngImagePlugin, UnidentifiedImageError

from hydrax import _image_open
from hydrax import image as hi
from hydrax.errors import HydraxError, ImageError
from hydrax.image import Coefs, open_srgb

IMAGES = Path(__file__).parent / "data" / "images"
EXPECTED = json.loads((IMAGES / "expected.json").read_text())

# Patches inside the gamut of sRGB in every space used here.
COLOURS = np.array(
    [[0, 0, 0], [255, 255, 255], [128, 128, 128], [200, 120, 90], [90, 120, 160], [100, 140, 90]],
    np.uint8,
)


def icc_profile(space: bytes, pcs: bytes, device_class: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A version 2 ICC profile, by the specification ICC.1:2001-04."""
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for signature, data in tags.items():
        table += struct.pack(">4sII", signature, start + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    header = struct.pack(
        ">I4sI4s4s4s12s4s4sIIIQIiii",
        *(start + len(body), b"lcms", 0x02100000, device_class, space, pcs, bytes(12), b"acsp"),
        *(bytes(4), 0, 0, 0, 0, 1, 0xF6D6, 0x10000, 0xD32D),  # relative intent, D50
    )
    return header.ljust(128, b"\0") + table + body


def xyz_tag(x: float, y: float, z: float) -> bytes:
    return struct.pack(">4sIiii", b"XYZ ", 0, *(round(v * 65536) for v in (x, y, z)))


def gamma_tag(gamma: float) -> bytes:
    return struct.pack(">4sIIH", b"curv", 0, 1, round(gamma * 256))


DESCRIPTION = struct.pack(">4sII5sII67x", b"desc", 0, 5, b"test\0", 0, 0).ljust(96, b"\0")
WHITE = {b"desc": DESCRIPTION, b"wtpt": xyz_tag(0.9642, 1.0, 0.8249)}

# Columns: the XYZ of the primaries, adapted to D50 (published by Apple and by Kodak).
DISPLAY_P3 = np.array(
    [[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]]
)
PROPHOTO = np.array([[0.79767, 0.13519, 0.03134], [0.28804, 0.71188, 0.00009], [0.0, 0.0, 0.82490]])
SRGB_D50 = np.array(
    [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]]
)


def rgb_profile(matrix: np.ndarray, gamma: float) -> bytes:
    tags = dict(WHITE)
    for channel, letter in enumerate("rgb"):
        tags[f"{letter}XYZ".encode()] = xyz_tag(*matrix[:, channel])
        tags[f"{letter}TRC".encode()] = gamma_tag(gamma)
    return icc_profile(b"RGB ", b"XYZ ", b"mntr", tags)


def grey_profile(gamma: float) -> bytes:
    return icc_profile(b"GRAY", b"XYZ ", b"mntr", {**WHITE, b"kTRC": gamma_tag(gamma)})


def cmyk_profile() -> bytes:
    """A press whose cyan is greener, magenta redder and black weaker than the plain formula."""
    clut = b""
    for corner in range(16):
        c, m, y, k = (corner >> 3) & 1, (corner >> 2) & 1, (corner >> 1) & 1, corner & 1
        light = 1.0 - 0.25 * c - 0.35 * m - 0.08 * y
        lightness = 10 + 85 * light * (1 - 0.8 * k)
        a, b = (-40 * c + 60 * m - 5 * y) * (1 - k), (-40 * c + 5 * m + 70 * y) * (1 - k)
        clut += bytes(round(v) for v in (lightness * 2.55, a + 128, b + 128))
    ramp = bytes(range(256))
    matrix = struct.pack(">9i", *(np.eye(3).ravel() * 65536).astype(int))
    lut = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + matrix + ramp * 4 + clut + ramp * 3
    return icc_profile(b"CMYK", b"Lab ", b"prtr", {**WHITE, b"A2B0": lut, b"A2B1": lut})


def srgb_encode(linear: np.ndarray) -> np.ndarray:
    curve = 1.055 * np.abs(linear) ** (1 / 2.4) - 0.055
    return np.where(linear <= 0.0031308, 12.92 * linear, curve)


def matrix_reference(colours: np.ndarray, matrix: np.ndarray, gamma: float) -> np.ndarray:
    """What the profile means, worked out without LittleCMS; bytes in and out."""
    linear = (colours / 255.0) ** gamma
    srgb = srgb_encode(linear @ matrix.T @ np.linalg.inv(SRGB_D50).T)
    return (srgb.clip(0, 1) * 255).round().astype(int)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def assert_close(actual: Any, expected: Any, tolerance: int = 2) -> None:
    difference = np.abs(np.asarray(actual).astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= tolerance, (actual, expected)


def patches(image: Image.Image, width: int = 8) -> np.ndarray:
    return np.asarray(image)[image.height // 2, width // 2 :: width]


# --- open_srgb: files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if "srgb" in e])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_patches_have_their_srgb_colours(name: str, mode: str) -> None:
    entry = EXPECTED[name]
    if "broken" in name:
        with pytest.warns(UserWarning, match=name):
            image = open_srgb(IMAGES / name, mode=mode)
    else:
        image = open_srgb(IMAGES / name, mode=mode)
    assert image.mode == mode
    expected = np.array(entry["srgb"])
    if mode == "L":
        expected = expected @ [0.299, 0.587, 0.114]
    colour = patches(image, entry["patches_px"])
    if mode == "RGBA":
        assert (colour[..., 3] == 255).all()
        colour = colour[..., :3]
    assert_close(colour, expected.round(), entry.get("tolerance", 2) + (mode == "L"))


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if "error" in e])
def test_unreadable_file_raises_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ImageError, match=name) as caught:
        open_srgb(IMAGES / name)
    assert isinstance(caught.value, HydraxError)
    assert isinstance(caught.value, OSError)
    reason = {"empty": "empty", "truncated": "truncated", "not_an": "not an image"}
    assert reason[next(k for k in reason if name.startswith(k))] in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP"])
def test_file_cut_in_half_raises_and_leaves_no_half_picture(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    content = saved(noise, kind)
    path = tmp_path / f"cut.{kind.lower()}"
    path.write_bytes(content[: len(content) // 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own, about the TIFF directory
        with pytest.raises(ImageError, match=path.name):
            open_srgb(path)


def test_half_a_picture_comes_when_pillow_was_asked_for_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert open_srgb(IMAGES / "truncated.jpg").size == (64, 64)


def test_html_named_jpg_raises(tmp_path: Path) -> None:
    path = tmp_path / "page.jpg"
    path.write_text("<html><body>404 Not Found</body></html>")
    with pytest.raises(ImageError, match=r"page\.jpg.*not an image"):
        open_srgb(path)


def test_missing_file_and_directory_raise_what_open_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_srgb(tmp_path / "none.png")
    with pytest.raises(IsADirectoryError):
        open_srgb(tmp_path)


def test_path_file_and_buffer_give_the_same_image() -> None:
    path = IMAGES / "adobe_rgb.png"
    content = path.read_bytes()
    images = [
        open_srgb(source)
        for source in (
            *(path, str(path), content, bytearray(content), memoryview(content)),
            *(np.frombuffer(content, np.uint8), io.BytesIO(content)),
        )
    ]
    with path.open("rb") as file:
        images.append(open_srgb(file))
        assert not file.closed
    assert len({image.tobytes() for image in images}) == 1
    with pytest.raises(TypeError, match="fp must be a path"):
        open_srgb(12)


def open_files() -> list[str]:
    return sorted(
        str(entry.readlink())
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and "images" in str(entry.readlink())
    )


def test_no_file_stays_open_whether_it_was_read_or_refused() -> None:
    for name, entry in EXPECTED.items():
        if "error" in entry:
            with pytest.raises(ImageError):
                open_srgb(IMAGES / name)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kept = open_srgb(IMAGES / name)
    assert open_files() == []
    assert kept.getpixel((0, 0)) == (0, 0, 0)


def test_size_limit_can_be_set_and_its_error_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    content = saved(Image.new("L", (7, 7)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        hi.set_max_image_pixels(49)
        open_srgb(content)
        hi.set_max_image_pixels(48)
        with pytest.raises(ImageError, match="set_max_image_pixels"):
            open_srgb(content)
    hi.set_max_image_pixels(2 * 49)
    open_srgb(content)  # no warning up to half the limit
    hi.set_max_image_pixels(None)
    assert Image.MAX_IMAGE_PIXELS is None
    for bad in (0, -5):
        with pytest.raises(ValueError, match="at least 1"):
            hi.set_max_image_pixels(bad)
    with pytest.raises(TypeError, match="int or None"):
        hi.set_max_image_pixels(1e9)  # type: ignore[arg-type]


def test_errors_are_also_those_that_pillow_raises(monkeypatch):
    with pytest.raises(UnidentifiedImageError) as unknown:
        open_srgb(b"no image")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "PNG")
    with pytest.raises(Image.DecompressionBombError) as large:
        open_srgb(file.getvalue())
    for caught in (unknown, large):
        assert isinstance(caught.value, ImageError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        assert type(again).__module__ == "hydrax.image"


@pytest.mark.parametrize("convert", [None, 1, (1,), "relative"])
def test_a_conversion_of_the_wrong_kind_is_named(convert):
    with pytest.raises(TypeError, match=r"convert is .*CONVERT_RELATIVE"):
        open_srgb(b"", convert=convert)


def test_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    chunk = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    content = saved(Image.new("RGB", (1, 1)))
    start = content.index(b"IHDR") + 4
    crc = struct.pack(">I", zlib.crc32(b"IHDR" + chunk))
    path = tmp_path / "bomb.png"
    path.write_bytes(content[:start] + chunk + crc + content[start + 17 :])
    with pytest.raises(ImageError, match=r"bomb\.png.*400000000 pixels"):
        open_srgb(path)


def test_wrong_arguments_are_refused_at_the_door() -> None:
    path = IMAGES / "palette.png"
    with pytest.raises(ValueError, match="mode 'RGBB'"):
        open_srgb(path, mode="RGBB")
    with pytest.raises(TypeError, match="formats"):
        open_srgb(path, formats="PNG")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Intent"):
        open_srgb(path, convert=(99, 0))  # type: ignore[arg-type]
    with pytest.raises(ImageError, match="not an image"):
        open_srgb(path, formats=["JPEG"])


def test_importing_the_module_does_not_import_jax() -> None:
    # The package's own __init__ is held to the same in test_imports.
    code = "import hydrax.image, sys; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- open_srgb: colour profiles ----------------------------------------------------------------


@pytest.mark.parametrize(("matrix", "gamma"), [(DISPLAY_P3, 2.2), (PROPHOTO, 1.8)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_rgb_profile_is_applied_and_alpha_kept(matrix: np.ndarray, gamma: float, mode: str) -> None:
    pixels = np.repeat(COLOURS[np.newaxis], 4, axis=0)
    alpha = np.arange(24, dtype=np.uint8).reshape(4, 6, 1) * 10
    if mode == "RGBA":
        pixels = np.concatenate([pixels, alpha], axis=-1)
    content = saved(Image.fromarray(pixels), icc_profile=rgb_profile(matrix, gamma))
    result = np.asarray(open_srgb(content, mode=mode))
    assert_close(result[0, :, :3], matrix_reference(COLOURS, matrix, gamma))
    assert np.abs(result[0, :, :3].astype(int) - COLOURS).max() > 10  # the profile does matter
    if mode == "RGBA":
        assert (result[..., 3:] == alpha).all()


def test_jpeg_with_profile_is_converted() -> None:
    image = Image.new("RGB", (16, 16), (200, 120, 90))
    content = saved(image, "JPEG", quality=100, icc_profile=rgb_profile(DISPLAY_P3, 2.2))
    expected = matrix_reference(np.array([200, 120, 90]), DISPLAY_P3, 2.2)
    assert_close(np.asarray(open_srgb(content))[8, 8], expected, 3)


@pytest.mark.parametrize("convert", [hi.CONVERT_RELATIVE, hi.CONVERT_PERCEPTUAL])
@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk_profile_is_applied(kind: str, convert: Any) -> None:
    profile = cmyk_profile()
    image = Image.new("CMYK", (16, 16), (180, 40, 20, 30))
    options = {"quality": 100} if kind == "JPEG" else {}
    content = saved(image, kind, icc_profile=profile, **options)
    reference = ImageCms.profileToProfile(
        image,
        ImageCms.ImageCmsProfile(io.BytesIO(profile)),
        ImageCms.createProfile("sRGB"),
        renderingIntent=convert[0],
        outputMode="RGB",
        flags=ImageCms.Flags(convert[1]),
    )
    assert reference is not None
    result = open_srgb(content, convert=convert)
    assert_close(np.asarray(result), np.asarray(reference))
    assert np.abs(np.asarray(result).astype(int) - np.asarray(image.convert("RGB"))).max() > 15
    assert open_srgb(content, mode="L", convert=convert).mode == "L"


def test_profile_without_the_wanted_intent_is_used_with_its_own() -> None:
    # A profile that has only a perceptual table, and says relative to be its default.
    profile = cmyk_profile().replace(b"A2B1", b"unkn")
    content = saved(Image.new("CMYK", (4, 4), (180, 40, 20, 30)), "TIFF", icc_profile=profile)
    full = saved(Image.new("CMYK", (4, 4), (180, 40, 20, 30)), "TIFF", icc_profile=cmyk_profile())
    assert_close(np.asarray(open_srgb(content)), np.asarray(open_srgb(full)))


@pytest.mark.parametrize("mode", ["L", "LA"])
@pytest.mark.parametrize("gamma", [1.0, 1.8])
def test_grey_profile_is_applied(mode: str, gamma: float) -> None:
    level = np.arange(0, 256, 5, dtype=np.uint8)
    image = Image.fromarray(np.repeat(level[np.newaxis], 2, axis=0))
    if mode == "LA":
        image.putalpha(77)
    content = saved(image, icc_profile=grey_profile(gamma))
    result = np.asarray(open_srgb(content, mode="RGBA"))
    expected = (srgb_encode((level / 255.0) ** gamma) * 255).round()
    for channel in range(3):
        assert_close(result[0, :, channel], expected)
    assert (result[..., 3] == (77 if mode == "LA" else 255)).all()


@pytest.mark.parametrize(
    ("image", "profile", "words"),
    [
        (Image.new("RGB", (2, 2), (9, 8, 7)), b"no profile at all", "cannot be read"),
        (Image.new("RGB", (2, 2), (9, 8, 7)), rgb_profile(DISPLAY_P3, 2.2)[:200], "cannot be"),
        (Image.new("RGB", (2, 2), (9, 8, 7)), grey_profile(1.8), "GRAY pixels, these are RGB"),
        (Image.new("L", (2, 2), 9), rgb_profile(DISPLAY_P3, 2.2), "RGB pixels, these are L"),
        (Image.new("LA", (2, 2), (9, 3)), rgb_profile(DISPLAY_P3, 2.2), "these are L"),
        (Image.new("RGBA", (2, 2), (9, 8, 7, 3)), cmyk_profile(), "CMYK pixels, these are RGB"),
        (Image.new("I;16", (2, 2), 9 * 257), rgb_profile(DISPLAY_P3, 2.2), "these are L"),
    ],
)
def test_unusable_profile_warns_with_the_file_and_leaves_the_pixels(
    image: Image.Image, profile: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.png"
    image.save(path, icc_profile=profile)
    with pytest.warns(UserWarning, match=rf"odd\.png.*{words}") as caught:
        result = open_srgb(path)
    assert caught[0].filename == __file__
    grey = image.mode not in ("RGB", "RGBA")
    assert result.getpixel((0, 0)) == ((9, 9, 9) if grey else (9, 8, 7))


def test_srgb_profile_leaves_pixels_untouched(rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    result = open_srgb(saved(Image.fromarray(pixels), icc_profile=profile))
    assert (np.asarray(result) == pixels).all()
    assert "icc_profile" not in result.info


def test_lab_pixels_become_srgb() -> None:
    lab = Image.new("LAB", (2, 2), (137, 128, 128))  # L* 53.7, neutral
    assert_close(open_srgb(saved(lab, "TIFF")).getpixel((0, 0)), (128, 128, 128))


# --- open_srgb: orientation, depth, palettes, alpha --------------------------------------------

# Where the top left pixel of the picture as seen is stored, by EXIF orientation.
CORNERS = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied_once(kind: str) -> None:
    for orientation in range(1, 9):
        check_orientation(orientation, kind)


def check_orientation(orientation: int, kind: str) -> None:
    pixels = np.zeros((16, 32), np.uint8)
    row, column = CORNERS[orientation]
    pixels[row * 8 : row * 8 + 8, column * 16 : column * 16 + 16] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.fromarray(pixels), kind, exif=exif)
    result = open_srgb(content, mode="L")
    assert result.size == ((32, 16) if orientation < 5 else (16, 32))
    seen = np.asarray(result) > 128
    half = (seen.shape[0] // 2, seen.shape[1] // 2)
    assert seen[: half[0], : half[1]].all()
    assert seen.sum() == half[0] * half[1]
    assert result.getexif().get(0x0112, 1) == 1  # nobody turns it again


def test_broken_exif_warns_with_the_file_and_keeps_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "exif.png"
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12"
    Image.new("RGB", (2, 3), (1, 2, 3)).save(path, exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("always", message="image ")
        with warnings.catch_warnings(record=True) as caught:
            image = open_srgb(path)
    assert image.getpixel((1, 2)) == (1, 2, 3)
    assert all("exif.png" in str(w.message) for w in caught)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_deep_grey_is_scaled_and_rounded(kind: str) -> None:
    samples = np.array([[0, 128, 129, 257, 32768, 65534, 65535, 50 * 257]], np.uint16)
    content = saved(Image.fromarray(samples), kind)
    expected = np.array([0, 0, 1, 1, 128, 255, 255, 50])
    assert (np.asarray(open_srgb(content, mode="L"))[0] == expected).all()
    assert (np.asarray(open_srgb(content))[0] == expected[:, np.newaxis]).all()


def test_deep_grey_keeps_its_depth_through_a_linear_profile() -> None:
    samples = np.linspace(0, 65535, 400).astype(np.uint16)[np.newaxis]
    content = saved(Image.fromarray(samples), icc_profile=grey_profile(1.0))
    expected = (srgb_encode(samples / 65535.0) * 255).round()
    assert_close(open_srgb(content, mode="L"), expected)


def test_16_bit_pnm_is_scaled() -> None:
    content = b"P5 3 1 65535\n" + struct.pack(">3H", 0, 25700, 65535)
    assert np.asarray(open_srgb(content, mode="L")).tolist() == [[0, 100, 255]]


def test_floating_grey_is_taken_as_fractions_and_warns_beyond(tmp_path: Path) -> None:
    samples = np.array([[0.0, 0.5, 1.0]], np.float32)
    content = saved(Image.fromarray(samples), "TIFF")
    assert np.asarray(open_srgb(content, mode="L")).tolist() == [[0, 128, 255]]
    path = tmp_path / "float.tif"
    Image.fromarray(samples * 200).save(path)
    with pytest.warns(UserWarning, match=r"float\.tif.*outside 0 to 1"):
        assert np.asarray(open_srgb(path, mode="L")).tolist() == [[0, 255, 255]]


def test_integer_grey_beyond_16_bits_warns() -> None:
    content = saved(Image.fromarray(np.array([[0, 65535, 70000]], np.int32)), "TIFF")
    with pytest.warns(UserWarning, match="outside 0 to 65535"):
        assert np.asarray(open_srgb(content, mode="L")).tolist() == [[0, 255, 255]]


def palette_image(transparency: Any) -> bytes:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for x in range(3):
        image.putpixel((x, 0), x)
    return saved(image, transparency=transparency)


@pytest.mark.parametrize(
    ("transparency", "alpha"), [(1, [255, 0, 255]), (b"\x00\x80", [0, 128, 255])]
)
def test_palette_transparency_becomes_alpha(transparency: Any, alpha: list[int]) -> None:
    content = palette_image(transparency)
    rgba = np.asarray(open_srgb(content, mode="RGBA"))
    assert rgba[0, :, 3].tolist() == alpha
    assert (np.asarray(open_srgb(content)) == rgba[..., :3]).all()
    assert rgba[0, :, :3].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize(
    ("image", "key"),
    [
        (Image.new("L", (2, 1), 7), 7),
        (Image.new("RGB", (2, 1), (7, 7, 7)), (7, 7, 7)),
        (Image.new("I;16", (2, 1), 7 * 257), 7 * 257),
    ],
)
def test_colour_key_becomes_alpha(image: Image.Image, key: Any) -> None:
    image.putpixel((1, 0), (9, 9, 9) if image.mode == "RGB" else 9 * (257 if key > 255 else 1))
    content = saved(image, transparency=key)
    assert np.asarray(open_srgb(content, mode="RGBA")).tolist() == [[[7, 7, 7, 0], [9, 9, 9, 255]]]
    assert np.asarray(open_srgb(content, mode="LA")).tolist() == [[[7, 0], [9, 255]]]


def test_colour_key_is_compared_before_the_profile_is_applied() -> None:
    image = Image.new("RGB", (1, 1), (200, 120, 90))
    content = saved(image, transparency=(200, 120, 90), icc_profile=rgb_profile(DISPLAY_P3, 2.2))
    assert open_srgb(content, mode="RGBA").getpixel((0, 0))[3] == 0  # type: ignore[index]


def test_premultiplied_modes_multiply_by_alpha() -> None:
    content = saved(Image.new("RGBA", (1, 1), (200, 100, 50, 128)))
    assert open_srgb(content, mode="RGBa").getpixel((0, 0)) == (100, 50, 25, 128)
    la = saved(Image.new("LA", (1, 1), (200, 128)))
    assert open_srgb(la, mode="La").getpixel((0, 0)) == (100, 128)
    assert open_srgb(la, mode="RGBa").getpixel((0, 0)) == (100, 100, 100, 128)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_every_mode_can_be_asked_of_every_image(kind: str) -> None:
    sources = ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"]
    for source in sources if kind == "PNG" else [*sources, "CMYK", "LAB", "F", "I"]:
        content = saved(Image.new(source, (3, 2)), kind)
        for mode in _image_open._MODES:
            result = open_srgb(content, mode=mode)
            assert result.mode == mode
            assert result.size == (3, 2)
            assert result.tobytes()


def test_info_other_than_colour_is_kept() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("Title", "dunes")
    assert open_srgb(saved(Image.new("L", (1, 1)), pnginfo=text)).info["Title"] == "dunes"


# --- Coefs, write, from_srgb -------------------------------------------------------------------


def test_coefs_are_divisor_and_offset_in_any_dtype() -> None:
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    table = Coefs.IMAGENET_SRGB[np.float64]
    np.testing.assert_allclose(table, [255 * std, mean / std])
    assert Coefs.IMAGENET_SRGB["float32"] is Coefs.IMAGENET_SRGB[np.float32]
    assert Coefs.IMAGENET_SRGB["float32"].dtype == np.float32
    assert Coefs.IMAGENET_SRGB_ALPHA[np.float64][:, 3].tolist() == [255.0, 0.0]
    assert Coefs.FRACTIONAL[np.float64].tolist() == [[255.0], [0.0]]
    assert Coefs.balanced(2.0, alpha=True)[np.float64][:, 2:].tolist() == [[63.75, 255], [2, 0]]
    assert not table.flags.writeable
    copy = pickle.loads(pickle.dumps(Coefs.IMAGENET_SRGB))
    assert (copy[np.float64] == table).all()


@pytest.mark.parametrize("bad", [1.0, [1.0, 2.0], [[1.0], [2.0], [3.0]], [[0.0], [1.0]], [[], []]])
def test_bad_coefs_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="coefs must"):
        Coefs(bad)
    with pytest.raises(ValueError, match="scale must"):
        Coefs.balanced(0.0)


ALL_COEFS = {
    "fractional": (Coefs.FRACTIONAL, lambda x: x / 255.0),
    "balanced": (Coefs.balanced(2.0), lambda x: x / 255.0 * 4 - 2),
    "imagenet": (
        Coefs.IMAGENET_SRGB,
        lambda x: (x / 255.0 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225],
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("order", ["hwc", "chw", "strided"])
def test_write_converts_representation(dtype: str, order: str, rng: np.random.Generator) -> None:
    for name in ALL_COEFS:
        check_write(dtype, name, order, rng)


def check_write(dtype: str, name: str, order: str, rng: np.random.Generator) -> None:
    coefs, reference = ALL_COEFS[name]
    np_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    pixels = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if order == "chw":
        array = np.empty((3, 5, 7), np_dtype)
        hi.write_chw(image, array, coefs)
        result = array.transpose(1, 2, 0)
    else:
        array = (
            np.empty((5, 14, 3), np_dtype)[:, ::2]
            if order == "strided"
            else np.empty((5, 7, 3), np_dtype)
        )
        hi.write_hwc(image, array, coefs)
        result = array
    tolerance = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(result.astype(np.float64), reference(pixels), atol=tolerance)
    if np_dtype.itemsize == 2:  # rounded once
        once = reference(pixels).astype(np.float32).astype(np_dtype)
        assert (result == once).mean() > 0.99


def test_write_without_coefs_copies_values() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    for dtype in (np.uint8, np.int16, np.float32):
        hwc, chw = np.empty((2, 4, 3), dtype), np.empty((3, 2, 4), dtype)
        hi.write_hwc(Image.fromarray(pixels), hwc)
        hi.write_chw(pixels, chw)
        assert (hwc == pixels).all()
        assert (chw == pixels.transpose(2, 0, 1)).all()


def test_write_takes_grey_with_and_without_channel_axis() -> None:
    grey = Image.fromarray(np.arange(8, dtype=np.uint8).reshape(2, 4))
    for write, shape in ((hi.write_hwc, (2, 4, 1)), (hi.write_chw, (1, 2, 4))):
        for array in (np.empty(shape, np.float32), np.empty((2, 4), np.float32)):
            write(grey, array, Coefs.FRACTIONAL)
            np.testing.assert_allclose(array.ravel(), np.arange(8) / 255.0, rtol=1e-6)
    bits = np.empty((2, 4), np.uint8)
    hi.write_hwc(Image.new("1", (4, 2), 1), bits)
    assert (bits == 255).all()


def test_write_takes_leading_dimensions() -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(2, 2, 4, 3)
    hwc, chw = np.empty((2, 2, 4, 3), np.float32), np.empty((2, 3, 2, 4), np.float32)
    hi.write_hwc(pixels, hwc, Coefs.IMAGENET_SRGB)
    hi.write_chw(pixels, chw, Coefs.IMAGENET_SRGB)
    np.testing.assert_allclose(chw, hwc.transpose(0, 3, 1, 2))
    hi.write_hwc(pixels[0], hwc, Coefs.IMAGENET_SRGB)
    assert (hwc[0] == hwc[1]).all()


@pytest.mark.parametrize(
    ("write", "shape", "words"),
    [
        (hi.write_hwc, (4, 2, 3), r"\(2, 4, 3\).*needs.*\(2, 4, 3\), not \(4, 2, 3\)"),
        (hi.write_hwc, (2, 4, 1), r"not \(2, 4, 1\)"),
        (hi.write_hwc, (2, 4), r"not \(2, 4\)"),
        (hi.write_chw, (2, 4, 3), r"\(2, 4, 3\).*needs.*\(3, 2, 4\), not \(2, 4, 3\)"),
        (hi.write_chw, (), r"not \(\)"),
    ],
)
def test_write_into_another_shape_names_both(write: Any, shape: Any, words: str) -> None:
    for coefs in (None, Coefs.FRACTIONAL):
        with pytest.raises(ValueError, match=words):
            write(Image.new("RGB", (4, 2)), np.empty(shape, np.float32), coefs)


def test_write_refuses_what_the_dtype_cannot_hold() -> None:
    image, array = Image.new("RGB", (4, 2)), np.empty((2, 4, 3), np.uint8)
    with pytest.raises(TypeError, match=r"coefs give fractions.*uint8"):
        hi.write_hwc(image, array, Coefs.FRACTIONAL)
    with pytest.raises(TypeError, match=r"float32 may not fit.*uint8"):
        hi.write_hwc(np.zeros((2, 4, 3), np.float32), array)
    with pytest.raises(TypeError, match=r"uint16 may not fit.*uint8"):
        hi.write_hwc(np.zeros((2, 4, 3), np.uint16), array)
    with pytest.raises(TypeError, match=r"numpy\.ndarray"):
        hi.write_hwc(image, [[0]], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coefs are for 4 channels"):
        hi.write_hwc(image, np.empty((2, 4, 3), np.float32), Coefs.IMAGENET_SRGB_ALPHA)


@pytest.mark.parametrize("copy", [False, True])
def test_from_srgb_gives_the_written_image_back(copy: bool, rng: np.random.Generator) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        for name in ALL_COEFS:
            check_from_srgb(copy, dtype, name, rng)


def check_from_srgb(copy: bool, dtype: Any, name: str, rng: np.random.Generator) -> None:
    coefs, reference = ALL_COEFS[name]
    pixels = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    array = reference(pixels).astype(dtype)
    before = array.copy()
    image = hi.from_srgb_hwc(array, coefs, copy=copy)
    assert image.mode == "RGB"
    assert_close(image, pixels, 0 if dtype != np.float16 else 1)
    if copy:
        assert (array == before).all()


def test_from_srgb_takes_read_only_and_strided_arrays_and_lists() -> None:
    array = np.full((4, 6, 3), 0.2, np.float32)
    array.flags.writeable = False
    assert hi.from_srgb_hwc(array, Coefs.FRACTIONAL).getpixel((0, 0)) == (51, 51, 51)
    strided = np.full((4, 6, 6), 0.2, np.float32)[:, ::2, ::2]
    assert hi.from_srgb_hwc(strided, Coefs.FRACTIONAL).getpixel((2, 3)) == (51, 51, 51)
    assert hi.from_srgb_hwc([[0.2, 1.0]], Coefs.FRACTIONAL).getpixel((1, 0)) == 255


@pytest.mark.parametrize(
    ("shape", "mode", "result"),
    [
        ((2, 4), None, "L"),
        ((2, 4, 1), None, "L"),
        ((2, 4, 2), None, "LA"),
        ((2, 4, 3), None, "RGB"),
        ((2, 4, 4), None, "RGBA"),
        ((2, 4, 4), "RGBa", "RGBa"),
        ((2, 4, 3), "YCbCr", "YCbCr"),
    ],
)
def test_from_srgb_infers_or_takes_the_mode(shape: Any, mode: Any, result: str) -> None:
    image = hi.from_srgb_hwc(np.ones(shape), Coefs.FRACTIONAL, mode=mode)
    assert image.mode == result
    assert image.size == (4, 2)
    assert set(image.tobytes()) == {255}


def test_from_srgb_clips_and_warns_of_nan() -> None:
    array = np.array([[[0.5, np.nan, 2.0], [-1.0, np.inf, 0.1]]], np.float32)
    with pytest.warns(RuntimeWarning, match="NaN"):
        image = hi.from_srgb_hwc(array, Coefs.FRACTIONAL)
    assert np.asarray(image).tolist() == [[[128, 0, 255], [0, 255, 26]]]


def test_from_srgb_refuses_other_shapes_and_modes() -> None:
    for shape in ((3,), (2, 4, 5), (1, 2, 4, 3), (2, 4, 0)):
        with pytest.raises(ValueError, match="image must have shape"):
            hi.from_srgb_hwc(np.ones(shape), Coefs.FRACTIONAL)
    for mode in ("RGBA", "I;16", "F"):
        with pytest.raises(ValueError, match="channels"):
            hi.from_srgb_hwc(np.ones((2, 4, 3)), Coefs.FRACTIONAL, mode=mode)


# --- In place ----------------------------------------------------------------------------------

CONVERSIONS = {
    "hwc": (hi.convert_srgb_to_oklab_frac_hwc, hi.convert_oklab_to_srgb_frac_hwc),
    "chw": (hi.convert_srgb_to_oklab_frac_chw, hi.convert_oklab_to_srgb_frac_chw),
}

PUBLISHED = {
    (1.0, 1.0, 1.0): (1.0, 0.0, 0.0),
    (1.0, 0.0, 0.0): (0.62796, 0.22486, 0.12585),
    (0.0, 1.0, 0.0): (0.86644, -0.23389, 0.17950),
    (0.0, 0.0, 1.0): (0.45201, -0.03246, -0.31153),
    (0.0, 0.0, 0.0): (0.0, 0.0, 0.0),
}


def oklab_reference(srgb: np.ndarray) -> np.ndarray:
    """The published algorithm written out for one colour after the other, in double precision."""
    result = []
    for colour in srgb.reshape(-1, 3).astype(np.float64):
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
        l_ = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
        m_ = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
        s_ = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
        result.append(
            (
                0.2104542553 * l_ + 0.7936177850 * m_ - 0.0040720468 * s_,
                1.9779984951 * l_ - 2.4285922050 * m_ + 0.4505937099 * s_,
                0.0259040371 * l_ + 0.7827717662 * m_ - 0.8086757660 * s_,
            )
        )
    return np.array(result).reshape(srgb.shape)


@pytest.mark.parametrize("order", ["hwc", "chw"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_oklab_has_the_published_values(order: str, dtype: Any) -> None:
    srgb = np.array([list(PUBLISHED)], dtype)
    array = srgb if order == "hwc" else np.ascontiguousarray(srgb.transpose(2, 0, 1))
    CONVERSIONS[order][0](array)
    result = array if order == "hwc" else array.transpose(1, 2, 0)
    # The published values have five decimals.
    atol = 1e-3 if dtype == np.float16 else 6e-6
    np.testing.assert_allclose(result[0], list(PUBLISHED.values()), atol=atol)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_oklab_is_right_to_1e_6_everywhere(dtype: Any, rng: np.random.Generator) -> None:
    steps = np.linspace(0, 1, 12)
    grid = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
    grey = np.repeat(np.linspace(0, 1, 256)[np.newaxis, :, np.newaxis], 3, axis=-1)
    dark = rng.random((1, 500, 3)) ** 6
    srgb = np.concatenate([grid, grey, dark], axis=1).astype(dtype)
    result = srgb.copy()
    hi.convert_srgb_to_oklab_frac_hwc(result)
    atol = 1e-6 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(result, oklab_reference(srgb), atol=atol, rtol=0)


@pytest.mark.parametrize("order", ["hwc", "chw"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_oklab_takes_any_batch_and_strides_and_leaves_alpha(
    order: str, contiguous: bool, rng: np.random.Generator
) -> None:
    for channels in (3, 4):
        for leading in ((), (1,), (2, 3), (0,)):
            check_oklab_in_place(order, channels, leading, contiguous, rng)


def check_oklab_in_place(
    order: str, channels: int, leading: Any, contiguous: bool, rng: np.random.Generator
) -> None:
    srgb = rng.random((*leading, 70, 130, channels)).astype(np.float32)  # more than one chunk
    axis = -1 if order == "hwc" else -3
    array = np.moveaxis(srgb, -1, axis)
    if contiguous:
        array = array.copy("C")
    else:
        store = np.zeros((*array.shape[:-1], array.shape[-1] * 2), np.float32)
        store[..., ::2] = array
        array = store[..., ::-1][..., 1::2][..., ::-1]  # every other value, negative stride undone
    assert not array.size or array.flags.c_contiguous == contiguous
    forward, back = CONVERSIONS[order]
    forward(array)
    result = np.moveaxis(array, axis, -1)
    if srgb.size:
        sample = np.s_[..., ::13, ::17, :3]
        np.testing.assert_allclose(result[sample], oklab_reference(srgb[sample]), atol=1e-6)
    assert (result[..., 3:] == srgb[..., 3:]).all()
    back(array)
    np.testing.assert_allclose(np.moveaxis(array, axis, -1), srgb, atol=2e-5)
    if not contiguous:
        assert (store[..., 1::2] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "atol"), [("float16", 2e-2), ("float32", 2e-5), ("float64", 1e-12), ("bfloat16", 0.2)]
)
def test_oklab_round_trip_also_beyond_the_gamut(
    dtype: str, atol: float, rng: np.random.Generator
) -> None:
    np_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    srgb = (rng.random((40, 40, 3)) * 1.2 - 0.1).astype(np_dtype)
    array = srgb.copy()
    hi.convert_srgb_to_oklab_frac_hwc(array)
    hi.convert_oklab_to_srgb_frac_hwc(array)
    difference = np.abs(array.astype(np.float64) - srgb.astype(np.float64))
    assert np.quantile(difference, 0.99) <= atol
    assert np.isfinite(array.astype(np.float64)).all()


def test_oklab_keeps_nan_to_its_pixel_without_a_warning() -> None:
    array = np.full((1, 3, 3), 0.5, np.float32)
    array[0, 1, 0] = np.nan
    hi.convert_srgb_to_oklab_frac_hwc(array)
    assert np.isnan(array[0, 1]).all()
    assert np.isfinite(array[0, [0, 2]]).all()


@pytest.mark.parametrize("order", ["hwc", "chw"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_balanced_and_back_leave_alpha(order: str, dtype: str, rng: np.random.Generator) -> None:
    for channels in (1, 2, 3, 4):
        check_balanced(order, channels, dtype, rng)


def check_balanced(order: str, channels: int, dtype: str, rng: np.random.Generator) -> None:
    np_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    frac = rng.random((2, 5, 7, channels)).astype(np_dtype)
    axis = -1 if order == "hwc" else -3
    array = np.moveaxis(frac, -1, axis).copy("C")
    getattr(hi, f"convert_frac_to_balanced_{order}")(array, 2.0)
    colours = channels - (channels in (2, 4))
    result = np.moveaxis(array, axis, -1).astype(np.float64)
    atol = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
    exact = frac.astype(np.float64)
    np.testing.assert_allclose(result[..., :colours], exact[..., :colours] * 4 - 2, atol=atol)
    assert (result[..., colours:] == exact[..., colours:]).all()
    getattr(hi, f"convert_balanced_to_frac_{order}")(array, 2.0)
    np.testing.assert_allclose(np.moveaxis(array, axis, -1).astype(np.float64), exact, atol=atol)


ALL_CONVERSIONS = [getattr(hi, name) for name in hi.__all__ if name.startswith("convert_")]


def test_in_place_conversions_refuse_what_they_cannot_change() -> None:
    for function in ALL_CONVERSIONS:
        check_refusals(function)


def check_refusals(function: Any) -> None:
    with pytest.raises(TypeError, match="floating dtype, not uint8"):
        function(np.zeros((3, 3, 3), np.uint8))
    with pytest.raises(TypeError, match="not list"):
        function([[[0.0]]])
    with pytest.raises(ValueError, match=r"not \(3, 3\)"):
        function(np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"not \(5, 5, 5\)"):
        function(np.zeros((5, 5, 5)))
    frozen = np.zeros((3, 3, 3))
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        function(frozen)
