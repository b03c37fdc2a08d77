# SPDX-License-Identifier: Apache-2.0
"""Calls that an operation has seen before: what was checked and decided for their arguments holds again.

Two calls are alike if all but the tensors' contents and addresses is: dtypes, shapes, strides, devices, and the arguments
that are no tensors.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from kda.validation import checking, may_share_memory, refuse, span

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # calls are found without them, too, by a dict
    TensorGuards = None

MOST_SEEN, RECENT = 1024, 4  # of an operation: calls that are remembered, and those that are looked at first


class Seen:
    """Arguments of one operation but for the tensors' contents and addresses: what checks of them decided holds again.

    `launches` is for backends: what they prepared for such arguments.
    """

    __slots__ = ("alike", "checked", "extents", "launches", "layouts", "out")

    def __init__(self) -> None:
        self.checked, self.launches, self.layouts = False, {}, None
        self.extents: list[int] | None = None  # bytes from the first to the last one that each tensor can touch
        self.out = 0  # which of them is the output
        self.alike: Callable[..., bool] | None = None  # whether tensors are such ones

    def views(self, tensors: Sequence[Tensor | None], make: Callable[[], Sequence[Tensor | None]]) -> list[Tensor | None]:
        """`make()`, views of `tensors` one by one, which gives the same shapes and strides in every call."""
        if self.layouts is None:
            views = make()
            self.layouts = [None if x is None else (x.shape, x.stride()) for x in views]
            return views
        return [None if x is None else x.as_strided(*layout) for x, layout in zip(tensors, self.layouts)]


class Recent(NamedTuple):
    """A call that may come again: types of all arguments, and how to pick the tensors and the others from them."""

    types: list[type]
    tensors: Callable[[Sequence], Sequence[Tensor]]
    others: Callable[[Sequence], Sequence]
    values: Sequence  # of the others
    seen: Seen


class Known:
    """What one operation was called with."""

    def __init__(self) -> None:
        self.all: dict[tuple, Seen] = {}
        self.recent: list[Recent] = []

    def find(self, args: Sequence) -> tuple[Seen, Sequence[Tensor]]:
        """The entry of these arguments, and which of them are tensors."""
        types = [*map(type, args)]
        for of_types, pick, others, values, found in self.recent:
            if of_types == types and others(args) == values and found.alike(*(tensors := pick(args))):
                return found, tensors
        tensors = [x for x in args if isinstance(x, Tensor)]
        key = tuple([(x.dtype, x.shape, x.stride(), x.device) if isinstance(x, Tensor) else x for x in args])
        try:
            found = self.all.get(key)
        except TypeError:  # not hashable: an argument that no check will accept
            return Seen(), tensors
        if found is None:
            if len(self.all) >= MOST_SEEN:
                self.all.clear()
            found = self.all[key] = Seen()
        elif tensors and TensorGuards is not None:
            self._again(found, types, args, tensors)
        return found, tensors

    def _again(self, found: Seen, types: list[type], args: Sequence, tensors: Sequence[Tensor]) -> None:
        """Puts a call that came a second time among the recent ones.

        What torch.compile asks whether it may run again tells a dozen tensors apart in a fifth of the time. It asks for
        more, such as the kind of dispatch: where it says no the tensors may still be alike, and the last ones count.
        """
        if found.alike is None or not found.alike(*tensors):
            found.alike = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = _picks([n for n, x in enumerate(args) if not isinstance(x, Tensor)])
        new = Recent(types, _picks([n for n, x in enumerate(args) if isinstance(x, Tensor)]), others, others(args), found)
        self.recent = [new, *[x for x in self.recent if x.seen is not found][: RECENT - 1]]


def _picks(places: list[int]) -> Callable[[Sequence], Sequence]:
    return itemgetter(*places) if len(places) > 1 else lambda args: [args[n] for n in places]


_known: dict[object, Known] = {}


def forget() -> None:
    """As if nothing had been called: for whoever changes what calls decide."""
    _known.clear()


def find(what, args: Sequence) -> tuple[Seen, Sequence[Tensor]]:
    """The entry of these arguments of the operation `what`, and which are tensors.

    A new entry each time under `KDA_CHECK=1`, which looks at contents.
    """
    if checking():
        return Seen(), [x for x in args if isinstance(x, Tensor)]
    known = _known.get(what)
    if known is None:
        known = _known[what] = Known()
    return known.find(args)


def once(validate: Callable[..., None], given: dict) -> Seen:
    """Checks an operation's arguments by name, `validate(**given)`, unless arguments alike have passed that before.

    Whether `out` shares memory with another tensor is asked every time.
    """
    found, tensors = find(validate, [*given.values()])
    if not found.checked:
        validate(**given)
        found.checked = True
    if given.get("out") is not None:
        apart(found, tensors, given)
    return found


def apart(seen: Seen, tensors: Sequence[Tensor], given: dict) -> None:
    """`out` shares no memory with another one of the `tensors` among the arguments `given`; their addresses tell mostly."""
    out = given["out"]
    if seen.extents is None:
        seen.extents = [end - first for first, end in map(span, tensors)]
        seen.out = [name for name, x in given.items() if isinstance(x, Tensor)].index("out")
    begins, extents = [x.data_ptr() for x in tensors], seen.extents
    first = begins[seen.out]
    end = first + extents[seen.out]
    if sum([begin < end and first < begin + extent for begin, extent in zip(begins, extents)]) > 1:  # not `out` alone
        for name, x in given.items():
            if isinstance(x, Tensor) and name != "out" and may_share_memory(out, x):
                refuse("out", f"memory that `{name}` uses", "a buffer of its own")
