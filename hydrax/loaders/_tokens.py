"""Tokens of text: windows of one length, and rows of several short sequences."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hydrax import _core
from hydrax._arguments import check_int
from hydrax._buckets import PackPlan, TooLong, pack_sequences
from hydrax.loaders._arrays import gather
from hydrax.loaders._base import ReadyLoader, Source, check_rows

__all__ = ["PackedTokenLoader", "TokenLoader"]


class TokenLoader(ReadyLoader):
    """Windows of a long row of tokens: ``tokens`` and, moved on by one, ``targets``.

    Args:
        tokens: One-dimensional array of integers, mostly a memory map.
        length: Tokens per window.
        windows: ``"packed"``: window i begins at token ``i * length``, so that an epoch holds each
            token once. ``"random"``: as many windows, which begin anywhere, as the items' seeds
            say; for validation they are packed.
        targets: Whether there is an array ``targets``: for each token the one that follows.
        dtype: Dtype of the windows in the batch; None is that of ``tokens``. Where it cannot hold
            all that ``tokens`` can, values are checked.

    Raises:
        TypeError: ``tokens`` is not what it should be.
        ValueError: It holds not even one window.

    Example:
        >>> from hydrax import Dataloader
        >>> loader = TokenLoader(np.arange(9, dtype=np.uint16), 4)
        >>> with Dataloader(loader, loader.group(2)) as dataloader:
        ...     batch = next(dataloader).copy()
        >>> batch.arrays["tokens"].tolist(), batch.arrays["targets"].tolist()
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]])
    """

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        length: int,
        *,
        windows: Literal["packed", "random"] = "packed",
        targets: bool = True,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        if windows not in ("packed", "random"):
            raise ValueError(f"windows is {windows!r}; expected 'packed' or 'random'")
        self._tokens = Source(_check_tokens(tokens))
        self._length = check_int("length", length, minimum=1)
        self._is_random = windows == "random"
        # Array name to where its windows begin, relative to those of the tokens.
        self._shifts = {"tokens": 0, "targets": 1} if targets else {"tokens": 0}
        self._room = len(tokens) - bool(targets)
        if self._room < self._length:
            raise ValueError(
                f"{len(tokens)} tokens hold no window of {length}"
                + (" and the token that follows" if targets else "")
            )
        spec = ((self._length,), *_dtypes(tokens.dtype, dtype))
        self.loader_arrays = dict.fromkeys(self._shifts, spec)
        # Packed windows are the rows of a matrix.
        stop = len(self) * self._length
        self._packed = {
            name: Source(tokens[shift : shift + stop].reshape(-1, self._length))
            for name, shift in self._shifts.items()
        }

    def __len__(self) -> int:
        return self._room // self._length

    def __call__(self, indices: Any, arrays: Any, seeds: Any) -> None:
        """Load windows; see :class:`~hydrax.Dataloader`."""
        indices = np.asarray(indices)
        check_rows(indices, len(self))
        if self._is_random and seeds is not None:
            count = self._room - self._length + 1
            starts = [
                _core.mix(seed, index) % count
                for seed, index in zip(seeds, indices.tolist(), strict=True)
            ]
            for name, shift in self._shifts.items():
                for target, start in zip(arrays[name], starts, strict=True):
                    first = start + shift
                    target[:] = self._tokens.array[first : first + self._length]
            return
        for name, windows in self._packed.items():
            gather(windows.array, indices, arrays[name])


class PackedTokenLoader(ReadyLoader):
    """Rows of several short sequences, each whole, one behind the other.

    The arrays are ``tokens``, ``segment_ids`` (the number of the sequence within the row, from 1;
    0 where there is none) and ``positions`` (of the token within its sequence), all of shape
    ``(max_length,)`` and zero behind the last sequence.

    Args:
        tokens: The tokens of all sequences, one behind the other; mostly a memory map.
        starts: Where each sequence begins, and at the end where the last one ends: one number more
            than there are sequences, ascending.
        max_length: Tokens per row.
        keep_order: Whether sequences stay in order; see :func:`~hydrax.pack_sequences`.
        too_long: What becomes of sequences longer than a row: ``"error"``, ``"drop"`` or
            ``"truncate"``.
        dtype: Dtype of the tokens in the batch; None is that of ``tokens``.

    Attributes:
        plan: Which sequences go into which row, a :class:`~hydrax.PackPlan`.

    Raises:
        ValueError: A sequence is longer than a row; names it. Or ``starts`` is not as it should be.

    Example:
        >>> from hydrax import Dataloader
        >>> loader = PackedTokenLoader(np.array([7, 8, 9, 4, 5]), [0, 3, 5], 6)
        >>> with Dataloader(loader, loader.group(1)) as dataloader:
        ...     batch = next(dataloader).copy()
        >>> for name in ("tokens", "segment_ids", "positions"):
        ...     print(batch.arrays[name].tolist())
        [[7, 8, 9, 4, 5, 0]]
        [[1, 1, 1, 2, 2, 0]]
        [[0, 1, 2, 0, 1, 0]]
    """

    plan: PackPlan

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        starts: npt.ArrayLike,
        max_length: int,
        *,
        keep_order: bool = False,
        too_long: TooLong = "error",
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        self._source = Source(_check_tokens(tokens))
        edges = np.asarray(starts)
        if edges.ndim != 1 or edges.dtype.kind not in "iu" or len(edges) < 2:
            raise ValueError("starts is no row of at least two integers")
        self._starts = edges.astype(np.int64)
        lengths = np.diff(self._starts)
        if self._starts[0] < 0 or self._starts[-1] > len(tokens) or (lengths < 0).any():
            raise ValueError(f"starts does not ascend from 0 to at most {len(tokens)} (tokens)")
        self.plan = pack_sequences(lengths, max_length, keep_order=keep_order, too_long=too_long)
        shape = (self.plan.max_length,)
        self.loader_arrays = {
            "tokens": (shape, *_dtypes(tokens.dtype, dtype)),
            "segment_ids": (shape, np.int32, np.int32),
            "positions": (shape, np.int32, np.int32),
        }

    def __len__(self) -> int:
        return len(self.plan)

    def __call__(self, indices: Any, arrays: Any, seeds: Any) -> None:
        """Load rows; see :class:`~hydrax.Dataloader`."""
        for array in arrays.values():
            array[...] = 0
        tokens, segment_ids, positions = (
            arrays[name] for name in ("tokens", "segment_ids", "positions")
        )
        counting = np.arange(self.plan.max_length, dtype=np.int32)
        for row, index in enumerate(indices):
            end = 0
            for segment, sequence in enumerate(self.plan[int(index)].tolist(), 1):
                start, length = int(self._starts[sequence]), int(self.plan.lengths[sequence])
                place = slice(end, end + length)
                tokens[row, place] = self._source.array[start : start + length]
                segment_ids[row, place] = segment
                positions[row, place] = counting[:length]
                end += length


def _check_tokens(tokens: Any) -> npt.NDArray[Any]:
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind = (
            f"an array of {tokens.dtype} of shape {tokens.shape}"
            if isinstance(tokens, np.ndarray)
            else type(tokens).__name__
        )
        raise TypeError(f"tokens is {kind}; expected a one-dimensional array of integers")
    return tokens


def _dtypes(source: np.dtype[Any], wanted: npt.DTypeLike | None) -> tuple[Any, Any]:
    """The dtype to fill, and the one that JAX is to get."""
    native = source.newbyteorder("=")
    jax_dtype = native if wanted is None else np.dtype(wanted)
    # Hydrax checks the values that it converts, an assignment would not.
    return (jax_dtype if np.can_cast(native, jax_dtype) else native), jax_dtype
