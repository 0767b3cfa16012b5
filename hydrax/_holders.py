"""Who holds the memory of batches: variables, containers and frames, by their names.

From the arrays that lie in an arena the search goes up, from an object to what refers to it, until
it comes to something with a name. Each step looks at every object of the heap, so steps are counted
and timed. What is found is told as text; nothing is kept alive by it.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import operator
import os
import sys
import time
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from hydrax import _core
from hydrax._batch import Batch

__all__ = ["Holders", "describe_holders"]

# A step is taken if it will probably end within this processor time, judging by the one before it,
# and the first one if there are not too many blocks of memory. Most programs need a tenth of it.
_BUDGET_S = 1.0
_MAX_BLOCKS = 40_000_000
_MAX_STEPS = 10
# Objects whose referrers are looked for in one step, which takes longer for more.
_MAX_OBJECTS = 8
# What is told of: holders of one object, objects, frames, and elements of a container.
_MAX_PATHS = 3
_MAX_LINES = 8
_MAX_FRAMES = 200
_MAX_ELEMENTS = 64

# Frames of these are there whenever a search is made.
_OWN_FILES = frozenset(
    os.path.join(os.path.dirname(__file__), name)
    for name in ("_holders.py", "_references.py", "_waiting.py", "_flow.py", "_dataloader.py")
)
_SIZED = (list, tuple, set, frozenset, dict, deque)
_ITERATORS = (enumerate, zip, map, filter)
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# Since 3.13 f_locals shows the locals of a frame where they are. Before that it copies them into a
# dict that the frame keeps.
_IS_COPIED = sys.version_info < (3, 13)
_REFERENCES_TO_COPY = 3  # of the frame, a variable, and the call that counts them


_NOT_FOUND = "something that was not found in time, or is outside of Python"


class Holders(NamedTuple):
    """What holds batches.

    Attributes:
        lines: It as text; [] if nothing does.
        is_pending: Whether it is JAX alone, with work that it has not finished.
    """

    lines: list[str]
    is_pending: bool = False


def describe_holders(arenas: Iterable[_core.Arena], batches: Iterable[Any] = ()) -> Holders:
    """What holds the leased slots of some arenas, and some further batches.

    Whatever the objects do when they are looked at, it does not raise.

    Example:
        >>> describe_holders([]).lines
        []
    """
    try:
        return _describe(list(arenas), list(batches))
    except Exception as error:
        return Holders([f"  what it is could not be found out ({type(error).__name__})"])


class _Link(NamedTuple):
    """That something refers to an object.

    Attributes:
        text: As what it does; "" goes without saying.
        owner: id() of what refers to it, where the way goes on; None where it ends.
    """

    text: str
    owner: int | None


class _Path(NamedTuple):
    """A way from an array up to a name.

    Attributes:
        batch: Text for the batch that it goes through, or "".
        text: The rest of the way.
        is_whole: Whether it has come to a name.
    """

    batch: str
    text: str
    is_whole: bool


class _Memory(NamedTuple):
    """Where the slots of an arena lie in this process."""

    start: int
    stop: int
    slot_nbytes: int

    def slot_of(self, address: int) -> int | None:
        if not self.start <= address < self.stop:
            return None
        return (address - self.start) // self.slot_nbytes


def _describe(arenas: list[_core.Arena], batches: list[Any]) -> Holders:
    lines = []
    is_pending = True
    for arena in arenas:
        holders = _describe_arena(arena)
        lines += holders.lines
        is_pending &= holders.is_pending
    rest = [batch for batch in batches if not _is_told(batch, arenas)]
    if rest:
        search = _Search(rest, ())
        search.run({id(batches), id(rest)})
        lines += _tell([(repr(batch), search.paths(id(batch))) for batch in rest])
    return Holders(lines, is_pending and bool(lines) and not rest)


def _memory_of(arena: _core.Arena) -> _Memory:
    address = arena.address
    return _Memory(address, address + memoryview(arena).nbytes, arena.slot_nbytes)


def _is_told(batch: Any, arenas: list[_core.Arena]) -> bool:
    """Whether an array of a batch lies in an arena, so that the batch has been found from there."""
    memories = [_memory_of(arena) for arena in arenas]
    return any(
        memory.slot_of(address) is not None
        for array in batch.arrays.values()
        for address in _addresses(array)
        for memory in memories
    )


def _describe_arena(arena: _core.Arena) -> Holders:
    states = arena.slot_states()
    leased = {slot for slot, state in enumerate(states) if state == _core.SLOT_LEASED}
    if not leased:
        return Holders([])
    memory = _memory_of(arena)
    arrays, slots, pending_count = _live_arrays(memory)
    search = _Search(arrays, [memory])
    search.run({id(arrays)})
    found = []
    for array, slot in zip(arrays, slots, strict=True):
        paths = search.paths(id(array))
        views = search.views.get(slot, [])
        if views and not any(path.is_whole for path in paths):
            paths = views
        found.append((f"array {array.dtype.name}{list(array.shape)} in slot {slot}", paths))
    rest = sorted(leased.difference(slots))
    found += [(f"slot {slot}", search.views[slot]) for slot in rest if slot in search.views]
    lines = _tell(found)
    rest = [slot for slot in rest if slot not in search.views]
    if rest:
        some = ", ".join(map(str, rest[:_MAX_LINES])) + (", ..." if len(rest) > _MAX_LINES else "")
        lines.append(f"  slot {some}:" if len(rest) == 1 else f"  slots {some}:")
        lines.append(
            "    computations or transfers that JAX has not finished; arrays that are not ready: "
            f"{pending_count}"
            if pending_count
            else "    a view of the memory, or a computation of JAX"
        )
    return Holders(lines, not found and pending_count > 0)


def _addresses(array: Any) -> list[int]:
    """Where an array lies, or its shards do; [] where that cannot be said."""
    try:
        return [array.unsafe_buffer_pointer()]
    except Exception:  # deleted, on a device without addresses, or sharded
        pass
    try:
        return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    except Exception:
        return []


def _live_arrays(memory: _Memory) -> tuple[list[Any], list[int], int]:
    """The jax.Arrays in an arena, the slot of each, and how many of all are not ready."""
    arrays: list[Any] = []
    slots: list[int] = []
    shards: set[int] = set()
    pending_count = 0
    jax: Any = sys.modules.get("jax")
    for array in reversed(list(jax.live_arrays()) if jax is not None else []):
        for address in _addresses(array):
            slot = memory.slot_of(address)
            if slot is not None:
                arrays.append(array)
                slots.append(slot)
                # An uncommitted array that was looked at holds an array for its only shard.
                shards.update(id(s.data) for s in array.addressable_shards if s.data is not array)
                break
        else:
            try:
                pending_count += not array.is_ready()
            except Exception:  # deleted
                continue
    own = [index for index, array in enumerate(arrays) if id(array) not in shards]
    return [arrays[index] for index in own], [slots[index] for index in own], pending_count


def _tell(found: Sequence[tuple[str, list[_Path]]]) -> list[str]:
    """Lines for objects and the ways to them; what is held in the same way is told of once."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for text, paths in found:
        # Of a batch the batch is told, not each of its arrays.
        by_batch: dict[str, list[str]] = {} if paths else {text: [_NOT_FOUND]}
        for path in paths:
            by_batch.setdefault(path.batch or text, []).append(path.text)
        for name, texts in by_batch.items():
            names = groups.setdefault(tuple(dict.fromkeys(texts)), [])
            if name not in names:
                names.append(name)
    lines = []
    for ways, names in list(groups.items())[:_MAX_LINES]:
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{more}:")
        lines += [f"    {way}" for way in ways]
    if len(groups) > _MAX_LINES:
        lines.append(f"  and {len(groups) - _MAX_LINES} more")
    return lines


