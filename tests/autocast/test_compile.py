"""Regions and rules under torch.compile: the right dtypes, also when regions or rules change between calls."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import preamp
from preamp.rules import OpRules

from ..releases import REGIONS_IN_COMPILED_CODE

BF16, FP32 = torch.bfloat16, torch.float32
LOW_SOFTMAX = OpRules().with_low("softmax")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def region(**changes: Any) -> preamp.autocast:
    return preamp.autocast("cpu", dtype=BF16, **changes)


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y, y.softmax(-1)


def body_in_a_region(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with region():
        return body(x, w)


def dtypes(results: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in results)


def xw() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@REGIONS_IN_COMPILED_CODE
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_region_inside_of_the_compiled_function(backend: str) -> None:
    x, w = xw()

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with region():
            y, s = body(x, w)
            with region(enabled=False):
                z = x @ w
        return y, s, z, x @ w

    run = compiled(function, backend)
    results = run(x, w)
    assert dtypes(results) == (BF16, FP32, FP32, FP32)
    for ours, eager in zip(results, function(x, w), strict=True):
        assert torch.allclose(ours, eager, atol=2e-2)
    results[1].square().sum().backward()
    grad, w.grad = w.grad, None
    function(x, w)[1].square().sum().backward()
    assert grad is not None and w.grad is not None and grad.dtype is FP32
    assert torch.allclose(grad, w.grad, atol=2e-2)
    assert not torch.is_autocast_enabled("ipu")


@REGIONS_IN_COMPILED_CODE
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_region_around_a_call_decides(backend: str) -> None:
    """Code compiled under one kind of region is not reused under another (trap 1), in any order."""
    x, w = xw()
    run = compiled(body, backend)
    for _ in range(2):
        with torch.autocast("cpu", dtype=BF16):
            assert dtypes(run(x, w)) == (BF16, BF16)
        with region():
            assert dtypes(run(x, w)) == (BF16, FP32)
        assert dtypes(run(x, w)) == (FP32, FP32)
        with region(enabled=False):
            assert dtypes(run(x, w)) == (FP32, FP32)
        with preamp.autocast("cpu", dtype=torch.float16):
            assert dtypes(run(x, w)) == (torch.float16, FP32)


@REGIONS_IN_COMPILED_CODE
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_change_of_rules_between_calls_reaches_a_region_inside(backend: str) -> None:
    x, w = xw()
    run = compiled(body_in_a_region, backend)
    for rules, expected in ((OpRules(), FP32), (LOW_SOFTMAX, BF16), (OpRules(), FP32), (None, FP32)):
        if rules is None:
            preamp.autocast.uninstall()
        else:
            with region(rules=rules):
                pass
        assert dtypes(run(x, w)) == (BF16, expected)


@REGIONS_IN_COMPILED_CODE
def test_code_is_reused_when_rules_come_back() -> None:
    x, w = xw()
    count = torch._dynamo.testing.CompileCounter()
    run = torch.compile(body, fullgraph=True, backend=count)
    for _ in range(3):
        for rules, expected in ((OpRules(), FP32), (LOW_SOFTMAX, BF16)):
            with region(rules=rules):
                assert dtypes(run(x, w)) == (BF16, expected)
    assert count.frame_count == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_decorators_of_functions_compile_whole(backend: str) -> None:
    x, w = xw()

    @preamp.half_function
    def half(values: dict[str, list[Tensor]], *, other: Tensor) -> Tensor:
        return F.gelu(values["x"][0]) + other

    @preamp.float_function
    def full(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @preamp.promote_function
    def wide(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x, w

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return half({"x": [x]}, other=x), full(x.bfloat16(), w), *wide(x.bfloat16(), w)

    run = compiled(function, backend)
    with region():
        assert dtypes(run(x, w)) == dtypes(function(x, w)) == (BF16, FP32, FP32, FP32)
    assert dtypes(run(x, w.detach().bfloat16())) == (FP32, BF16, BF16, BF16)


def test_dynamic_shapes() -> None:
    w = torch.randn(4, 4)
    run = torch.compile(body, fullgraph=True, backend="aot_eager", dynamic=True)
    with region():
        for size in (2, 3, 7):
            x = torch.randn(size, 4)
            assert dtypes(run(x, w)) == (BF16, FP32)
            assert torch.equal(run(x, w)[1], body(x, w)[1])


def test_the_tag_of_the_compile_cache_is_set_and_put_back() -> None:
    config = torch.compiler.config
    before = config.cache_key_tag
    try:
        config.cache_key_tag = "mine:"
        with region():
            default = config.cache_key_tag
        assert default.startswith("mine:preamp-rules:")
        with region(rules=LOW_SOFTMAX):
            low = config.cache_key_tag
        assert low.startswith("mine:preamp-rules:") and low != default
        with region(rules=OpRules()):
            assert config.cache_key_tag == default
        preamp.autocast.uninstall()
        assert config.cache_key_tag == "mine:"
    finally:
        config.cache_key_tag = before


PROGRAM = """
    import sys, torch, preamp
    from preamp.rules import OpRules
    torch.set_num_threads(1)
    def function(x):
        return x.softmax(-1)
    run = torch.compile(function, fullgraph=True, backend="inductor")
    rules = {"default": OpRules(), "low": OpRules().with_low("softmax")}.get(sys.argv[1])
    x = torch.ones(3, 4)
    region = preamp.autocast("cpu", dtype=torch.bfloat16, rules=rules) if rules else torch.autocast("cpu")
    with region:
        print(run(x).dtype, run(x.bfloat16()).dtype)
    from torch._dynamo.utils import counters
    print(counters["aot_autograd"]["autograd_cache_hit"], file=sys.stderr)
"""


@pytest.mark.slow
def test_the_cache_on_disk_knows_the_rules(tmp_path: Path) -> None:
    """Trap 2: torch's AOTAutograd cache would give a process the code of another with other rules."""

    def run(rules: str) -> tuple[list[str], int]:
        environment = {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), rules],
            env=environment, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), int(done.stderr.split()[-1])

    expected = {
        "plain": ["torch.float32", "torch.bfloat16"],
        "default": ["torch.float32", "torch.float32"],
        "low": ["torch.bfloat16", "torch.bfloat16"],
    }
    for rules in ("default", "low", "plain"):
        assert run(rules)[0] == expected[rules], rules
    found, hits = run("low")
    assert found == expected["low"]
    assert hits > 0  # the cache is on, and the same rules do share it
