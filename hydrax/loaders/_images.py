"""Folders of images, one folder for each class."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

try:
    from PIL import Image
except ImportError as error:
    raise ImportError("ImageFolder needs Pillow; install hydrax[image]") from error

from hydrax import image as hydrax_image
from hydrax._arguments import check_int, check_path
from hydrax.loaders._base import ReadyLoader

__all__ = ["ImageFolder"]

_EXTENSIONS = frozenset(
    (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


class ImageFolder(ReadyLoader):
    """Images in a folder for each class: ``image`` of one size, and ``label``.

    Images are opened with :func:`hydrax.image.open_srgb`, so profiles, orientation and 16-bit
    samples are honoured. The whole middle of the image, in the proportions of ``size``, is scaled
    to it. The descriptors are the files' paths below ``root``.

    Args:
        root: Folder with a folder for each class, in which images may lie at any depth.
        size: Height and width, or one number for both.
        augment: Whether training images are mirrored at random, and a random part is taken in the
            place of the middle: a quarter of the area or more, stretched by a third at most. It
            follows from the item's seed. Validation images are not augmented.
        mode: Pillow mode: ``"RGB"``, ``"RGBA"`` or ``"L"``.
        coefs: Representation, such as ``hydrax.image.Coefs.FRACTIONAL``; None gives bytes.
        dtype: Dtype of the images in the batch; None is uint8, or float32 with ``coefs``.
        classes: Names of the classes in the order of their labels, for instance those of the
            training images; None is all folders in alphabetical order.

    Attributes:
        classes: Names of the classes; ``label`` is the position in it.
        paths: Paths below ``root``, class by class in alphabetical order.

    Raises:
        TypeError: ``dtype`` cannot hold what ``coefs`` give.
        ValueError: There are no classes, a class without images, or one that is not expected. Or
            ``coefs`` are for another number of channels.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("cat", "dog"):
        ...     path = pathlib.Path(folder.name, name)
        ...     path.mkdir()
        ...     Image.new("RGB", (20, 10)).save(path / "0.png")
        >>> loader = ImageFolder(folder.name, 8)
        >>> loader.classes, loader.paths, loader.group(2).loader_layouts["image"].shape
        (('cat', 'dog'), ['cat/0.png', 'dog/0.png'], (2, 8, 8, 3))
        >>> folder.cleanup()
    """

    is_batched: ClassVar[bool] = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: int | tuple[int, int],
        *,
        augment: bool = False,
        mode: str = "RGB",
        coefs: hydrax_image.Coefs | None = None,
        dtype: npt.DTypeLike | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        if mode not in ("L", "RGB", "RGBA"):
            raise ValueError(f"mode is {mode!r}; expected 'L', 'RGB' or 'RGBA'")
        self._root = os.path.abspath(check_path("root", root))
        sides = size if isinstance(size, (tuple, list)) else (size, size)
        if len(sides) != 2:
            raise ValueError(f"size is {size!r}; expected (height, width), or one number for both")
        height, width = sides
        self._height = check_int("the height of size", height, minimum=1)
        self._width = check_int("the width of size", width, minimum=1)
        self._augment = bool(augment)
        self._mode = mode
        self._coefs = coefs
        if isinstance(classes, str) or (classes is not None and len(set(classes)) < len(classes)):
            raise ValueError(f"classes is {classes!r:.80}; expected names, each once")
        found = _find(self._root)
        self.classes = tuple(found if classes is None else classes)
        for name in found:
            if name not in self.classes:
                raise ValueError(f"the class {name!r} in {self._root} is none of classes")
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self.paths = [path for paths in found.values() for path in paths]
        if dtype is None:
            dtype = np.uint8 if coefs is None else np.float32
        shape = (self._height, self._width, Image.getmodebands(mode))
        # Whether coefs, mode and dtype go together is said here rather than by a loader process.
        dtype = np.dtype(dtype)
        hydrax_image.write_hwc(Image.new(mode, (1, 1)), np.empty((1, 1, shape[2]), dtype), coefs)
        self.loader_arrays = {
            "image": (shape, dtype, dtype),
            "label": ((), np.int32, np.int32),
        }

    def __len__(self) -> int:
        return len(self.paths)

    def _data(self) -> Sequence[str]:
        return self.paths

    def __call__(self, path: str, arrays: Any, seed: int | None) -> None:
        """Load an image; see :class:`~hydrax.Dataloader`."""
        image = hydrax_image.open_srgb(os.path.join(self._root, path), mode=self._mode)
        rng = random.Random(seed) if self._augment and seed is not None else None
        box = self._middle(image.size) if rng is None else self._part(image.size, rng)
        image = image.resize((self._width, self._height), Image.Resampling.BILINEAR, box=box)
        if rng is not None and rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        hydrax_image.write_hwc(image, arrays["image"], self._coefs)
        arrays["label"][...] = self._labels[path.partition("/")[0]]

    def _middle(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """The largest middle part in the proportions of the array: left, upper, right, lower."""
        width, height = size
        scale = min(width / self._width, height / self._height)
        part = self._width * scale, self._height * scale
        left, upper = (width - part[0]) / 2, (height - part[1]) / 2
        return left, upper, min(left + part[0], width), min(upper + part[1], height)

    def _part(self, size: tuple[int, int], rng: random.Random) -> tuple[float, float, float, float]:
        """A random part of an image: left, upper, right, lower."""
        width, height = size
        ratio = self._width / self._height * math.exp(rng.uniform(-1, 1) * math.log(4 / 3))
        # The largest part of this ratio, then some of its area.
        part_width = min(width, height * ratio)
        part_height = part_width / ratio
        share = math.sqrt(rng.uniform(0.25, 1.0))
        part_width, part_height = max(part_width * share, 1.0), max(part_height * share, 1.0)
        left = rng.random() * max(width - part_width, 0.0)
        upper = rng.random() * max(height - part_height, 0.0)
        return left, upper, min(left + part_width, width), min(upper + part_height, height)


def _find(root: str) -> dict[str, list[str]]:
    """Class name to the paths of its images below root, all in alphabetical order."""
    found: dict[str, list[str]] = {}
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    for name in names:
        if name.startswith("."):
            continue
        paths = [
            os.path.relpath(os.path.join(folder, file), root)
            for folder, _, files in os.walk(os.path.join(root, name), followlinks=True)
            for file in files
            if os.path.splitext(file)[1].lower() in _EXTENSIONS and not file.startswith(".")
        ]
        if not paths:
            raise ValueError(f"the folder {name!r} in {root} holds no images")
        found[name] = sorted(paths)
    if not found:
        raise ValueError(f"{root} holds no folders; expected one for each class")
    return found