class _Search:
    """Looks for the names by which some objects are held.

    Args:
        objects: What to look for; those beyond the first few are not looked for.
        memories: Where NumPy views are looked for, too.

    Attributes:
        views: The NumPy views that were found, by their slots.
    """

    def __init__(self, objects: Sequence[Any], memories: Sequence[_Memory]) -> None:
        self._frontier = list(objects[:_MAX_OBJECTS])
        self._known: dict[int, Any] = {id(obj): obj for obj in self._frontier}
        self._links: dict[int, list[_Link]] = {}
        self._memories = memories
        self.views: dict[int, list[_Path]] = {}

    def run(self, ignored: set[int]) -> None:
        """Search; what has an id() that is ignored does not count as a referrer."""
        deadline_s = time.thread_time() + _BUDGET_S
        took_s = 0.0 if sys.getallocatedblocks() < _MAX_BLOCKS else _BUDGET_S
        for _ in range(_MAX_STEPS):
            start_s = time.thread_time()
            if not self._frontier or start_s + took_s >= deadline_s:
                break
            self._step(tuple(self._frontier), ignored)
            took_s = time.thread_time() - start_s
        for frame in _running_frames():
            self._look_into(frame)
        for module in list(sys.modules.values()):
            self._look_into_module(module)
        # The texts are what is left.
        self._batches = {key: repr(obj) for key, obj in self._known.items() if _is(obj, Batch)}
        self._known.clear()
        self._frontier.clear()

    def _step(self, frontier: tuple[Any, ...], ignored: set[int]) -> None:
        """From the objects found last to what refers to them."""
        ignored = {*ignored, id(self._frontier), id(self._known), id(frontier)}
        referrers = gc.get_referrers(*frontier)
        found: list[Any] = []
        for referrer in referrers:
            if id(referrer) in ignored:
                continue
            goes_on = False
            for obj in frontier:
                try:
                    link = _link(referrer, obj)
                except Exception:  # it may do anything when it is looked at
                    link = _Link(f"a {type(referrer).__name__}", None)
                if link is not None:
                    self._add(id(obj), link)
                    goes_on |= link.owner is not None
            if goes_on and id(referrer) not in self._known and len(found) < _MAX_OBJECTS:
                self._known[id(referrer)] = referrer
                found.append(referrer)
        self._frontier[:] = found

    def _add(self, key: int, link: _Link) -> None:
        links = self._links.setdefault(key, [])
        if link not in links:
            links.append(link)

    def _look_into(self, frame: types.FrameType) -> None:
        """The locals of a running function, which no object of the heap refers to."""
        for name, value in _locals_of(frame):
            slots = self._slots_of_views(value)
            if not slots and id(value) not in self._known:
                continue
            text = _variable(name, frame)
            if id(value) in self._known:
                self._add(id(value), _Link(text, None))
            for slot in slots:
                path = _Path("", f"a NumPy view of it, in {text}", True)
                if path not in self.views.setdefault(slot, []):
                    self.views[slot].append(path)

    def _look_into_module(self, module: types.ModuleType) -> None:
        """The globals of a module, which gc.freeze() takes away from the heap that is searched."""
        namespace = getattr(module, "__dict__", None)
        if type(namespace) is dict:
            for name, value in list(namespace.items()):
                if id(value) in self._known:
                    self._add(id(value), _Link(_global(name, namespace), None))

    def _slots_of_views(self, value: Any) -> set[int]:
        """The slots that a NumPy array, or those in a container, lie in."""
        elements: Iterable[Any] = ()
        if _is(value, np.ndarray):
            elements = (value,)
        elif type(value) in (list, tuple, deque):
            elements = itertools.islice(value, _MAX_ELEMENTS)
        elif type(value) is dict:
            elements = itertools.islice(value.values(), _MAX_ELEMENTS)
        slots: set[int | None] = set()
        for element in elements:
            if _is(element, np.ndarray):
                address = element.__array_interface__["data"][0]
                slots.update(memory.slot_of(address) for memory in self._memories)
        return {slot for slot in slots if slot is not None}

    def paths(self, key: int) -> list[_Path]:
        """Ways from an object to names, the shortest first; or as far as they are known."""
        rooted: list[_Path] = []
        others: list[_Path] = []
        seen = {key}
        queue: deque[tuple[int, str, tuple[str, ...]]] = deque([(key, "", ())])
        while queue and len(rooted) < _MAX_PATHS:
            at, batch, texts = queue.popleft()
            if at in self._batches:
                batch, texts = self._batches[at], ()
            links = self._links.get(at, ())
            for text, owner in links:
                way = (*texts, text) if text else texts
                if owner is None:
                    rooted.append(_Path(batch, _join(way), True))
                elif owner not in seen:
                    seen.add(owner)
                    queue.append((owner, batch, way))
            if not links and texts:
                others.append(_Path(batch, _join(texts), False))
        return rooted[:_MAX_PATHS] or others[:_MAX_PATHS]


