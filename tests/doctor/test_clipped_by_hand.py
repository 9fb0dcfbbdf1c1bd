"""What a script does itself to scaled gradients: clipped they are PA106, unscaled they are true from then on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import preamp
from preamp.doctor.handled import Handled
from preamp.doctor.measure import key_of

SCALE = 1024.0


@pytest.mark.parametrize(("operators", "clipped", "scaled"), [
    ([("linalg_vector_norm", None), ("mul", torch.tensor(0.3))], ["mul"], True),
    ([("_foreach_norm", None), ("_foreach_mul_", 0.3)], ["mul"], True),
    ([("clamp", -1.0)], ["clamp"], True),
    ([("_foreach_mul_", 1 / SCALE)], [], False),
    ([("mul", 0.5)], [], True),
    ([("sum", None), ("div", SCALE)], [], False),
    ([("sum", None), ("mul", torch.tensor(1 / SCALE))], [], False),
])  # fmt: skip
def test_scaled_gradients(operators: list[tuple[str, Any]], clipped: list[str], scaled: bool) -> None:
    gradient = torch.ones(4)
    handled = Handled(SimpleNamespace(parameters=list))
    handled.gradients, handled.backward_scale = frozenset({key_of(gradient)}), SCALE
    for base, by in operators:
        args = (gradient,) if by is None else (gradient, by)
        written: list[Any] = [] if by is None else [gradient]
        place = SimpleNamespace(direction="forward")
        handled.before(SimpleNamespace(base=base, args=args, kwargs={}, written=written, place=place))
    assert [base for _, base in handled.clipped] == clipped
    assert bool(handled.gradients) == scaled


@pytest.mark.parametrize("how", ["in place", "data", "anew", "foreach"])
def test_gradients_that_the_script_has_unscaled_are_true(how: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=SCALE)
    with preamp.doctor.watch(model) as seen:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 16)).float().square().mean()
            scaler.scale(loss).backward()
            inverse = 1 / scaler.get_scale()
            if how == "foreach":
                torch._foreach_mul_([p.grad for p in model.parameters()], inverse)
            for p in model.parameters():
                if how == "anew":
                    p.grad = p.grad * inverse
                elif how != "foreach":
                    (p.grad if how == "in place" else p.grad.data).mul_(inverse)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert [one.message for one in seen.findings if "too large" in one.message] == []
