"""Elements of TensorFlow pipelines, in programs that run under ``jit``.

Needs TensorFlow (``pip install 'hydrax[tensorflow]'``, the build without GPU support). A pipeline
is an object of this process and cannot be taken along into another one, neither by pickling nor
by a fork, so a thread of this process reads it; TensorFlow does its own work in threads that need
no GIL.

Importing this module hides all GPUs from TensorFlow in this process, as it would take their memory
from JAX. Import it before TensorFlow makes its first tensor or data set.
"""
# Draws out of passes over the elements are left to _passes.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "hydrax.data.tensorflow_loader needs TensorFlow; install hydrax[tensorflow]"
    ) from error

from hydrax._arguments import check_int
from hydrax.data._draws import Chain, random_chain
from hydrax.data._host import SourceDataLoader
from hydrax.data._loaders import array_struct
from hydrax.data._passes import PassDraws
from hydrax.data._source import DrawSource

__all__ = ["TensorflowDataLoader"]

# What is brought over from TensorFlow at once.
_CHUNK_NBYTES = 2**22
_CHUNK_ELEMENTS = 64

with contextlib.suppress(RuntimeError):  # too late; the loader says so where it matters
    tf.config.set_visible_devices([], "GPU")


class TensorflowDataLoader(SourceDataLoader):
    """Loads elements of a ``tf.data.Dataset``.

    An observation is an element: a dictionary, tuple or other structure of tensors that have the
    same shape and dtype in all elements. A thread reads ahead of the draws.

    Ordered chains give the elements as they come. Random chains shuffle each pass over them with a
    buffer of ``shuffle_cache`` elements, as ``Dataset.shuffle`` does; their only option is
    ``seed``. A draw is the same whenever it is asked for, if all passes over the pipeline give the
    same elements: leave shuffling to this class. A draw that lies before those that were made last
    is found by a new pass, a draw far ahead by reading up to it.

    Args:
        pipeline: The data set, finite.
        mini_batch_size: ``mb_size`` of chains that are registered without one.
        shuffle_cache: Elements in the buffer of random chains; 1 leaves their order as it is.
        exclude_keys: Keys of elements that are left out; elements have to be dictionaries.

    Raises:
        RuntimeError: TensorFlow has GPUs in use, and so memory of theirs.
        TypeError: ``pipeline`` is no data set, or a tensor holds no numbers.
        ValueError: The pipeline is empty or endless, a shape is not known, a key to leave out is
            not there, or all of them are left out.

    Example:
        >>> import tensorflow as tf
        >>> pipeline = tf.data.Dataset.range(10).map(lambda x: {"x": x, "id": tf.as_string(x)})
        >>> loader = TensorflowDataLoader(pipeline, exclude_keys=["id"])
        >>> chain = loader.register_ordered_pipeline(cache_size=1, mb_size=4)
        >>> loader.get_batches(chain)[0]["x"].tolist()
        [[0, 1, 2, 3]]
    """

    def __init__(
        self,
        pipeline: tf.data.Dataset,
        mini_batch_size: int | None = None,
        shuffle_cache: int = 100,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pipeline, tf.data.Dataset):
            raise TypeError(f"pipeline is {type(pipeline).__name__}, expected a tf.data.Dataset")
        if tf.config.get_visible_devices("GPU"):
            raise RuntimeError(
                "TensorFlow uses the GPUs and takes their memory from JAX; import "
                "hydrax.data.tensorflow_loader before the pipeline is made, or install "
                "tensorflow-cpu"
            )
        self._shuffle_cache = check_int("shuffle_cache", shuffle_cache, minimum=1)
        if exclude_keys:
            pipeline = _without_keys(pipeline, list(exclude_keys))
        self._structs = jax.tree.map(_struct_of, pipeline.element_spec)
        self._count = _count_elements(pipeline)
        self._mini_batch_size = mini_batch_size
        if mini_batch_size is not None:
            check_int("mini_batch_size", mini_batch_size, minimum=1, maximum=self._count)
        self._chunks = _in_chunks(pipeline, self._structs)

    @property
    def static_information(self) -> dict[str, Any]:
        """``"observation_count"``: the number of elements."""
        return {"observation_count": self._count}

    @property
    def _format(self) -> Any:
        return self._structs

    def register_random_pipeline(
        self, cache_size: int = 1, mb_size: int | None = None, **kwargs: Any
    ) -> int:
        """Begin a chain of random mini-batches.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch; None takes ``mini_batch_size``.
            **kwargs: ``seed``: of the random order, an int; the id of the chain if it is left out,
                one from the operating system for None.

        Returns:
            The id of the chain.

        Raises:
            TypeError: Another option is given.
            ValueError: A size or the seed is out of range.
        """
        return super().register_random_pipeline(
            cache_size, self._mini_batch_size if mb_size is None else mb_size, **kwargs
        )

    def register_ordered_pipeline(
        self, cache_size: int = 1, mb_size: int | None = None, **kwargs: Any
    ) -> int:
        """Begin a chain of mini-batches in the order of the pipeline.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch; None takes ``mini_batch_size``.
            **kwargs: Ignored.

        Returns:
            The id of the chain.

        Raises:
            ValueError: A size is out of range.
        """
        return super().register_ordered_pipeline(
            cache_size, self._mini_batch_size if mb_size is None else mb_size, **kwargs
        )

    def _random_chain(self, *, seed: int | None = None, **kwargs: Any) -> Chain:
        if kwargs:
            raise TypeError(
                f"{', '.join(kwargs)}: a TensorflowDataLoader shuffles with a buffer "
                "(shuffle_cache); its chains have no option but seed"
            )
        return random_chain(seed=seed)

    def _source(self, mb_size: int) -> DrawSource:
        return _PipelineSource(
            self._chunks, jax.tree.leaves(self._structs), self._count, mb_size, self._shuffle_cache
        )


