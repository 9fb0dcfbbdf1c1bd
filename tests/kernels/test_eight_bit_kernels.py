"""Adam in 8 bits: the Triton kernel beside the reference, where `test_kernels` and `tests/emulator` run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .eight_bits import KINDS, OPTIONS, SETTINGS, Run, check_kernels
from .steps import awkward, by_operators, check_found_writes_nothing, far, gradients
from .where import inside

pytest.importorskip("triton")


def layouts() -> list[Tensor]:
    """Odd sizes, none, one, a partial last block, several blocks, channels_last, addresses off alignment."""
    return [*awkward(torch.get_default_device().type)[:7], torch.randn(256), torch.randn(255), torch.randn(2, 1025)]


CASES = [(kind, SETTINGS[0], torch.bfloat16) for kind in KINDS]
CASES += [("published", SETTINGS[1], torch.float16), ("split", SETTINGS[2], torch.float32)]


@inside
@pytest.mark.parametrize(("kind", "options", "dtype"), CASES)
def test_kernels_do_what_operators_do(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    check_kernels(kind, options, dtype, layouts())


@inside
@pytest.mark.parametrize("kind", KINDS)
def test_found_writes_nothing(kind: str) -> None:
    check_found_writes_nothing(Run(kind, OPTIONS, layouts()))


@inside
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, which the interpreter computes with
def test_a_block_that_is_not_finite_is_lost_as_a_whole_and_no_other() -> None:
    run = Run("float32", OPTIONS, [torch.zeros(600)])
    twin = run.twin()
    grads = gradients(run.params, torch.float32, 0)
    grads[0][300] = torch.inf
    grads[0][10] = torch.nan
    run.take([grads[0].clone()])
    with by_operators():
        twin.take(grads)
    for each in (run, twin):
        first, scales, _, second_scales = (moments[0] for moments in each.moments)
        assert scales.isfinite().tolist() == second_scales.isfinite().tolist() == [False, False, True]
        assert not first[:512].any() and first[512:].any()


@inside
def test_dtypes_in_one_call_and_tensors_that_cannot_be_walked() -> None:
    dtypes = [torch.float16, torch.float32, torch.bfloat16, torch.float32]
    for last in (torch.randn(40), torch.randn(9, 80)[:, ::2]):
        run = Run("float32", OPTIONS, [torch.randn(n) for n in (300, 40, 1030)] + [last])
        twin = run.twin()
        grads = [g.to(d) for g, d in zip(gradients(run.params, torch.float32, 3), dtypes, strict=True)]
        with by_operators():
            twin.take([g.clone() for g in grads])
        run.take(grads)
        assert far(run.params, twin.params) <= 2
        assert all(torch.equal(a, b) for a, b in zip(run.moments[2], twin.moments[2], strict=True))
