"""Log-probabilities of the same tokens by two engines."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preamp.doctor import compare_logprobs
from preamp.errors import PreampError

NUMBERS = st.floats(-8, -0.1)


@given(st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=6), max_size=4))
def test_plain_maths(rows: list[list[tuple[float, float, bool]]]) -> None:
    ones, others, masks = ([[token[k] for token in row] for row in rows] for k in range(3))
    kept = [(i, j, a, b) for i, row in enumerate(rows) for j, (a, b, used) in enumerate(row) if used]
    if not kept:
        with pytest.raises(PreampError, match="no token is left"):
            compare_logprobs(ones, others, masks)
        return
    found = compare_logprobs(ones, others, masks)
    gaps = [b - a for _, _, a, b in kept]
    sums = {i: math.fsum(b - a for k, _, a, b in kept if k == i) for i, _, _, _ in kept}
    assert (found.tokens, found.sequences, found.not_finite) == (len(kept), len(sums), 0)
    assert found.bias == pytest.approx(math.fsum(gaps) / len(gaps), abs=1e-12)
    assert found.mean_apart == pytest.approx(math.fsum(map(abs, gaps)) / len(gaps))
    assert found.largest == max(map(abs, gaps)) == abs(found.worst[0].trainer - found.worst[0].sampler)
    assert (
        found.kl == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in gaps) / len(gaps), abs=1e-12) and found.kl >= 0
    )
    assert found.clipped == sum(abs(math.exp(d) - 1) > 0.2 for d in gaps) / len(gaps)
    assert found.sequence_apart == pytest.approx(math.fsum(map(abs, sums.values())) / len(sums))
    assert {(w.sequence, w.position, w.sampler, w.trainer) for w in found.worst} <= set(kept)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_estimate_is_the_divergence() -> None:
    """Over tokens that one policy drew, the mean is its KL divergence from the other."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, generator=generator).log_softmax(0) for _ in range(2))
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    found = compare_logprobs(p[drawn], q[drawn])
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=0.02)


def test_forms() -> None:
    """Tensors of any dtype, arrays, lists of any lengths with None where an engine has no number."""
    a, b = -torch.rand(3, 4) - 0.1, -torch.rand(3, 4) - 0.1
    wanted = compare_logprobs(a, b)
    assert compare_logprobs(a.numpy(), b.tolist()) == wanted
    assert compare_logprobs(list(a), list(b.numpy())) == wanted
    assert compare_logprobs(a.bfloat16(), a.bfloat16().float()).largest == 0
    found = compare_logprobs([[None, -1.0, -2.0], [-3.0]], [[-0.5, -1.5, -math.inf], [-3.0]])
    assert (found.tokens, found.not_finite, found.mean_apart) == (2, 2, 0.25)
    assert "left out" in str(found) and "KL(sampler || trainer)" in str(found)


def test_lists_of_scalars() -> None:
    """What engines append one by one: scalars of numpy or of torch."""
    assert compare_logprobs([np.float32(-1), None], [torch.tensor(-1.0), torch.tensor(-2.0)]).tokens == 1


@pytest.mark.parametrize(
    ("sampler", "trainer", "mask", "told"),
    [
        ([[[-1.0]], [[-1.0, -2.0]]], [[-1.0]], None, "no lists of numbers"),
        ([[-1.0], -2.0], [[-1.0], -2.0], None, "no lists of numbers"),
        ([-1.0, -2.0], [-1.0, -2.0], ["False", "True"], "no lists of numbers"),
        (torch.ones(2).to_sparse(), [-1.0, -1.0], None, "no lists of numbers"),
        ([[-1.0]], [[-1.0], [-1.0]], None, "1 sequences, and the trainer 2"),
        ([[-1.0, -2.0]], [[-1.0]], None, "sequence 0 has 2 tokens from the sampler and 1 in the trainer"),
        ([-1.0], [2.0], None, "log_softmax"),
        ([-1.0], [-1.0], [False], "no token is left"),
        ([math.nan], [-1.0], None, "no token is left"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), None, "one number for each token"),
        ("abc", "abc", None, "no lists of numbers"),
        ([], [], None, "no token is left"),
    ],
)
def test_what_is_refused(sampler: Any, trainer: Any, mask: Any, told: str) -> None:
    with pytest.raises(PreampError, match=told):
        compare_logprobs(sampler, trainer, mask)
