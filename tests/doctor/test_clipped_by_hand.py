"""What a script does itself to scaled gradients: clipped they are PA106, unscaled they are true from then on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preamp.doctor.handled import Handled
from preamp.doctor.measure import key_of

SCALE = 1024.0


@pytest.mark.parametrize(("operators", "clipped", "scaled"), [
    ([("linalg_vector_norm", None), ("mul", torch.tensor(0.3))], ["mul"], True),
    ([("clamp", -1.0)], ["clamp"], True),
    ([("mul", 0.5)], [], True),
    ([("sum", None), ("div", SCALE)], [], False),
    ([("sum", None), ("mul", torch.tensor(1 / SCALE))], [], False),
])  # fmt: skip
def test_scaled_gradients(operators: list[tuple[str, Any]], clipped: list[str], scaled: bool) -> None:
    gradient = torch.ones(4)
    handled = Handled(SimpleNamespace(parameters=list), lambda: False)
    handled.gradients, handled.backward_scale = frozenset({key_of(gradient)}), SCALE
    for base, by in operators:
        args = (gradient,) if by is None else (gradient, by)
        written: list[Any] = [] if base in ("sum", "linalg_vector_norm") else [gradient]
        place = SimpleNamespace(direction="forward")
        handled.before(SimpleNamespace(base=base, args=args, kwargs={}, written=written, place=place))
    assert [base for _, base in handled.clipped] == clipped
    assert bool(handled.gradients) == scaled
