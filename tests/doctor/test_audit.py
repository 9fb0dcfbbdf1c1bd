"""What is told of a run: dtypes, memory, TF32, tensor cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.doctor.follow.audit import tf32
from tests.doctor._kept import Kept


class Net(nn.Module):
    """A convolution, a grouped one, a recurrent layer and two linear layers, the second not a multiple of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depth = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3, groups=16)
        self.rnn = nn.LSTM(16, 24, batch_first=True)
        self.even, self.odd = nn.Linear(24, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        images = self.depth(self.conv(x)).mean(-1).transpose(1, 2)
        return self.odd(self.even(self.rnn(images)[0].mean(1)))


def watched(low: torch.dtype | None, steps: int = 1) -> tuple[dict[str, Any], Net]:
    torch.manual_seed(0)
    net, kept = Net(), Kept()
    optimizer = torch.optim.AdamW(net.parameters())
    with preamp.doctor.watch(net, every=1, sinks=[kept]):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                loss = net(torch.randn(4, 8, 12, 12)).float().square().mean()
            loss.backward()
            optimizer.step()
    return last(kept), net


def last(kept: Kept) -> dict[str, Any]:
    return dict(kept.records)


def by_module(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["module"]: one for one in facts["audit"]["products"]}


def test_flops_and_tensor_cores_by_shape() -> None:
    facts, _ = watched(torch.bfloat16)
    found = by_module(facts)
    flops = {  # by hand: 2 for each weight and each place that it meets
        "conv": 2 * (16 * 8 * 9) * 4 * 10 * 10, "depth": 2 * (16 * 9) * 4 * 8 * 8,
        "rnn": 2 * (96 * 16 + 96 * 24) * 4 * 8, "even": 2 * 24 * 32 * 4, "odd": 2 * 32 * 10 * 4,
    }  # fmt: skip
    assert facts["audit"]["flops"] == sum(flops.values())
    counted = dict.fromkeys(flops, 0.0)
    for one in facts["audit"]["products"]:  # of a recurrent layer one, or on some CPUs two: for inputs and for states
        counted[one["module"]] += one["share"] * facts["audit"]["flops"]
    assert counted == pytest.approx(flops)
    assert {name for name, one in found.items() if one["fills"]} == {"conv", "rnn", "even"}
    assert found["depth"]["why"] == "grouped convolution"
    assert found["odd"]["why"] == "out_features=10: no multiple of 8"
    assert found["odd"]["shape"] == {"in_features": 32, "out_features": 10}
    assert facts["audit"]["low_share"] == 1


def test_float32_fills_tensor_cores_with_tf32_only() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert by_module(watched(None)[0])["even"]["why"] == "float32, and TF32 is off"
        torch.set_float32_matmul_precision("high")
        facts, _ = watched(None)
    finally:
        torch.set_float32_matmul_precision(before)
    assert facts["audit"]["tf32"]["matmul"] is True
    found = by_module(facts)
    assert found["even"]["fills"]
    assert found["odd"]["why"] == "out_features=10: no multiple of 4"


def test_tf32_is_read_whichever_way_it_was_set() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the older flags only")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # after this torch refuses to read the older flag
        assert tf32()["matmul"] is True
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert tf32()["matmul"] is False
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_held_is_counted_once(steps: int) -> None:
    facts, net = watched(torch.bfloat16, steps)
    numbers = sum(p.numel() for p in net.parameters())
    told = [(row["kind"], row["dtype"], row["device"], row["numbers"], row["bytes"]) for row in facts["held"]["rows"]]
    assert told == [
        ("parameters", "fp32", "cpu", numbers, 4 * numbers),
        ("gradients", "fp32", "cpu", numbers, 4 * numbers),
        ("optimizer state", "fp32", "cpu", 2 * numbers, 8 * numbers),
    ]


def test_sixteen_bit_weights_and_masters_of_the_optimizer_s_own() -> None:
    torch.manual_seed(0)
    model, kept = nn.Linear(16, 8).bfloat16(), Kept()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
        for master, own in zip(masters, model.parameters(), strict=True):
            assert own.grad is not None
            master.grad = own.grad.float()
        optimizer.step()
    told = {(row["kind"], row["dtype"]): row["numbers"] for row in last(kept)["held"]["rows"]}
    assert told == {
        ("parameters", "bf16"): 136, ("gradients", "bf16"): 136,
        ("master weights", "fp32"): 136, ("optimizer state", "fp32"): 136,
    }  # fmt: skip


def test_a_scaler_s_step_counts_once_and_a_skipped_one_has_no_state() -> None:
    torch.manual_seed(0)
    model, kept = nn.Linear(16, 8), Kept()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        scaler.scale(model(torch.randn(4, 16)).square().mean()).backward()
        weight_grad = model.weight.grad
        assert weight_grad is not None
        weight_grad[0, 0] = float("inf")
        scaler.step(optimizer)
    told = {row["kind"]: row["numbers"] for row in last(kept)["held"]["rows"]}
    assert told == {"parameters": 136, "gradients": 136}
