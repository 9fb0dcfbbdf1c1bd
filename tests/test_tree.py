"""Tensors in nested inputs: containers keep their type, their attributes, and their identity when nothing changes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from preamp.tree import cast_floating, map_tensors, tensors

Pair = namedtuple("Pair", ["left", "right"])


class Batch(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Plain:
    x: Any
    label: str = "kept"
    made: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    x: Any
    label: str = "kept"


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any


class Listing(list):
    """A list whose constructor takes something else."""

    def __init__(self, items: Any, *, tag: str) -> None:
        super().__init__(items)
        self.tag = tag


class Row(tuple):
    """A tuple whose constructor takes something else."""

    def __new__(cls, first: Any, *rest: Any) -> Row:
        return super().__new__(cls, (first, *rest))


class Point(Pair):
    """A namedtuple with a constructor and an attribute of its own."""

    def __new__(cls, left: Any) -> Point:
        made = super().__new__(cls, left, "right")
        made.note = "kept"
        return made


class Tagged(dict):
    """A dict whose constructor takes something else."""

    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(**items)
        self.tag = tag


class TaggedOrdered(OrderedDict):
    def __init__(self, tag: str, items: Any = ()) -> None:
        super().__init__(items)
        self.tag = tag


class ReadOnly(Mapping):
    """A mapping without __setitem__."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Stubborn(ReadOnly):
    """And whose constructor takes something else."""

    def __init__(self, *pairs: tuple[str, Any]) -> None:
        super().__init__(dict(pairs))


class Wrapper(ReadOnly, MutableMapping):
    """A mutable mapping around a dict, of which a shallow copy shares that dict."""

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]


