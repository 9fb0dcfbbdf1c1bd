"""What rules cost, counted in kernels of ours: nothing for operators whose rule is torch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import preamp
from preamp.autocast import _registry
from preamp.autocast._registry import _install
from preamp.rules import OpRules

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often a kernel of ours ran, by operator."""
    seen: Counter[str] = Counter()
    gate = _registry._gate

    def counting(op: Any, *rest: Any) -> Any:
        kernel = gate(op, *rest)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[str(op).removeprefix("aten.").removesuffix(".default")] += 1
            return kernel(*args, **kwargs)

        return counted

    monkeypatch.setattr(_registry, "_gate", counting)
    _registry._kernels_of.cache_clear()
    yield seen
    _registry._kernels_of.cache_clear()


def test_operators_without_a_rule_of_ours_run_no_python(calls: Counter[str]) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with preamp.autocast("cpu", dtype=BF16):
        y = F.relu(F.linear(x, w)) + x @ w * 2
        y = torch.cat([F.gelu(y), y.tanh()]).t().reshape(2, -1).mean(0).clone()
        y = F.dropout(y, 0.5) - y.max() + y.sigmoid().sqrt()
        F.mse_loss(y, y)
        F.cross_entropy(x, torch.zeros(4).long())
        torch.conv1d(x, torch.randn(4, 4, 1))
    y.float().mean().backward()
    assert calls == {"cat": 1}, calls  # which fails in torch's CPU autocast for the other 16-bit dtype
    calls.clear()
    with preamp.autocast("cpu", dtype=BF16):
        x.softmax(-1)
        x.exp()
    assert calls == {"softmax.int": 1, "exp": 1}


def test_outside_regions_operators_with_rules_run_no_python(calls: Counter[str]) -> None:
    x = torch.randn(4, 4)
    with preamp.autocast("cpu", dtype=BF16):
        x.exp()
    calls.clear()
    x.exp().softmax(-1).sum()
    F.layer_norm(x, (4,))
    assert not calls


def test_a_rule_is_installed_once_however_many_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    installs = []
    install = _registry._install
    monkeypatch.setattr(_registry, "_install", lambda *a: installs.append(a) or install(*a))
    for _ in range(5):
        with preamp.autocast("cpu", dtype=BF16), preamp.autocast("cpu", enabled=False):
            torch.ones(1).exp()
    assert len(installs) == 1


BCE = {"binary_cross_entropy"}
PARTS = {"_softmax", "_log_softmax", "multilabel_margin_loss_forward"}


def test_cuda_needs_few_kernels() -> None:
    """torch's own rules on CUDA are nearly preamp's; what is left is this, and of a usual training step one loss."""
    before = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    libraries = _install(OpRules(), "cuda")
    try:
        after = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
        ours = {key.split("/")[1] for library in libraries for key in library._op_impls}
    finally:
        for library in libraries:
            library._destroy()
    assert set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")) == before
    assert {name.removeprefix("aten::") for name in after - before} == ours - BCE
    usual = {
        "exp", "softmax.int", "log_softmax.int", "layer_norm", "native_layer_norm", "group_norm", "linear", "matmul",
        "mm", "bmm", "addmm", "conv2d", "convolution", "_convolution", "cat", "stack", "sum", "sum.dim_IntList", "pow",
        "nll_loss", "cross_entropy_loss", "mse_loss", "scaled_dot_product_attention", "batch_norm", "einsum", "norm",
        "binary_cross_entropy_with_logits", "upsample_bilinear2d", "prelu", "lstm_cell", "cumsum", "conv2d.padding",
    }  # fmt: skip
    assert ours & usual == {"cross_entropy_loss"}
    families = {row.family: set(row.ops) for row in OpRules().rows()}
    rare = (
        "fft", "complex", "linalg", "quantile", "fake_quantize", "ctc_loss", "histogram", "special", "compare",
        "embedding_bag", "index", "index_", "lerp", "lerp_", "addmm_", "heaviside_", "sparse.mm",
    )  # fmt: skip
    known = set().union(*(families[family] for family in rare)) | {"meshgrid", "meshgrid.indexing"}
    rest = ours - known - usual - {"rms_norm"}  # torch 2.11 has no rule of its own for it
    assert rest == BCE | PARTS | {"_native_multi_head_attention", "mkldnn_rnn_layer", "trace", "linalg_cross"}


def test_a_changed_part_does_not_change_the_whole_on_cuda() -> None:
    """cross_entropy is full on CUDA through log_softmax: when that is changed, cross_entropy needs a kernel."""
    libraries = _install(OpRules().with_low("log_softmax"), "cuda")
    try:
        ours = {key.split("/")[1] for library in libraries for key in library._op_impls}
    finally:
        for library in libraries:
            library._destroy()
    assert {"cross_entropy_loss", "log_softmax.int", "_log_softmax"} <= ours
    assert not ours & {"softmax.int", "linear", "exp"}
