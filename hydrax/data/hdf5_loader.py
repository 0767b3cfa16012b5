"""Observations from HDF5 files, in programs that run under ``jit``.

Needs h5py (``pip install 'hydrax[hdf5]'``). Files of any program can be read, among them those in
which ``jax_sgmc`` collects the samples of a chain.
"""
# Which leaf lies where is found here; _hdf5 reads, _draws says what.

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

try:
    import h5py as _h5py
except ImportError as error:
    raise ImportError("hydrax.data.hdf5_loader needs h5py; install hydrax[hdf5]") from error

from hydrax._arguments import check_path
from hydrax.data._draws import Chain, Selections
from hydrax.data._hdf5 import NameTree, RowReader, find_data_sets
from hydrax.data._host import SourceDataLoader
from hydrax.data._loaders import array_struct
from hydrax.data._source import DrawSource

__all__ = ["HDF5Loader"]

_COLLECTED = re.compile(r"(^|/)chain~\d+(/|$)")


class HDF5Loader(SourceDataLoader):
    """Loads observations from data sets of an HDF5 file.

    An observation is a row of each data set below ``subdir``. The loader processes open the file
    themselves, and read of each draw first what comes first in the file. Making the loader reads
    descriptions only: neither the size of the file nor its number of rows matters.

    Chains are registered as for :class:`~hydrax.data.numpy_loader.NumpyDataLoader`, with the same
    options, and select the same rows.

    Args:
        file: Path of the file.
        subdir: The group below which the data sets are, or one data set.
        sample: Pytree of which only the structure counts; an observation gets the same. Without
            it, observations are nested dictionaries like the groups, or a single array.

            Keys of dictionaries and names of fields are the names of groups and data sets, element
            ``i`` of a list or tuple is named ``list_element_i``. What else is in the file is left
            out.

            Below a group ``chain~N`` of ``jax_sgmc``'s collector, however, the names lie: it gives
            the leaves, in the order of the pytree, to the names in their sorted order, so that
            element 2 of a list of 12 lies under ``list_element_10``. There, all data sets
            are handed back to the leaves in just that way, and their numbers have to be equal.

    Raises:
        FileNotFoundError: There is no such file.
        KeyError: The file lacks the group or a data set that ``sample`` asks for.
        TypeError: ``file`` is no path, or a data set holds no numbers.
        ValueError: There are no data sets or no rows, the numbers of rows differ, or ``sample``
            has no leaves or not as many as were collected.

    Example:
        >>> import h5py, tempfile
        >>> path = tempfile.mkdtemp() + "/measured.h5"
        >>> with h5py.File(path, "w") as file:
        ...     file["run/x"] = np.arange(12.0).reshape(6, 2)
        ...     file["run/y"] = np.arange(6)
        >>> loader = HDF5Loader(path, subdir="/run")
        >>> chain = loader.register_ordered_pipeline(cache_size=1, mb_size=2)
        >>> batch, mask = loader.get_batches(chain)
        >>> batch["x"].tolist(), batch["y"].tolist()
        ([[[0.0, 1.0], [2.0, 3.0]]], [[0, 1]])
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        subdir: str = "/chain~0/variables/",
        sample: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(file, _h5py.File):
            raise TypeError(
                "file is an open h5py.File, expected its path: loader processes cannot share it"
            )
        path = os.path.abspath(check_path("file", file))
        found = find_data_sets(path, subdir)
        self._treedef, names = _assign(path, subdir, found, sample)
        self._reader = RowReader(path, names)

    @property
    def static_information(self) -> dict[str, Any]:
        """``"observation_count"``: the number of rows."""
        return {"observation_count": self._reader.row_count}

    @property
    def _format(self) -> Any:
        leaves = [array_struct(s.shape, s.dtype) for s in self._reader.specs]
        return jax.tree.unflatten(self._treedef, leaves)

    def _source(self, mb_size: int) -> DrawSource:
        return _HDF5Source(self._reader, mb_size)


def _assign(
    path: str, subdir: str, found: NameTree, sample: Any
) -> tuple[jax.tree_util.PyTreeDef, list[str]]:
    """Structure of an observation, and the data set of each leaf."""
    found_names, found_treedef = jax.tree.flatten(found)
    if sample is None:
        return found_treedef, found_names
    leaves, treedef = jax.tree_util.tree_flatten_with_path(sample)
    if not leaves:
        raise ValueError("sample has no leaves, expected one for each data set")
    if _COLLECTED.search(subdir):
        if len(leaves) != len(found_names):
            raise ValueError(
                f"sample has {len(leaves)} leaves, but {len(found_names)} were collected below "
                f"{subdir!r} of {path}: {', '.join(found_names)}"
            )
        return treedef, found_names  # both in the order in which the collector paired them
    root = "/" + subdir.strip("/")
    names = ["/".join([root.rstrip("/"), *map(_name_of, keys)]) or root for keys, _ in leaves]
    missing = sorted(set(names) - set(found_names))
    if missing:
        raise KeyError(
            f"{path} has no data set {', '.join(missing)}, which sample asks for; below "
            f"{subdir!r} there are {', '.join(found_names)}"
        )
    return treedef, names


def _name_of(key: Any) -> str:
    if isinstance(key, jax.tree_util.SequenceKey):
        return f"list_element_{key.idx}"
    if isinstance(key, jax.tree_util.GetAttrKey):
        return str(key.name)
    if isinstance(key, jax.tree_util.DictKey):
        return str(key.key)
    raise TypeError(f"sample has a node without names at {key}; use dictionaries, lists or fields")


class _HDF5Source(DrawSource):
    """Rows of the file, for loader processes that each open it."""

    worker_count = 2

    def __init__(self, reader: RowReader, mb_size: int) -> None:
        self._reader = reader.copy()
        self._selections = Selections(reader.row_count, mb_size)

    @property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [(spec.shape, spec.dtype) for spec in self._reader.specs]

    def start(self) -> None:
        self._reader.open()

    def close(self) -> None:
        self._reader.close()

    def load(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        rows, mask[...] = self._selections[chain].block(first, count)
        flat = [array.reshape(rows.size, *array.shape[2:]) for array in arrays]
        self._reader.read(rows.reshape(-1), flat)
