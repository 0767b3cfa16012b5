"""Progress bars for a :class:`~hydrax.Dataloader`, with `tqdm <https://tqdm.github.io>`_.

:func:`tbatches` is the usual way: it holds the loader's ``with`` block and shows how far training
and validation are. :class:`ProgressMonitor` shows the same bars for a loop that holds the block
itself. Both use the public API alone. The ``tqdm`` extra installs what they need.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

try:
    from tqdm.auto import tqdm as _bar_class
except ImportError as error:
    raise ImportError("hydrax.tqdm needs tqdm; install hydrax[tqdm]") from error

from hydrax import Batch, Dataloader, LoaderStats, TrainingBatch, ValidationBatch

__all__ = ["ProgressMonitor", "tbatches"]

D = TypeVar("D")

_logger = logging.getLogger(__name__)

_BEHIND_SHARE = 0.01
"""Waiting shorter than this share of the time is no matter for a report: every ``next`` waits a
few microseconds."""

_TRAINING_ONLY = ("desc", "initial", "leave", "position", "postfix", "total")
"""Options of the user that say something about the training bar, not about both."""


def tbatches(
    dataloader: Dataloader[D],
    report_interval: int = 0,
    description: str = "train",
    **tqdm_kwargs: Any,
) -> Generator[Batch[D], None, None]:
    """Iterate over the batches of a loader under progress bars.

    The ``with`` block of the loader is entered when the first batch is asked for, and left when the
    batches are used up, when the loop is left early, when it or the loader raises, and when the
    generator is closed. In between, nothing here refers to a batch that was handed out: once the
    loop lets go of it (``del batch``), its slot is free.

    Args:
        dataloader: The loader, not yet entered; must be ``deterministic``.
        report_interval: Every so many batches, say how long training waited for loading and why,
            and how many batches and items were left out, if there is something to say; 0 for never.
        description: Text before the training bar.
        **tqdm_kwargs: Further options of the bars, such as ``disable``, ``file`` or ``ncols``.

    Returns:
        A generator of the loader's batches.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The loader is not deterministic, or ``report_interval`` is negative.

    Example:
        >>> import hydrax, numpy as np
        >>> def load(number, arrays, seed):
        ...     arrays["x"][...] = number
        >>> group = hydrax.DataGroup(2, range(6), loader_arrays={"x": ((), np.int32, np.int32)})
        >>> loader = hydrax.Dataloader(load, group, loader_count=0, end_at=("epoch", 1))
        >>> for batch in tbatches(loader, disable=True):
        ...     print(batch.arrays["x"])
        ...     del batch
        [0 1]
        [2 3]
        [4 5]
    """
    # Checked here and not in the generator, which would do so only at the first batch.
    monitor = ProgressMonitor(dataloader, report_interval, description, **tqdm_kwargs)
    return _monitored(dataloader, monitor)


def _monitored(
    dataloader: Dataloader[D], monitor: ProgressMonitor[D]
) -> Generator[Batch[D], None, None]:
    with dataloader, monitor:
        for batch in dataloader:
            monitor.begin_batch(batch)
            # While suspended, a local variable would hold the batch and so its slot: the batch
            # leaves through a list that is empty by then.
            is_training = batch.is_training
            outgoing = [batch]
            del batch
            yield outgoing.pop()
            monitor._end(is_training)


class ProgressMonitor(Generic[D]):
    """Progress bars for a loop that holds the loader's ``with`` block itself.

    The training bar goes from ``first_batch`` to ``last_batch``, endless where that is None. A bar
    for each validation run comes up below it and is taken away afterwards. A batch that was dropped
    because its loader failed counts as done.

    Nothing here refers to a batch between :meth:`begin_batch` and :meth:`end_batch`.

    Args:
        dataloader: The loader; must be ``deterministic``.
        report_interval: As in :func:`tbatches`.
        description: Text before the training bar.
        **tqdm_kwargs: Further options of the bars.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The loader is not deterministic, or ``report_interval`` is negative.

    Example:
        >>> import hydrax, numpy as np
        >>> def load(number, arrays, seed):
        ...     arrays["x"][...] = number
        >>> group = hydrax.DataGroup(2, range(4), loader_arrays={"x": ((), np.int32, np.int32)})
        >>> loader = hydrax.Dataloader(load, group, loader_count=0, end_at=("epoch", 1))
        >>> with loader, ProgressMonitor(loader, disable=True) as monitor:
        ...     for batch in loader:
        ...         monitor.begin_batch(batch)
        ...         print(batch.arrays["x"])
        ...         monitor.end_batch(batch)
        ...         del batch
        [0 1]
        [2 3]
    """

    def __init__(
        self,
        dataloader: Dataloader[D],
        report_interval: int = 0,
        description: str = "train",
        **tqdm_kwargs: Any,
    ) -> None:
        if not isinstance(dataloader, Dataloader):
            raise TypeError(
                f"dataloader is {type(dataloader).__name__}, expected hydrax.Dataloader"
            )
        if not dataloader.deterministic:
            raise ValueError(
                "progress bars need batches in order; make the Dataloader with deterministic=True"
            )
        if not isinstance(report_interval, int) or isinstance(report_interval, bool):
            raise TypeError(f"report_interval is {report_interval!r}, expected an int")
        if report_interval < 0:
            raise ValueError(f"report_interval is {report_interval}, expected 0 or more")
        self._dataloader = dataloader
        self._report_interval = report_interval
        self._training_options = {
            "total": dataloader.last_batch,
            "initial": dataloader.first_batch,
            "desc": description,
            "unit": "batch",
            "dynamic_ncols": "ncols" not in tqdm_kwargs,
            **tqdm_kwargs,
        }
        self._validation_options = {
            "unit": "batch",
            "dynamic_ncols": "ncols" not in tqdm_kwargs,
            **{name: value for name, value in tqdm_kwargs.items() if name not in _TRAINING_ONLY},
            "total": dataloader.batches_per_validation,
            "desc": "validate",
            "leave": False,
            "position": (tqdm_kwargs.get("position") or 0) + 1,
        }
        self._training_bar: Any = None
        self._validation_bar: Any = None
        self._validation_epoch: int | None = None
        self._next_training = dataloader.first_batch
        self._next_validation = 0
        self._dropped_count = 0
        self._seen_count = 0
        self._reported: LoaderStats | None = None

    def __repr__(self) -> str:
        total = self._training_options["total"]
        return f"ProgressMonitor(batch {self._next_training} of {'∞' if total is None else total})"

    def __enter__(self) -> ProgressMonitor[D]:
        """Show the training bar; :meth:`close` follows at the end of the block."""
        self._open_training_bar()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def begin_batch(self, batch: Batch[D]) -> None:
        """Tell that work on a batch begins.

        Args:
            batch: The batch that came; not kept.
        """
        self._open_training_bar()
        if isinstance(batch, ValidationBatch):
            self._begin_validation(batch.validation_epoch, batch.validation_epoch_batch)
        elif isinstance(batch, TrainingBatch):
            self._finish_validation()
            self._skip(self._training_bar, batch.batch_num - self._next_training)
            self._next_training = batch.batch_num + 1
        else:
            raise TypeError(f"batch is {type(batch).__name__}, expected a batch of the Dataloader")
        if self._report_interval and self._reported is None:
            # The wait for the first batch is the start of the workers, not a loader too slow.
            self._reported = self._dataloader.stats()

    def end_batch(self, batch: Batch[D]) -> None:
        """Tell that work on a batch is done.

        Args:
            batch: The batch that :meth:`begin_batch` was given; not kept.
        """
        self._end(batch.is_training)

    def close(self) -> None:
        """Take the bars away; they stay on the screen as they are. May be called again."""
        self._close_validation_bar()
        if self._training_bar is not None:
            self._training_bar.close()

    def _end(self, is_training: bool) -> None:
        bar = self._training_bar if is_training else self._validation_bar
        if bar is not None:
            bar.update()
        self._seen_count += 1
        if self._report_interval and self._seen_count % self._report_interval == 0:
            self._report()

    def _open_training_bar(self) -> None:
        if self._training_bar is None:
            self._training_bar = _bar_class(**self._training_options)

    def _begin_validation(self, run: int, position: int) -> None:
        if run != self._validation_epoch:
            self._finish_validation()
            self._validation_epoch = run
            self._next_validation = 0
        if self._validation_bar is None:
            self._validation_bar = _bar_class(**self._validation_options)
        self._skip(self._validation_bar, position - self._next_validation)
        self._next_validation = position + 1

    def _finish_validation(self) -> None:
        """Close the bar of a run that is over, after counting the batches that it never showed."""
        if self._validation_bar is not None:
            missing = self._dataloader.batches_per_validation - self._next_validation
            self._skip(self._validation_bar, missing)
            self._close_validation_bar()

    def _close_validation_bar(self) -> None:
        if self._validation_bar is not None:
            self._validation_bar.close()
            self._validation_bar = None

    def _skip(self, bar: Any, count: int) -> None:
        """Count batches that never came, because their loader failed."""
        if count > 0:
            self._dropped_count += count
            bar.update(count)

    def _report(self) -> None:
        """Say how far loading runs behind, if it does, and how much was left out."""
        stats = self._dataloader.stats()
        interval = stats if self._reported is None else stats.since(self._reported)
        self._reported = stats
        idle_s, elapsed_s = interval.idle_sec, interval.elapsed_sec
        findings = []
        if idle_s >= _BEHIND_SHARE * elapsed_s:
            findings.append(
                f"training waited for loading {idle_s:.2f} s of the last {elapsed_s:.2f} s "
                f"({idle_s / elapsed_s:.0%}, {idle_s / self._report_interval * 1e3:.2f} ms a batch)"
            )
            findings.append(interval.verdict)
        if self._dropped_count:
            findings.append(f"batches dropped: {self._dropped_count}")
            self._dropped_count = 0
        if interval.items_skipped:
            findings.append(f"items skipped: {interval.items_skipped}")
        if not findings:
            return
        text = f"batch {self._next_training}: {'; '.join(findings)}"
        _logger.info("%s", text)
        if not self._training_bar.disable:
            # Written past the bars, so that they stay whole.
            file = self._training_options.get("file") or sys.stderr
            _bar_class.write(text, file=file)
