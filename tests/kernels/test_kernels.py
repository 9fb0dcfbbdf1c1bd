"""The Triton kernels against torch's operators, in Triton's interpreter on the CPU.

The interpreter has to be asked for before Triton is imported, and other tests import it as it is: so this file runs
itself in a process of its own. There the tests below run; here they are skipped, and one test waits for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preamp.kernels import triton_runs_on

from . import calls as fused
from .steps import (
    ADAM,
    SGD,
    WITH_KERNELS,
    Run,
    awkward,
    by_operators,
    check_found_writes_nothing,
    check_kernels,
    far,
    gradients,
)
from .where import INTERPRETED, KERNEL_FILES, ON_DEVICE, inside

triton = pytest.importorskip("triton")
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
FILES = [str(Path(__file__).with_name(f"{name}.py")) for name in KERNEL_FILES]
LOWS = [None, torch.float16, torch.bfloat16]

STEP_ULP = 4
"""Kernels and operators agree to so many units in the last place of float32 after five steps; 2 were seen."""


@pytest.mark.slow  # `tests/emulator` runs the same tests as code for a GPU
@pytest.mark.skipif(OLD, reason="the interpreter of Triton 3.6 breaks on NumPy 2.4; only 3.9 was tried besides")
@pytest.mark.skipif(INTERPRETED or ON_DEVICE, reason="this is the process that it starts")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@inside
def test_kernels_run_here() -> None:
    assert triton_runs_on(torch.get_default_device())
    assert not triton_runs_on(torch.device("meta"))


@inside
@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize(("name", "options"), WITH_KERNELS, ids=range(len(WITH_KERNELS)))
def test_kernels_do_what_operators_do(name: str, options: dict[str, Any], low: torch.dtype | None) -> None:
    check_kernels(name, options, low, awkward(torch.get_default_device().type), ulp=STEP_ULP)


@inside
@pytest.mark.parametrize(("name", "options"), WITH_KERNELS, ids=range(len(WITH_KERNELS)))
def test_found_writes_nothing(name: str, options: dict[str, Any]) -> None:
    params = awkward(torch.get_default_device().type)
    check_found_writes_nothing(Run(name, options, params, [p.to(torch.bfloat16) for p in params]))


@inside
def test_writes_are_seen_by_autograd() -> None:
    for name, options in WITH_KERNELS:
        params = [torch.randn(5)]
        run = Run(name, options, params, [params[0].bfloat16()])
        versions = [t._version for t in run.everything()[:2]]
        run.take([torch.randn(5).bfloat16()])
        assert all(t._version > v for t, v in zip(run.everything()[:2], versions, strict=True))


@inside
def test_mixed_dtypes_in_one_call() -> None:
    params = [torch.randn(n) for n in (5, 40, 1030, 7)]
    dtypes = [torch.float16, torch.float32, torch.bfloat16, torch.float16]
    for name, options in WITH_KERNELS:
        run = Run(name, options, [p.clone() for p in params], [p.bfloat16() for p in params])
        twin = run.twin()
        for i in range(2):
            grads = [g.to(d) for g, d in zip(gradients(params, torch.float32, i), dtypes, strict=True)]
            with by_operators():
                twin.take([g.clone() for g in grads])
            run.take(grads)
        assert far(run.params, twin.params) <= STEP_ULP, name
        assert float(run.step) == float(twin.step)


@inside
def test_late_steps_keep_their_bias_correction() -> None:
    """1 - 0.999^t needs more than float32, at the first step and at the hundred thousandth."""
    for count in (0.0, 1.0, 99_999.0, 16_000_000.0):
        run = Run("adam", {**ADAM, "lr": 1.0}, [torch.ones(3)])
        run.step.fill_(count)
        twin = run.twin()
        grads = [torch.tensor([1e-3, 1.0, 1e3])]
        with by_operators():
            twin.take([g.clone() for g in grads])
        run.take(grads)
        assert far(run.params, twin.params) <= 2, count


@inside
def test_learning_rate_as_a_tensor() -> None:
    run, twin = (Run("adam", {**ADAM, "lr": lr}, [torch.ones(3)]) for lr in (torch.tensor(0.125), 0.125))
    for each in (run, twin):
        each.take([torch.ones(3)])
    assert torch.equal(run.params[0], twin.params[0])


def low_steps(options: dict[str, Any], kept: torch.dtype) -> Callable[[Callable[[], Any]], list[list[Tensor]]]:
    """Ten steps on split masters, by kernels or in a context that says otherwise."""

    def run(context: Callable[[], Any]) -> list[list[Tensor]]:
        with context():
            masters = [p for p in awkward(torch.get_default_device().type) if p.dim() != 2 or p.is_contiguous()]
            halves = [fused.split(p, kept) for p in masters]
            lows, bits = [w for w, _ in halves], [b for _, b in halves]
            states = [[torch.zeros_like(p) for p in masters] for _ in range(3 if options["amsgrad"] else 2)]
            states += [[]] * (3 - len(states))
            step = torch.zeros(())
            for i in range(10):
                grads = gradients(masters, torch.bfloat16, i)
                common = {**options, "factor": torch.tensor(0.5), "found": torch.tensor(float(i == 5))}
                fused.adam_split_(lows, bits, grads, *states, step, **common)
            assert float(step) == 9
            return [lows, bits, *states[:2]]

    return run


@inside
@pytest.mark.parametrize("options", [ADAM, {**ADAM, "amsgrad": True, "decoupled": True, "weight_decay": 0.1}])
@pytest.mark.parametrize(("kept", "units"), [(torch.int16, STEP_ULP), (torch.int8, 2 * 256)])
def test_split_masters(options: dict[str, Any], kept: torch.dtype, units: int) -> None:
    """A last bit of float32 may decide to which of two numbers of 24 bits a master is rounded, seldom twice."""
    run = low_steps(options, kept)
    (lows, bits, *_), (lows_, bits_, *_) = run(nullcontext), run(by_operators)
    masters, theirs = list(map(fused.join, lows, bits)), list(map(fused.join, lows_, bits_))
    assert far(masters, theirs) <= units
    equal = sum(int((a == b).sum()) for a, b in zip(masters, theirs, strict=True))
    assert equal >= 0.9 * sum(a.numel() for a in masters)


@inside
@pytest.mark.parametrize("options", [SGD, {**SGD, "momentum": 0.0}, {**SGD, "nesterov": True, "weight_decay": 0.1}])
@pytest.mark.parametrize("kind", [torch.int16, torch.int8, None], ids=["split", "24 bits", "by chance"])
def test_sgd_of_bfloat16_weights(options: dict[str, Any], kind: torch.dtype | None) -> None:
    results = []
    for context in (by_operators, nullcontext):
        masters = [p for p in awkward(torch.get_default_device().type) if p.dim() != 2 or p.is_contiguous()]
        halves = [fused.split(p, kind or torch.int16) for p in masters]
        lows, bits = [w for w, _ in halves], [b for _, b in halves] if kind else None
        states, step = [torch.zeros_like(p) for p in masters], torch.zeros(())
        with context():
            for i in range(3):
                found = torch.tensor(float(i == 1))
                common = {**options, "first": i == 0, "seed": 7, "stochastic_rounding": kind is None, "found": found}
                grads = gradients(masters, torch.bfloat16, i)
                fused.sgd_(lows, grads, states if options["momentum"] else [], None, step=step, bits=bits, **common)
        assert float(step) == 2
        results.append([w.float() for w in lows] if bits is None else list(map(fused.join, lows, bits)))
    assert far(*results) <= {torch.int16: STEP_ULP, torch.int8: 256, None: 2**16}[kind]
    equal = sum(int((a == b).sum()) for a, b in zip(*results, strict=True))
    assert equal >= 0.9 * sum(a.numel() for a in results[0])


@inside
@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_weights_that_were_zeroed_since_are_no_nan(states: str) -> None:
    """Split masters keep the bits below a weight, and a zero with a negative distance is no number's half."""
    weights, bits = (list(half) for half in zip(*[fused.split(torch.randn(3000))], strict=True))
    weights[0][:2000] = 0
    weights[0][1000:2000].neg_()
    assert bool((bits[0][:2000] < 0).any())
    twins = [t.clone() for t in (*weights, *bits)]
    results = []
    for context, weight, rest in ((nullcontext, weights[0], bits[0]), (by_operators, *twins)):
        grads, step = [torch.ones_like(weight)], torch.zeros(())
        options = {name: value for name, value in ADAM.items() if name != "amsgrad"}
        with context():
            if states == "8bit":
                codes = [torch.zeros(3000, dtype=kind) for kind in (torch.int8, torch.uint8)]
                scales = [torch.zeros(12) for _ in range(2)]
                fused.adam_8bit_(
                    [weight], grads, codes[:1], scales[:1], codes[1:], scales[1:], None, step, bits=[rest], **options
                )
            else:
                moments = [[torch.zeros(3000)] for _ in range(2)]
                fused.adam_split_([weight], [rest], grads, *moments, [], step, **ADAM)
        results.append(fused.join(weight, rest))
    assert results[0].isfinite().all()
    assert far(results[:1], results[1:]) <= STEP_ULP


@inside
@pytest.mark.parametrize("kept", [None, torch.int8], ids=["weights", "24 bits"])
def test_chances_are_the_same_everywhere(kept: torch.dtype | None) -> None:
    """Kernels and operators round up and down in the same places."""
    low = [torch.randn(3000).bfloat16(), torch.randn(70).bfloat16()]
    results = []
    for context in (by_operators, nullcontext):
        lows = [p.clone() for p in low]
        states = [[torch.zeros(p.shape) for p in low] for _ in range(2)]
        grads, step = [torch.ones_like(p) for p in low], torch.zeros(())
        with context():  # the first step of Adam is the learning rate, a part of the spacing
            if kept is None:
                fused.adam_stochastic_(lows, grads, *states, [], step, seed=77, **{**ADAM, "lr": 2.0**-10})
            else:
                bits = [torch.zeros_like(p, dtype=kept) for p in low]
                fused.adam_split_(lows, bits, grads, *states, [], step, seed=77, **{**ADAM, "lr": 2.0**-18})
                lows = list(map(fused.join, lows, bits))
        results.append(lows)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert any(not torch.equal(a.to(b.dtype), b) for a, b in zip(low, results[0], strict=True))
