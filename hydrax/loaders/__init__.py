"""Loader functions ready made: arrays, tokens, folders of images, Parquet files.

An object of these classes is the loader function of a Dataloader, and makes the groups that go with
it::

    loader = ArrayLoader(image=images, label=labels)
    with Dataloader(loader, loader.group(64, shuffle_first=True)) as dataloader:
        ...

They are ordinary loader functions, short enough to start one's own from. None of them imports JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydrax.loaders._arrays import ArrayLoader
from hydrax.loaders._base import ReadyLoader
from hydrax.loaders._tokens import PackedTokenLoader, TokenLoader

if TYPE_CHECKING:
    from hydrax.loaders._images import ImageFolder
    from hydrax.loaders._parquet import ParquetLoader

__all__ = [
    "ArrayLoader",
    "ImageFolder",
    "PackedTokenLoader",
    "ParquetLoader",
    "ReadyLoader",
    "TokenLoader",
]


def __getattr__(name: str) -> Any:
    # These need Pillow and pyarrow.
    if name == "ImageFolder":
        from hydrax.loaders._images import ImageFolder

        return ImageFolder
    if name == "ParquetLoader":
        from hydrax.loaders._parquet import ParquetLoader

        return ParquetLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