class FrozenDict(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("immutable")


class Upper(UserDict):
    """What tokenizers of model libraries return looks like this: items in .data, attributes beside it."""

    def __init__(self, items: Any = None, note: str = "") -> None:
        super().__init__(items)
        self.note = note


class Output(OrderedDict):
    """What model libraries return: items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Unknown:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


# -- any nesting

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
OTHERS = (torch.int8, torch.int64, torch.bool, torch.float64, torch.complex64, torch.uint8, torch.float8_e4m3fn)
MADE_TENSORS = st.sampled_from(FLOATS + OTHERS).map(lambda dtype: torch.ones(2).to(dtype))
LEAVES = st.one_of(
    MADE_TENSORS,
    MADE_TENSORS,
    st.sampled_from([None, 3, 2.5, "text", b"bytes", torch.float32, torch.Size([1, 2])]),
    st.just(0).map(lambda _: pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)),
)


def _defaultdict(items: dict[str, Any]) -> Any:
    return defaultdict(list, items)


def _noted_row(items: list[Any]) -> Row:
    row = Row(*items)
    row.note = "kept"  # type: ignore[attr-defined]
    return row


def _inner(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=3)
    keyed = st.dictionaries(st.sampled_from("abcde"), children, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(lambda items: Listing(items, tag="kept")),
        lists.filter(bool).map(_noted_row),
        keyed,
        keyed.map(lambda items: Tagged("kept", **items)),
        keyed.map(Output),
        keyed.map(OrderedDict),
        keyed.map(_defaultdict),
        keyed.map(MappingProxyType),
        keyed.map(ReadOnly),
        keyed.map(Wrapper),
        keyed.map(lambda items: Upper(items, note="kept")),
        keyed.map(FrozenDict),
        st.builds(Pair, children, children),
        children.map(Point),
        children.map(Batch),
        children.map(Plain),
        children.map(Frozen),
        children.map(Slots),
    )


TREES = st.recursive(LEAVES, _inner, max_leaves=12)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a tree, found in another way than the code under test finds them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, (Plain, Frozen, Slots)):
        return leaves(value.x)
    return []


def shape_of(value: Any) -> Any:
    """Types and keys of a tree, without its tensors."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, PackedSequence):
        return PackedSequence, *(indices.tolist() for indices in value[1:])
    beside = [getattr(value, name, None) for name in ("tag", "note", "default_factory")]
    if isinstance(value, Mapping):
        assert not isinstance(value, Output) or all(getattr(value, key) is item for key, item in value.items())
        return type(value), beside, [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), beside, [shape_of(item) for item in value]
    if isinstance(value, (Plain, Frozen)):
        return type(value), value.label, shape_of(value.x)
    if isinstance(value, Slots):
        return Slots, shape_of(value.x)
    return value


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_structure_and_types_are_preserved(tree: Any) -> None:
    before, shape = leaves(tree), shape_of(tree)
    kept = [t.clone() for t in before]
    changed = map_tensors(lambda t: t.clone(), tree)
    assert shape_of(changed) == shape
    assert len(leaves(changed)) == len(before)
    assert all(a is not b and torch.equal(a, b) for a, b in zip(leaves(changed), before, strict=True))
    # and nobody's batch was written into
    assert shape_of(tree) == shape
    assert all(a is b for a, b in zip(leaves(tree), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_identity_when_nothing_changes_and_every_tensor_is_found(tree: Any) -> None:
    assert map_tensors(lambda t: t, tree) is tree
    found = list(tensors(tree))
    assert len(found) == len(leaves(tree))
    assert all(a is b for a, b in zip(found, leaves(tree), strict=True))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(TREES, st.sampled_from(FLOATS))
def test_casting_changes_floats_and_leaves_the_rest(tree: Any, dtype: torch.dtype) -> None:
    changed = cast_floating(tree, dtype)
    assert shape_of(changed) == shape_of(tree)
    for new, old in zip(leaves(changed), leaves(tree), strict=True):
        if old.dtype in FLOATS:
            assert new.dtype is dtype and torch.equal(new, old.to(dtype))
        if old.dtype not in FLOATS or old.dtype is dtype:
            assert new is old
    assert (changed is tree) == all(t.dtype is dtype or t.dtype in OTHERS for t in leaves(tree))


# -- one by one


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floating({"x": [x]}, torch.bfloat16)["x"][0].sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


def test_an_ordered_dict_that_cannot_be_copied_becomes_a_plain_one() -> None:
    given_ = TaggedOrdered("tag", {"x": torch.ones(1)})
    made = map_tensors(double, given_)
    assert float(made["x"]) == 2 and float(given_["x"]) == 1
    assert isinstance(made, dict)


def test_a_mapping_that_nobody_can_rebuild_becomes_a_dict() -> None:
    made = map_tensors(double, Stubborn(("x", torch.ones(1)), ("y", 3)))
    assert type(made) is dict and float(made["x"]) == 2 and made["y"] == 3


def test_what_torch_functions_return() -> None:
    given_ = torch.max(torch.tensor([[1.0, 3.0]]), 1)
    made = cast_floating(given_, torch.float16)
    assert type(made) is type(given_)
    assert made.values.dtype is torch.float16 and made.indices is given_.indices
    size = torch.Size([2, 3])
    assert map_tensors(double, [size, torch.ones(1)])[0] is size


def test_a_field_that_the_constructor_does_not_take() -> None:
    plain = Plain(torch.ones(1))
    plain.made = [torch.ones(1)]
    assert float(map_tensors(double, plain).made[0]) == 2 and float(plain.made[0]) == 1
    assert map_tensors(double, Plain) is Plain  # the class itself is no container


def test_a_dataclass_with_a_field_that_is_not_set_yet() -> None:
    @dataclass
    class Lazy:
        x: Any
        cache: Any = field(init=False)

    lazy = Lazy(torch.ones(1))
    made = map_tensors(double, lazy)
    assert type(made) is Lazy and float(made.x) == 2 and not hasattr(made, "cache")
    assert len(list(tensors(lazy))) == 1


def test_what_is_no_container_passes_through() -> None:
    for thing in (Unknown(torch.ones(1)), {1, 2}, range(3), "text", None, iter([torch.ones(1)])):
        assert map_tensors(double, thing) is thing