def _without_keys(pipeline: tf.data.Dataset, keys: list[str]) -> tf.data.Dataset:
    spec = pipeline.element_spec
    if not isinstance(spec, dict):
        raise TypeError(
            f"exclude_keys needs elements that are dictionaries, these are {type(spec).__name__}"
        )
    missing = [key for key in keys if key not in spec]
    if missing:
        raise ValueError(f"exclude_keys: the elements have no {missing}, only {sorted(spec)}")
    if not spec.keys() - set(keys):
        raise ValueError("exclude_keys leaves nothing of the elements of the pipeline")
    return pipeline.map(lambda element: {k: v for k, v in element.items() if k not in keys})


def _struct_of(spec: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(spec, tf.TensorSpec) or spec.dtype.name in ("string", "variant", "resource"):
        raise TypeError(
            f"an element of the pipeline holds {spec}, which cannot be an array of JAX; leave it "
            "out with exclude_keys, or map it to numbers"
        )
    if not spec.shape.is_fully_defined():
        raise ValueError(
            f"an element of the pipeline holds {spec}, whose shape is not known; make all shapes "
            "equal, and say so with tf.ensure_shape or an output_signature"
        )
    return array_struct(tuple(spec.shape), spec.dtype.as_numpy_dtype)


def _count_elements(pipeline: tf.data.Dataset) -> int:
    count = int(pipeline.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError("the pipeline is endless; leave out repeat(), or end it with take()")
    if count == tf.data.UNKNOWN_CARDINALITY:
        # tf.data.experimental.assert_cardinality spares the pass.
        count = int(pipeline.reduce(np.int64(0), lambda count, _: count + 1))
    if not count:
        raise ValueError("the pipeline has no elements")
    return count


def _in_chunks(pipeline: tf.data.Dataset, structs: Any) -> tf.data.Dataset:
    nbytes = sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(structs)
    )
    size = max(1, min(_CHUNK_ELEMENTS, _CHUNK_NBYTES // max(nbytes, 1)))
    options = tf.data.Options()
    options.deterministic = True
    return pipeline.batch(size).prefetch(1).with_options(options)


class _PipelineSource(DrawSource):
    """Draws out of passes over a pipeline, for a thread of the main process."""

    runs_in_main = True

    def __init__(
        self,
        chunks: tf.data.Dataset,
        structs: Sequence[jax.ShapeDtypeStruct],
        element_count: int,
        mb_size: int,
        shuffle_cache: int,
    ) -> None:
        self._chunks = chunks
        self._structs = structs
        self._draws = PassDraws(self._start_pass, element_count, mb_size, shuffle_cache)
        # The thread of an engine that was given up may still be loading when the next one starts.
        self._lock = threading.Lock()

    @property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [(struct.shape, np.dtype(struct.dtype)) for struct in self._structs]

    def load(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        flat = [array.reshape(mask.size, *array.shape[2:]) for array in arrays]
        with self._lock:
            self._draws.load(chain, first, flat, mask.reshape(-1))

    def close(self) -> None:
        with self._lock:
            self._draws.clear()

    def _start_pass(self) -> Iterator[list[NDArray[Any]]]:
        return (jax.tree.leaves(chunk) for chunk in self._chunks.as_numpy_iterator())
