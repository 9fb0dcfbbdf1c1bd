"""What no operator of a looked-at step shows by itself: rounding that adds up, and what happened before or after it."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

import preamp
from preamp.doctor.findings.pa203 import FEWEST
from preamp.doctor.records import Rank
from preamp.doctor.tell.report import judge
from preamp.report import Finding

BF16 = torch.bfloat16


class Chain(nn.Module):
    """The partition function of a chain, whose scores grow with every position."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.emit, self.full = nn.Linear(4, 6), full
        self.transitions = nn.Parameter(torch.randn(6, 6) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        emitted = self.emit(x)
        alpha = emitted[:, 0].float() if self.full else emitted[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions.to(emitted), 1) + emitted[:, t]  # here
        return alpha.float().logsumexp(1).mean()


def found_in(full: bool) -> list[Finding]:
    torch.manual_seed(0)
    model = Chain(full)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.doctor.watch(model) as seen:
        with torch.autocast("cpu", BF16):
            loss = model(torch.randn(4, 200, 4))
        loss.backward()
        optimizer.step()
    return [one for one in seen.findings if one.severity != "info"]


def test_rounding_that_adds_up_is_told_at_the_line_that_cures_it() -> None:
    (found,) = found_in(full=False)
    lines, start = inspect.getsourcelines(Chain.forward)
    assert (found.code, found.line) == ("PA104", start + next(i for i, line in enumerate(lines) if "# here" in line))
    assert "adds up" in found.message and "with torch.autocast" in str(found.fix) and "# tried: " in str(found.fix)
    assert not found_in(full=True)


def test_a_counter_that_stops_after_the_last_look_is_told_at_the_end() -> None:
    def codes(start: float) -> list[str]:
        model = nn.Linear(4, 4)
        count = torch.tensor(start, dtype=BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with preamp.doctor.watch(model, every=100) as seen:
            for _ in range(6):
                loss = model(torch.ones(2, 4)).square().mean()
                count += 1
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [one.code for one in seen.findings if one.severity != "info"]

    assert codes(251.0) == ["PA114"], "251 moves in the first step, and 256 does not in the last"
    assert codes(100.0) == []


def test_a_table_has_the_numbers_that_it_was_cast_from() -> None:
    """1 - 1e-4 is 1 in bfloat16: that float32 would not divide by zero shows only in what was cast."""

    def tried(inside: bool) -> str:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exact = 1 - torch.tensor([1e-4, 0.1, 0.5])
        with preamp.doctor.watch(model) as seen:
            table = exact.to(BF16) if inside else torch.tensor([1.0, 0.9, 0.5], dtype=BF16)
            loss = model(torch.ones(2, 4)).square().mean() * (1 / (1 - table)).sum()
            loss.backward()
            optimizer.zero_grad()
        (found,) = [one for one in seen.findings if one.code == "PA201"]
        assert isinstance(found.evidence, dict)
        return str(found.evidence["tried"])

    assert "float32 is not finite there either" in tried(inside=False)
    assert "float32 is not finite" not in tried(inside=True)


def test_scalers_made_in_every_step() -> None:
    def rank(made: int, skipped: bool) -> Rank:
        rank = Rank(0)
        for index in range(FEWEST):
            facts = {"scale": 65536.0, "skipped": skipped, "bad": None, "schedules": 0, "updates": 1}
            rank.write("step", {**facts, "step": index, "scalers": made if index else 1})
        rank.write("end", {"scaler_at": ["train.py", 3], "updates": 1})
        return rank

    found = judge([rank(1, skipped=True)])
    assert [(one.code, one.severity, one.line) for one in found] == [("PA203", "error", 3)]
    assert [one.severity for one in judge([rank(1, skipped=False)])] == ["warning"]
    assert not judge([rank(0, skipped=False)])


class TooEarly(nn.Module):
    """A norm that casts its mean of squares back before the root."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        mean = x.float().square().mean(-1, keepdim=True).to(x.dtype)  # here
        return x * torch.rsqrt(mean + 1e-3)


def test_a_cast_back_that_comes_too_early_is_left_out() -> None:
    torch.manual_seed(0)
    model = TooEarly()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
    with preamp.doctor.watch(model) as seen:
        with torch.autocast("cpu", torch.float16):
            loss = model(1000 * torch.randn(4, 8)).float()[:, :3].square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    (found,) = [one for one in seen.findings if one.code == "PA201"]
    lines, start = inspect.getsourcelines(TooEarly.forward)
    assert found.line == start + next(i for i, line in enumerate(lines) if "# here" in line)
    assert str(found.fix).startswith("mean = x.float().square().mean(-1, keepdim=True).float()")
    assert "the line against float32: not finite -> off by 0" in str(found.fix)


def test_an_evaluation_ends_before_the_step_that_follows_it() -> None:
    """What the optimizer does then is no average that somebody keeps."""
    torch.manual_seed(0)
    model, reference = (nn.Linear(16, 16).to(BF16) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with preamp.doctor.watch([model, reference], every=100) as seen:
        for _ in range(4):
            x = torch.randn(8, 16).to(BF16)
            out = model(x)
            with torch.no_grad():
                target = reference(x)
            loss = (out - target).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [one.code for one in seen.findings if one.severity != "info"] == ["PA204"]


def test_a_triangle_of_what_is_wrong_already_is_not_at_fault() -> None:
    """Operators that put numbers elsewhere change none: what made them is to blame, or nobody."""

    torch.manual_seed(0)
    upper, lower = 1e3 * torch.randn(16, 16).triu(1), torch.rand(16, 16).tril()
    model = nn.Linear(16, 16)
    with preamp.doctor.watch(model) as seen:
        terms = (
            (upper + torch.full_like(upper, 256).tril()).to(BF16),
            (lower - torch.full_like(upper, 256).tril()).to(BF16),
        )
        whole = terms[0] + terms[1]  # right as a whole, for its upper triangle is large
        model(whole.tril().float()).sum().backward()
    assert [one.message for one in seen.findings if one.severity != "info"] == []


def test_an_optimizer_of_ones_own_is_made_where_it_is_asked_for() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1)

    model = nn.Linear(4, 4).half()
    with preamp.doctor.watch(model) as seen:
        optimizer = Own(model)  # made
        model(torch.ones(2, 4).half()).float().sum().backward()
        optimizer.step()
    (found,) = [one for one in seen.findings if one.code == "PA111"]
    lines, start = inspect.getsourcelines(test_an_optimizer_of_ones_own_is_made_where_it_is_asked_for)
    assert found.line == start + next(i for i, line in enumerate(lines) if line.endswith("# made\n"))
