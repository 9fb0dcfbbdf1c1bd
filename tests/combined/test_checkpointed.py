"""Activation checkpointing in whole training runs: bit for bit the run that keeps all activations.

Recomputation happens in backward, where a session may have dropped its low copies of weights, or still keep them for
the next micro-batch; and in a step that is skipped it recomputes infinities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

import preamp

from ..rows import over
from .runs import LEVELS, Net, batch, check_same, loss_under, prepared, reference, train

Through = Callable[[nn.Module, Tensor], Tensor]
ATEN = torch.ops.aten
PRODUCTS = [ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default]


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return plain(functools.partial(plain, block), x)  # type: ignore[arg-type]


def nested_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return reentrant(functools.partial(reentrant, block), x)  # type: ignore[arg-type]


def everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


def casts(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is ATEN._to_copy.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keeping(what: Any) -> Through:
    def through(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, context_fn=functools.partial(selective, what))

    return through


KINDS: dict[str, Through] = {
    "reentrant": reentrant,
    "not reentrant": plain,
    "nested": nested,
    "nested, reentrant": nested_reentrant,
    "selective, products": keeping(PRODUCTS),
    "selective, casts": keeping(casts),
    "selective, everything": keeping(everything),
}


RUNS = [(level, kind) for kind in KINDS for level in ("O2", "O4", "O5")]
RUNS += [(level, kind) for kind in ("reentrant", "not reentrant") for level in LEVELS if (level, kind) not in RUNS]


@pytest.mark.parametrize(("level", "kind"), RUNS)
def test_runs_with_accumulation_and_a_skip(level: str, kind: str) -> None:
    check_same(train(level, Net(KINDS[kind])), reference(level))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_region_that_keeps_no_casts_lets_a_policy_save_them(level: str) -> None:
    """What a session that saw no recomputation in its first step cannot do: preamp.autocast for session.autocast."""

    def grads(through: Through | None) -> list[Tensor]:
        model = Net(through)
        with prepared(model, level) as session:
            for i in range(3):
                x, y = batch(i)
                with preamp.autocast("cpu", session.policy.compute):
                    loss = nn.functional.cross_entropy(model(x), y)
                session.backward(loss, sync=i == 2)
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, grads(KINDS["selective, casts"]), grads(None)))


@pytest.mark.parametrize("level", LEVELS)
def test_recomputation_is_as_often_as_it_should_be(level: str) -> None:
    """The runs above would be alike if nothing were recomputed."""
    calls = []

    def counted(block: nn.Module, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            calls.append(torch.is_autocast_enabled("cpu"))
            return block(x)

        return plain(run, x)  # type: ignore[arg-type]

    model = Net(counted)
    with prepared(model, level) as session:
        loss = loss_under(session, model)(*batch(0))
        assert len(calls) == 3
        session.backward(loss)
        assert calls == [level != "O0"] * 6


@over(level=LEVELS, when=["before", "after"])
def test_the_wrapper_module(level: str, when: str) -> None:
    model = Net()

    def wrapped(model: nn.Module) -> nn.Module:
        assert isinstance(model, Net)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return model

    ours = train(level, wrapped(model)) if when == "before" else train(level, model, after=wrapped)
    check_same(ours, reference(level))


@over(level=LEVELS, kind=[True, False])
def test_checkpoint_sequential(level: str, kind: bool) -> None:
    class Sequence(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint_sequential(nn.Sequential(*self.blocks), 2, self.first(x), use_reentrant=kind)
            return self.head(hidden.mean(1))

    check_same(train(level, Sequence()), reference(level))


@over(level=LEVELS, backward=["no region", "session's region", "other region"])
def test_backward_may_run_inside_or_outside_of_regions(level: str, backward: str) -> None:
    """torch restores the forward pass's region when it recomputes, whatever is around backward."""

    def grads(through: Through | None, around: bool) -> list[Tensor]:
        model = Net(through)
        with prepared(model, level) as session:
            loss = loss_under(session, model)(*batch(0))
            if backward == "session's region" and around:
                with session.autocast():
                    session.backward(loss)
            elif backward == "other region" and around:
                with torch.autocast("cpu", enabled=False):
                    session.backward(loss)
            else:
                session.backward(loss)
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for kind in (plain, reentrant):
        for ours, theirs in zip(grads(kind, True), grads(kind, False), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_inside_of_compiled_code(level: str) -> None:
    """One graph, checkpoints included; aot_eager recomputes what they say."""
    for through, backend in ((plain, "eager"), (plain, "aot_eager"), (keeping(PRODUCTS), "aot_eager")):
        if backend == "aot_eager" and level != "O5":  # it is the backends that know of checkpoints, and it takes long
            continue
        torch._dynamo.reset()

        def compiled(function: Any) -> Any:
            return torch.compile(function, backend=backend, fullgraph=True)  # noqa: B023

        check_same(train(level, Net(through), whole=compiled), reference(level))
    torch._dynamo.reset()