def _is(obj: Any, types_: type | tuple[type, ...]) -> bool:
    """isinstance(), without asking the object for its class, which may run code of it."""
    return issubclass(type(obj), types_)


def _running_frames() -> list[types.FrameType]:
    """The frames of all threads, but for those of the search itself."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None and len(frames) < _MAX_FRAMES:
            if frame.f_code.co_filename not in _OWN_FILES:
                frames.append(frame)
            frame = frame.f_back
    # One of them was this function's own, which would go on to hold its callers.
    del frame
    return frames


def _variable(name: str, frame: types.FrameType) -> str:
    if frame.f_code.co_name == "<module>":
        return _global(name, frame.f_globals)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return f"variable {name!r} of {frame.f_code.co_qualname} ({place})"


def _global(name: str, namespace: Mapping[str, Any]) -> str:
    return f"global variable {name!r} of {namespace.get('__name__')}"


def _join(way: Sequence[str]) -> str:
    """The links of a way as one text."""
    parts: list[str] = []
    for text in way:
        if text.startswith(_ATTRIBUTES) and parts and parts[-1].endswith(_OF_DICT):
            # What is in the __dict__ of an object is an attribute.
            key = parts.pop()[1 : -len(_OF_DICT)]
            text = f"attribute {key} of {text.removeprefix(_ATTRIBUTES)}"
        elif text.startswith(_LAST_RESULT) and parts and parts[-1].startswith("a tuple"):
            parts.pop()
        parts.append(text)
    return ", in ".join(parts)


_OF_DICT = "] of a dict"
_ATTRIBUTES = "the attributes of "
_LAST_RESULT = "the last result of "


def _link(referrer: Any, obj: Any) -> _Link | None:
    """As what something that may refer to an object does so; None if it does not."""
    owner = id(referrer)
    if _is(referrer, _GENERATORS):
        frame: Any = getattr(referrer, "gi_frame", None) or getattr(referrer, "cr_frame", None)
        name = None if frame is None else _name_in(frame, obj)
        return None if name is None else _Link(f"generator: {_variable(name, frame)}", None)
    if type(referrer) is dict:
        if not _contains(referrer.values(), obj):
            return None
        key = next(key for key, value in referrer.items() if value is obj)
        if "__builtins__" in referrer and "__name__" in referrer:
            return _Link(_global(str(key), referrer), None)
        return _Link("" if _holds_arrays(referrer, obj) else f"[{_brief(key)}{_OF_DICT}", owner)
    if not _contains(gc.get_referents(referrer), obj):
        return None
    if _is(referrer, types.FrameType):
        # One that has ended: an error's traceback keeps it.
        return _Link(_variable(_name_in(referrer, obj) or "?", referrer), owner)
    if _is(referrer, _ITERATORS):
        return _Link(f"{_LAST_RESULT}{type(referrer).__name__}()", None)
    if _is(referrer, (types.TracebackType, types.MappingProxyType, memoryview, Batch)):
        return _Link("", owner)
    return _Link(_role(referrer, obj), owner)


def _contains(values: Iterable[Any], obj: Any) -> bool:
    """Whether an object is among values, of which there may be millions."""
    return any(map(operator.is_, values, itertools.repeat(obj)))


def _holds_arrays(container: dict[Any, Any], obj: Any) -> bool:
    """Whether a dict is, in all probability, that of a batch."""
    return hasattr(obj, "unsafe_buffer_pointer") and all(
        hasattr(value, "unsafe_buffer_pointer") for value in container.values()
    )


def _name_in(frame: types.FrameType, obj: Any) -> str | None:
    """The name that an object has in a frame that does not run."""
    return next((name for name, value in _locals_of(frame) if value is obj), None)


def _locals_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The names and values of a frame, which is left as it was."""
    is_copied = _IS_COPIED and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copied and frame.f_trace is not None:
        return []  # a debugger writes the copy back, which has to be left alone then
    values: Any = frame.f_locals
    items = list(values.items())
    if is_copied:
        # The copy must not keep what the variables let go of.
        if sys.getrefcount(values) <= _REFERENCES_TO_COPY:
            values.clear()
        else:  # the function has called locals()
            for name, value in items:
                if _is(value, Batch):
                    del values[name]
    return items


