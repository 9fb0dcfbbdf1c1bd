"""What a region is: nesting, threads, decorators, exceptions, the cast cache, rules of one's own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.autocast import REGISTRY
from preamp.errors import PolicyError
from preamp.rules import OpRules

from ..releases import TORCH
from ..rows import over

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def region(dtype: torch.dtype = BF16, **changes: Any) -> preamp.autocast:
    return preamp.autocast("cpu", dtype=dtype, **changes)


def dtypes() -> tuple[torch.dtype, torch.dtype]:
    """Of a product, which is low in a region, and of a softmax of 16-bit values, which is float32 in preamp's."""
    return torch.ones(2, 2).mm(torch.ones(2, 2)).dtype, torch.ones(2, dtype=BF16).softmax(-1).dtype


INSIDE, OUTSIDE, PLAIN = (BF16, FP32), (FP32, BF16), (BF16, BF16)


def test_it_is_torchs() -> None:
    assert issubclass(preamp.autocast, torch.autocast)
    here = region()
    assert (here.device, here.fast_dtype) == ("cpu", BF16)
    with here as entered:
        assert entered is here
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is BF16
    with pytest.raises(ValueError):
        preamp.autocast(torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        preamp.autocast("toaster")
    with pytest.raises(TypeError, match="autocast decorates a function, and this is an int: 3"):
        region()(3)  # type: ignore[type-var]


def test_nesting() -> None:
    with region():
        assert dtypes() == INSIDE
        with region(enabled=False):
            assert dtypes() == OUTSIDE
            with region(FP16):
                assert dtypes() == (FP16, FP32)
            assert dtypes() == OUTSIDE
        assert dtypes() == INSIDE
        with region(FP16):
            assert dtypes() == (FP16, FP32)
        assert dtypes() == INSIDE
    assert dtypes() == OUTSIDE
    with region(enabled=False):
        assert dtypes() == OUTSIDE


def test_one_object_entered_again_and_again() -> None:
    here = region()
    with torch.autocast("cpu", dtype=FP16):
        with here, region(enabled=False), here:
            assert dtypes() == INSIDE
            with region(FP16), here:
                assert dtypes() == INSIDE
            assert dtypes() == INSIDE
        assert torch.get_autocast_dtype("cpu") is FP16 and dtypes() == (FP16, BF16)
    assert dtypes() == OUTSIDE
    with here:
        assert dtypes() == INSIDE
    assert dtypes() == OUTSIDE


def test_an_exception_leaves_the_region() -> None:
    here = region()
    for _ in range(2):
        with pytest.raises(KeyError), region(FP16), here, here:
            raise KeyError
        assert dtypes() == OUTSIDE

    @here
    def fail() -> None:
        assert dtypes() == INSIDE
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert dtypes() == OUTSIDE


def test_the_decorator_keeps_the_function_and_may_recurse() -> None:
    @region()
    def depth(n: int) -> list[Any]:
        """How deep."""
        return [dtypes()] if n == 0 else [dtypes(), *depth(n - 1)]

    assert depth.__name__ == "depth" and depth.__doc__ == "How deep."
    assert depth(3) == [INSIDE] * 4
    assert dtypes() == OUTSIDE

    @region(enabled=False)
    def off() -> Any:
        return dtypes()

    with region():
        assert off() == OUTSIDE
        assert dtypes() == INSIDE


def test_the_decorator_keeps_rules() -> None:
    @region(rules=OpRules().with_low("softmax"))
    def low_softmax() -> Any:
        return dtypes()

    assert low_softmax() == PLAIN


def test_threads_have_regions_of_their_own() -> None:
    here, seen, ready = region(), {}, threading.Barrier(5)

    @here
    def shared() -> Any:
        ready.wait()
        return dtypes()

    def work(name: str) -> None:
        if name == "plain":
            with torch.autocast("cpu", dtype=BF16):
                ready.wait()
                seen[name] = dtypes()
        elif name == "none":
            ready.wait()
            seen[name] = dtypes()
        elif name == "fp16":
            with region(FP16):
                ready.wait()
                seen[name] = dtypes()
        else:
            seen[name] = shared()
        assert dtypes() == OUTSIDE
        seen[name + " done"] = True

    for _ in range(5):
        threads = [
            threading.Thread(target=work, args=(name,)) for name in ("plain", "none", "fp16", "ours", "ours too")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {
            "plain": PLAIN, "none": OUTSIDE, "fp16": (FP16, FP32), "ours": INSIDE, "ours too": INSIDE,
            **{f"{name} done": True for name in ("plain", "none", "fp16", "ours", "ours too")},
        }  # fmt: skip
        seen.clear()


def test_a_generator_holds_its_region_while_it_runs() -> None:
    def produce() -> Iterator[Any]:
        with region():
            yield dtypes()
            yield dtypes()

    made = list(produce())
    assert made == [INSIDE, INSIDE]
    assert dtypes() == OUTSIDE


def test_a_checkpoint_takes_a_region_as_its_context() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(dtypes())
        return x.exp()

    checkpoint(block, x, use_reentrant=False, context_fn=lambda: (region(), region())).sum().backward()
    assert seen == [INSIDE, INSIDE]


class Casts(TorchDispatchMode):
    """Counts casts to 16 bits, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (BF16, FP16):
            self.seen[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


@over(use=["linear", "mm", "mv", "lstm"], cache=[True, False])
def test_a_weight_is_cast_once_a_region(use: str, cache: bool) -> None:
    w, x = torch.randn(12, 3, requires_grad=True), torch.randn(5, 3)
    state = torch.randn(5, 3), torch.randn(5, 3)

    def twice() -> None:
        for _ in range(2):
            if use == "linear":
                F.linear(x, w)
            elif use == "mm":
                torch.mm(w, x.t())
            elif use == "mv":
                torch.mv(w, x[0])
            else:
                torch.lstm_cell(x, state, w, w)

    with Casts() as casts, region(cache_enabled=cache):
        twice()
    uses = 4 if use == "lstm" else 2
    natively_cached = use in ("linear", "mm", "lstm")  # mv has no rule on the CPU: preamp's kernel casts, uncached
    assert casts.seen[12, 3] == (1 if cache and natively_cached else uses)


def test_the_cache_of_nested_regions_is_one_and_ends_with_the_outermost() -> None:
    w, x = torch.randn(12, 3, requires_grad=True), torch.randn(5, 3)
    with Casts() as casts:
        with region():
            F.linear(x, w)
            with region(enabled=False):
                F.linear(x, w)
            with region():
                F.linear(x, w)
            F.linear(x, w)
        assert casts.seen[12, 3] == 1
        with region():
            F.linear(x, w)
        assert casts.seen[12, 3] == 2


def test_float64_and_integers_are_left_alone() -> None:
    x, i = torch.randn(3, 3).double(), torch.arange(9).reshape(3, 3)
    with region():
        for y in (x @ x, x.softmax(-1), x.exp(), F.layer_norm(x, (3,)), F.linear(x, x), torch.mv(x, x[0]), x.sum()):
            assert y.dtype is torch.float64
        assert (i @ i).dtype is torch.int64 and i.sum().dtype is torch.int64 and i.cumsum(0).dtype is torch.int64
        assert torch.equal(i @ i, torch.tensor([[15, 18, 21], [42, 54, 66], [69, 90, 111]]))
        assert i.exp().dtype is FP32 and i.bool().sum().dtype is torch.int64
        assert i.float().mm(i.float()).dtype is BF16


def test_in_place_and_out_are_untouched() -> None:
    x = torch.rand(3, 3).bfloat16()
    with region():
        y = x.clone()
        assert y.exp_() is y and y.dtype is BF16
        assert torch.equal(y, torch.autocast("cpu", enabled=False)(lambda: x.exp())())
        out = torch.empty(3, 3, dtype=BF16)
        assert torch.exp(x, out=out) is out and out.dtype is BF16
        out = torch.empty(3, 3)
        assert torch.mm(x.float(), x.float(), out=out).dtype is FP32
        torch.softmax(x, -1, out=(out := torch.empty(3, 3, dtype=BF16)))
        assert out.dtype is BF16
        assert x.float().addmm_(x.float(), x.float()).dtype is FP32


def test_binary_cross_entropy_is_banned_where_it_hurts() -> None:
    p, y = torch.rand(4), torch.rand(4)
    with region():
        loss = F.binary_cross_entropy(p, y)
        with pytest.raises(RuntimeError, match=r"_entropy is banned .* an input is bfloat16.*BCEWithLogits"):
            F.binary_cross_entropy(p.bfloat16(), y)
        with pytest.raises(RuntimeError, match=r"call .float\(\) on the probabilities"):
            torch.nn.BCELoss()(p, y.bfloat16())
        assert F.binary_cross_entropy_with_logits(p.bfloat16(), y).dtype is FP32
        with region(enabled=False):
            assert F.binary_cross_entropy(p.bfloat16(), y.bfloat16()).dtype is BF16
    assert torch.equal(loss, F.binary_cross_entropy(p, y))
    with region(rules=OpRules().with_full("binary_cross_entropy")):
        assert F.binary_cross_entropy(p.bfloat16(), y).dtype is FP32


@pytest.mark.parametrize("name", ["softmax", "softmax.int", torch.softmax, F.softmax, torch.Tensor.softmax])
def test_rules_by_any_name(name: Any) -> None:
    x = torch.randn(3, 4)
    with region(rules=OpRules().with_low(name)):
        assert x.softmax(-1).dtype is BF16
        assert torch.equal(x.softmax(-1), torch.autocast("cpu", enabled=False)(lambda: x.bfloat16().softmax(-1))())
    with region(rules=OpRules().without(name)):
        assert x.softmax(-1).dtype is FP32 and x.bfloat16().softmax(-1).dtype is BF16
    with region(rules=OpRules()):
        assert x.bfloat16().softmax(-1).dtype is FP32


def test_rules_for_operators_that_torch_does_not_rule() -> None:
    x, low = torch.randn(3, 4), torch.randn(3, 4).bfloat16()
    with region(
        rules=OpRules().with_low("gelu").with_full("tanh", torch.sigmoid).with_banned("erf").with_promote("mul")
    ):
        assert F.gelu(x).dtype is BF16
        assert low.tanh().dtype is FP32 and low.sigmoid().dtype is FP32
        assert x.erf().dtype is FP32
        with pytest.raises(RuntimeError, match=r"erf is banned in a 16-bit autocast region: .*lift the ban"):
            low.erf()
        assert (x * low).dtype is FP32 and (low * low).dtype is BF16
    assert F.gelu(x).dtype is FP32 and low.tanh().dtype is BF16 and low.erf().dtype is BF16


def test_rules_against_torchs_own() -> None:
    x = torch.randn(3, 3)
    with region(rules=OpRules().with_full("matmul")):
        assert x.mm(x).dtype is FP32 and (x @ x).dtype is FP32 and (x.bfloat16() @ x.bfloat16()).dtype is FP32
        assert torch.equal(x @ x, torch.autocast("cpu", enabled=False)(lambda: x @ x)())
        assert F.linear(x, x).dtype is BF16
    with region(rules=OpRules().without("matmul", "linear", "addmm")):
        assert (x @ x).dtype is FP32 and F.linear(x, x).dtype is FP32
        assert F.linear(x.bfloat16(), x.bfloat16()).dtype is BF16
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(x, x.bfloat16())
    with region(rules=OpRules().with_banned("conv")), pytest.raises(RuntimeError, match="conv1d is banned"):
        F.conv1d(torch.randn(1, 2, 4).bfloat16(), torch.randn(1, 2, 2))
    with torch.autocast("cpu", dtype=BF16):
        assert x.mm(x).dtype is BF16


def test_rules_with_lists_of_tensors() -> None:
    x = torch.randn(2, 3)
    with region(rules=OpRules().with_low("cat")):
        assert torch.cat([x, x]).dtype is BF16 and torch.stack((x, x)).dtype is BF16
    with region(rules=OpRules().with_full("cat")):
        assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype is FP32


def test_an_unknown_operator_is_an_error_with_a_hint() -> None:
    with pytest.raises(PolicyError, match="no OpRules"):
        region(rules="O1").__enter__()
    with pytest.raises(PolicyError, match=r"'sofmax'; did you mean .*softmax"):
        OpRules().with_low("sofmax")
    with pytest.raises(PolicyError, match="no family of rules and no operator"):
        OpRules().with_low("")
    with pytest.raises(PolicyError):
        OpRules().with_low("mylib::missing")
    with pytest.raises(PolicyError):
        OpRules().with_low(lambda x: x)


@torch.library.custom_op("preamp_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


LIBRARY = torch.library.Library("preamp_tests_lib", "DEF")
LIBRARY.define("scale(Tensor x, float by) -> Tensor")
LIBRARY.impl("scale", lambda x, by: x * by, "CompositeExplicitAutograd")


def test_rules_for_operators_of_ones_own() -> None:
    x = torch.randn(3)
    rules = OpRules().with_low("preamp_tests::double").with_full("preamp_tests_lib::scale")
    for _ in range(2):  # a second installation into the same namespaces
        with region(rules=rules):
            assert double(x).dtype is BF16
            assert torch.ops.preamp_tests_lib.scale(x.bfloat16(), 2.0).dtype is FP32
            assert torch.equal(torch.ops.preamp_tests_lib.scale(x, 2.0), x * 2)
        with torch.autocast("cpu", dtype=BF16):
            assert double(x).dtype is FP32
            assert torch.ops.preamp_tests_lib.scale(x.bfloat16(), 2.0).dtype is BF16
        preamp.autocast.uninstall()
        assert double(x).dtype is FP32


@torch.library.custom_op("preamp_tests::own_rule", mutates_args=())
def own_rule(x: Tensor) -> Tensor:
    return x * 2


if TORCH >= (2, 7):
    own_rule.register_autocast("cpu", BF16)
HAS_OWN_RULE = pytest.mark.skipif(TORCH < (2, 7), reason="torch has register_autocast from 2.7 on")


@HAS_OWN_RULE
@pytest.mark.parametrize("category", ["low", "full"])
def test_an_operator_with_a_registered_autocast_rule_keeps_it(category: str) -> None:
    x = torch.randn(3)
    rules = getattr(OpRules(), f"with_{category}")("preamp_tests::own_rule")
    with pytest.raises(PolicyError, match="preamp_tests::own_rule has an autocast rule of its own on 'cpu'"):
        region(rules=rules).__enter__()
    assert REGISTRY.rules is None and not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("ipu")
    with region():
        assert own_rule(x).dtype is BF16


@HAS_OWN_RULE
def test_a_region_that_cannot_be_entered_leaves_nothing() -> None:
    here = region(rules=OpRules().with_low("preamp_tests::own_rule"))
    for _ in range(2):
        with pytest.raises(PolicyError), here:
            pass
        assert dtypes() == OUTSIDE
    with region(), pytest.raises(PolicyError), here:
        pass
    with region():
        assert dtypes() == INSIDE


def test_new_rules_replace_those_of_a_region_left_before() -> None:
    x = torch.randn(3, 4).bfloat16()
    for rules, dtype in ((OpRules(), FP32), (OpRules().with_low("softmax"), BF16), (OpRules(), FP32)):
        with region(rules=rules):
            assert x.softmax(-1).dtype is dtype
        with region():  # None: as they are
            assert x.softmax(-1).dtype is dtype
    assert REGISTRY.rules == OpRules()


def test_a_region_inside_another_cannot_change_its_rules() -> None:
    low_softmax = OpRules().with_low("softmax")
    with region(rules=low_softmax):
        with pytest.raises(PolicyError, match=r"the region around this one has others: op _softmax -> low"):
            region(rules=OpRules()).__enter__()
        assert dtypes() == PLAIN
        with region(FP16, rules=low_softmax), region(enabled=False, rules=low_softmax), region():
            assert torch.ones(2).softmax(-1).dtype is BF16
    with region(rules=OpRules()):
        assert dtypes() == INSIDE


@pytest.mark.parametrize("dtypes", [(FP16, FP32), (FP32, FP16), (FP16, FP16, FP32), (FP16, BF16), (FP16, FP16)])
@pytest.mark.parametrize("name", ["cat", "stack", "hstack"])
def test_the_widest_dtype_wins_whatever_the_regions_is(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """torch's CPU autocast fails where the other 16-bit dtype comes before any float32."""
    parts = [torch.randn(3, 4).to(dtype) for dtype in dtypes]
    with preamp.autocast("cpu", BF16):
        joined = getattr(torch, name)(parts)
    assert joined.dtype is (FP32 if len(set(dtypes)) > 1 else FP16)
    with torch.autocast("cpu", BF16):
        if dtypes[0] is FP16:
            with pytest.raises(RuntimeError, match="prioritize"):
                getattr(torch, name)(parts)
        else:
            assert getattr(torch, name)(parts).dtype is FP32
