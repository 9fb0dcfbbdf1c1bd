"""Plain `torch.autocast` does the same with preamp's rules in the dispatcher as without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import preamp
from preamp.autocast import REGISTRY
from preamp.autocast._held import overload_of
from preamp.errors import PolicyError
from preamp.rules import OpRules, native_category
from preamp.tree import tensors

from ..rows import check_rows
from .calls import CALLS, NO_CALL, Maker

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
FP32 = torch.float32


def overridden() -> set[str]:
    names = {name for name, category in OpRules().ruled() if category != (native_category(name, "cpu") or "as-is")}
    names.add("linalg_vecdot")  # low in torch, too, where each term is rounded
    return {name for name in names if overload_of(name) is not None}


def outcome(name: str, dtypes: tuple[torch.dtype, ...], region: Any) -> list[Tensor] | type[Exception]:
    args, kwargs = CALLS[name](Maker(*dtypes))
    with region:
        try:
            found = tensors(overload_of(name)(*args, **kwargs))
            return [t for t in found if t.is_floating_point()]  # the others are indices, seeds and scratch memory
        except (RuntimeError, ValueError) as error:
            return type(error)


def same(a: list[Tensor] | type[Exception], b: list[Tensor] | type[Exception]) -> bool:
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)
    )


def near(a: list[Tensor] | type[Exception], b: list[Tensor] | type[Exception], low: torch.dtype) -> bool:
    """The same but for roundings: how a CPU multiplies 16-bit tensors differs between CPUs."""
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    return len(a) == len(b) and all(
        x.dtype is low and torch.allclose(x.float(), y.float(), rtol=0.02, atol=0.02)
        for x, y in zip(a, b, strict=True)
        if x.numel() or y.numel()
    )


def enter_a_region(dtype: torch.dtype) -> None:
    with preamp.autocast("cpu", dtype=dtype):
        assert torch.ones(2, dtype=dtype).exp().dtype is FP32  # the rules are in


def test_the_table_of_calls_is_complete() -> None:
    assert overridden() == set(CALLS) | set(NO_CALL)
    assert not set(CALLS) & set(NO_CALL)


@pytest.mark.parametrize("low", LOW.values(), ids=LOW)
def test_plain_autocast_keeps_its_own_rules(low: torch.dtype) -> None:
    every = ((FP32,), (low,), (FP32, low), (low, FP32), (torch.float64,))

    def outcomes() -> dict[Any, Any]:
        return {
            (name, dtypes, enabled): outcome(name, dtypes, torch.autocast("cpu", dtype=low, enabled=enabled))
            for name in CALLS
            for dtypes in every
            for enabled in (True, False)
        }

    before = outcomes()
    work = {name for (name, *_), result in before.items() if isinstance(result, list)}
    assert work == set(CALLS), "a call in the table never works"
    enter_a_region(low)
    after = outcomes()
    different = [key for key in before if not same(before[key], after[key])]
    assert not different, [(key, before[key], after[key]) for key in different]


@pytest.mark.parametrize("low", LOW.values(), ids=LOW)
def test_preamps_regions_follow_the_table(low: torch.dtype) -> None:
    every = itertools.product(CALLS, ((FP32,), (low,), (FP32, low), (low, FP32)))
    check_rows(every, lambda name, dtypes: follows_the_table(name, dtypes, low))


def follows_the_table(name: str, dtypes: tuple[torch.dtype, ...], low: torch.dtype) -> None:
    category = OpRules().category(name)
    ours = outcome(name, dtypes, preamp.autocast("cpu", dtype=low))
    if category == "banned":
        assert (ours is RuntimeError) == (low in dtypes)
        return
    if category == "as-is":
        assert same(ours, outcome(name, dtypes, torch.autocast("cpu", enabled=False))) or name == "avg_pool3d"
        return
    keeps = name.partition(".")[0].endswith("_") or name.startswith("embedding_bag")
    widest = dtypes[0] if keeps else FP32 if FP32 in dtypes else low
    run_in = {"low": (low,), "full": (FP32,), "promote": (widest,)}[category or ""]
    if len(dtypes) == 2 and category == "promote" and len(list(tensors(CALLS[name](Maker(FP32))))) < 2:
        return
    by_hand = outcome(name, run_in, torch.autocast("cpu", enabled=False))
    multiplies = category == "low" or name in ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")
    assert near(ours, by_hand, run_in[0]) if multiplies else same(ours, by_hand), (ours, by_hand)


@pytest.mark.parametrize("low", LOW.values(), ids=LOW)
def test_plain_autocast_inside_a_preamp_region_follows_the_region(low: torch.dtype) -> None:
    """Library code that opens torch's region inside ours does not undo the rules of the user."""
    x = torch.randn(3, 4).to(low)
    with preamp.autocast("cpu", dtype=low):
        with torch.autocast("cpu", enabled=False):
            assert x.softmax(-1).dtype is low
        assert x.softmax(-1).dtype is FP32
    with torch.autocast("cpu", dtype=low):
        assert x.softmax(-1).dtype is low
        with preamp.autocast("cpu", dtype=low):
            assert x.softmax(-1).dtype is FP32
        assert x.softmax(-1).dtype is low


def dumps() -> dict[str, str]:
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in itertools.chain(CALLS, NO_CALL)}


def without_registration_numbers(dump: str) -> list[str]:
    """A dump's kernels; the fallthrough of a taken-out kernel and its boxing are not promised by torch."""
    return sorted(line for line in dump.splitlines() if "AutocastCPU" in line)


def test_nothing_is_installed_before_the_first_region_and_uninstall_restores_all() -> None:
    before = dumps()
    region = preamp.autocast("cpu", dtype=torch.bfloat16)
    assert dumps() == before
    assert REGISTRY.rules is None
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    with region:
        during = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    assert set(during) > set(registered)
    assert {name.removeprefix("aten::") for name in set(during) - set(registered)} <= overridden()
    preamp.autocast.uninstall()
    assert torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU") == registered
    after = dumps()
    for name in before:
        assert without_registration_numbers(before[name]) == without_registration_numbers(after[name]), name
    preamp.autocast.uninstall()  # twice does no harm


def _session(**changes: Any) -> preamp.Session:
    model = torch.nn.Linear(2, 2)
    return preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O4", **changes)


def test_an_open_session_keeps_its_rules() -> None:
    low_softmax = OpRules().with_low("softmax")
    with _session(ops=low_softmax) as session:
        with pytest.raises(PolicyError, match="close them first"):
            preamp.autocast.uninstall()
        with pytest.raises(PolicyError, match=r"op softmax.int -> low.*asked for: the default"):
            preamp.autocast("cpu", dtype=torch.bfloat16, rules=OpRules()).__enter__()
        assert not torch.is_autocast_enabled("cpu")
        with pytest.raises(PolicyError, match="Close that session first"):
            _session()
        with preamp.autocast("cpu", dtype=torch.bfloat16):  # no rules asked for: the session's
            assert torch.randn(3, 4).softmax(-1).dtype is torch.bfloat16
        with session.autocast():
            assert torch.randn(3, 4).softmax(-1).dtype is torch.bfloat16
        with _session(ops=low_softmax):  # equal rules may share
            pass
        with pytest.raises(PolicyError, match="1 open session"):
            preamp.autocast.uninstall()
    preamp.autocast.uninstall()