def _brief(key: Any) -> str:
    return repr(key)[:40] if isinstance(key, (str, int)) else f"a {type(key).__name__}"


def _role(referrer: Any, obj: Any) -> str:
    kind = type(referrer)
    if _is(referrer, BaseException):
        return f"the traceback of a {kind.__name__}"
    if _is(referrer, type):
        return f"{_ATTRIBUTES}class {referrer.__qualname__}"
    if _is(referrer, types.FunctionType):
        return f"function {referrer.__qualname__}"
    if _is(referrer, types.CellType):
        return "a closure"
    if kind.__name__ == "managedbuffer":
        return "a NumPy view of it"
    if kind in _SIZED:
        return f"a {kind.__name__} of {len(referrer)}"
    return f"{_attribute(referrer, obj)}a {kind.__qualname__}"


def _attribute(referrer: Any, obj: Any) -> str:
    """The attribute as which something holds an object, without running code of its class."""
    try:
        attributes = object.__getattribute__(referrer, "__dict__")
    except AttributeError:
        attributes = {}
    if attributes is obj:
        return _ATTRIBUTES
    for name, value in list(cast(dict[str, Any], attributes).items()):
        if value is obj:
            return f"attribute {name!r} of "
    for cls in type(referrer).__mro__:
        for name, member in list(vars(cls).items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    value = member.__get__(referrer)
                except AttributeError:
                    continue
                if value is obj:
                    return f"attribute {name!r} of "
    return ""
