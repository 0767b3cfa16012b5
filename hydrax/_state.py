"""Where a run stands, as something that can be written down and read again.

Pure: a state is a position of the schedule, and the facts that make the schedule what it is, so
that a state of another run is refused by name rather than followed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from hydrax._datagroup import DataGroup
from hydrax._schedule import Position, Schedule
from hydrax.errors import StateError

__all__ = ["make_state", "read_state", "schedule_facts"]

_VERSION = 1


def schedule_facts(
    training: Sequence[DataGroup[Any]], validation: Sequence[DataGroup[Any]], schedule: Schedule
) -> dict[str, Any]:
    """What decides which batch comes where, as JSON values under names for messages."""
    facts: dict[str, Any] = {}
    for kind, groups in (("training", training), ("validation", validation)):
        facts[f"number of {kind} groups"] = len(groups)
        for index, group in enumerate(groups):
            of = f"of {kind} group {index}"
            facts[f"item count {of}"] = len(group)
            facts[f"batch_size {of}"] = group.batch_size
            facts[f"seed {of}"] = group.seed
            facts[f"shuffle_first {of}"] = group.shuffle_first
            facts[f"shuffle_later {of}"] = group.shuffle_later
            facts[f"remainder {of}"] = group.remainder
            facts[f"data {of}"] = _sample(group)
    facts.update(schedule.facts())
    return facts


def _sample(group: DataGroup[Any]) -> int | None:
    """A number that tells data sets apart by some of their descriptors; None if it cannot."""
    count = len(group)
    digest = 0
    try:
        for index in sorted({0, count // 3, count // 2, count - 1}):
            digest = zlib.crc32(_plain_text(group.data[index]).encode(), digest)
    except Exception:  # of any kind that a data set may raise; such descriptors tell nothing
        return None
    return digest


def _plain_text(descriptor: Any) -> str:
    """A descriptor's text, for kinds of which it is the same in every process and version."""
    if isinstance(descriptor, np.generic):
        descriptor = descriptor.item()
    if isinstance(descriptor, os.PathLike):
        descriptor = os.fspath(descriptor)
    if isinstance(descriptor, (tuple, list)):
        return "(" + ",".join(map(_plain_text, descriptor)) + ")"
    if descriptor is None or isinstance(descriptor, (bool, int, float, str, bytes)):
        return repr(descriptor)
    raise TypeError


def make_state(position: Position, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A position as JSON values."""
    return {
        "hydrax_state_version": _VERSION,
        "training_batches": position.training,
        "validation_batches": position.validation,
        "facts": dict(facts),
    }


def read_state(state: Any, facts: Mapping[str, Any]) -> Position:
    """The position in a state that belongs to these facts.

    Raises:
        StateError: It is no state, one of another version, or one of another run.
    """
    if not isinstance(state, Mapping) or "hydrax_state_version" not in state:
        raise StateError("this is not what Dataloader.get_state() returns")
    if state["hydrax_state_version"] != _VERSION:
        raise StateError(
            f"the state has version {state['hydrax_state_version']!r}; this Hydrax reads version "
            f"{_VERSION}"
        )
    then = state.get("facts")
    if not isinstance(then, Mapping):
        raise StateError("the state lacks what it says about the data; it is damaged")
    differences = [
        f"{name} was {then.get(name)!r} and is {facts.get(name)!r}"
        for name in {**facts, **then}
        if then.get(name) != facts.get(name)
    ]
    if differences:
        raise StateError("the state is of another run: " + "; ".join(differences))
    training, validation = state.get("training_batches"), state.get("validation_batches")
    if not _is_count(training) or not (validation is None or _is_count(validation)):
        raise StateError("the state holds no position; it is damaged")
    return Position(training, validation)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
