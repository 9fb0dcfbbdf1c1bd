"""Whole training runs with the model, a block, the loss or the whole step compiled: the same numbers as without.

Accumulation, clipping and a skipped step are in each of them. With the backends eager and aot_eager the arithmetic is
that of the run without a compiler, so all are compared bit for bit; inductor fuses, and rounds 16-bit
values less often.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from preamp.errors import PolicyError

from ..releases import REGIONS_IN_COMPILED_CODE, TORCH
from .runs import LEVELS, OUTPUT, Net, Run, batch, check_same, loss_under, prepared, reference, train

CASES = [(level, backend) for level in LEVELS for backend in ("eager", "aot_eager")]
CASES += [("O4", "inductor"), ("O5", "inductor")]


def marked(quick: set[Any], slow: set[Any]) -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in sorted(quick | slow, key=str)
    ]


BEFORE, AFTER, WHOLE = "model, before prepare", "model, after prepare", "forward and loss"
QUICK = {(level, "eager", what) for level in ("O2", "O5") for what in (BEFORE, AFTER, WHOLE)}
QUICK |= {("O0", "eager", AFTER), ("O1", "eager", BEFORE), ("O4", "eager", WHOLE)}
QUICK |= {("O2", "aot_eager", BEFORE), ("O5", "aot_eager", WHOLE)}
RUNS = marked(QUICK, {(*case, what) for case in CASES for what in (BEFORE, AFTER, WHOLE)})
ONE, TWO = ("loss",), ("d", "g")
STEPS = marked(
    {("O0", ONE, "eager"), ("O1", TWO, "eager"), ("O5", ONE, "eager")},
    {(level, losses, backend) for level, backend in CASES for losses in (ONE, TWO) if backend != "inductor"}
    | {("O4", ONE, "inductor"), ("O5", ONE, "inductor")},
)
SIZES = marked({("O1", None, 2)}, {(level, *how) for level in LEVELS for how in ((True, 1), (None, 2))})


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # inductor's own
        warnings.filterwarnings("ignore", ".*not a leaf Tensor is being accessed", UserWarning)  # dynamo's own
        yield
    torch._dynamo.reset()


def compiler(backend: str, **given: Any) -> Callable[[Any], Any]:
    return lambda thing: torch.compile(thing, backend=backend, **{"fullgraph": True, **given})


def blocks_in_place(compiled: Callable[[Any], Any], model: Net, backend: str) -> Net:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def blocks_wrapped(compiled: Callable[[Any], Any], model: Net, backend: str) -> Net:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(block)
    return model


REGIONAL = {"block.compile()": blocks_in_place, "torch.compile(block)": blocks_wrapped}


def tolerance(backend: str) -> float:
    return 2e-2 if backend == "inductor" else 0.0


@pytest.mark.parametrize(("level", "backend", "what"), RUNS)
def test_a_compiled_run_is_the_plain_one(level: str, backend: str, what: str) -> None:
    if what == WHOLE and TORCH < (2, 7):
        pytest.skip("torch 2.6 traces no region of another class")
    compiled = compiler(backend)
    if what == BEFORE:
        ours = train(level, compiled(Net()))
    elif what == AFTER:
        ours = train(level, after=compiled)
    else:
        ours = train(level, whole=compiled)
    assert counters["stats"]["unique_graphs"] == 1
    check_same(ours, reference(level), tolerance(backend))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", REGIONAL)
@pytest.mark.parametrize(("level", "backend"), CASES)
def test_equal_blocks_share_one_graph(level: str, how: str, when: str, backend: str) -> None:
    model = Net()

    def regional(model: nn.Module) -> nn.Module:
        assert isinstance(model, Net)
        return REGIONAL[how](compiler(backend), model, backend)

    ours = train(level, regional(model)) if when == "before" else train(level, model, after=regional)
    assert counters["stats"]["unique_graphs"] == 1
    check_same(ours, reference(level), tolerance(backend))


@pytest.mark.parametrize(("level", "how", "pattern"), [
    ("O2", "block.compile()", r"blocks\.1"), ("O4", "block.compile()", r"blocks\.\d+\.qkv"),
    ("O4", "torch.compile(block)", r"blocks\.1"), ("O2", "torch.compile(block)", r"blocks\.\d+\.qkv"),
    ("O4", "torch.compile(block)", r"blocks\.[01].*"),
])  # fmt: skip
def test_exceptions_hold_for_compiled_blocks(level: str, how: str, pattern: str) -> None:
    """torch.compile(block) hands calls on past its own class, and adds a name to the paths of what is inside."""
    policy = f"{level}; {pattern} -> full"
    ours = train(level, REGIONAL[how](compiler("eager"), Net(), "eager"), policy=policy)
    plain = reference(level, policy=policy)
    check_same(ours, plain)
    assert any(not torch.equal(a, b) for a, b in zip(plain.grads, reference(level).grads, strict=True))


def test_two_exceptions_for_a_compiled_block_are_refused_as_for_any() -> None:
    model = blocks_wrapped(compiler("eager"), Net(), "eager")
    with pytest.raises(PolicyError, match="several rules"):
        prepared(model, "O4", policy=r"O4; blocks\.\d -> full; .*\.2 -> fp16")
    with pytest.raises(PolicyError, match="no module matches"):
        prepared(model, "O4", policy=r"O4; block\.\d -> full")


@pytest.mark.slow
@pytest.mark.parametrize(("level", "dynamic", "graphs"), SIZES)
def test_batches_of_two_sizes_do_not_compile_again_and_again(level: str, dynamic: bool | None, graphs: int) -> None:
    """`dynamic=None` compiles for the first size, then once for all."""
    sizes = (4, 7, 5)
    ours = train(level, whole=compiler("aot_eager", dynamic=dynamic), sizes=sizes)
    assert counters["stats"]["unique_graphs"] == graphs
    check_same(ours, reference(level, sizes=sizes))


def whole_steps(level: str, compiled: Callable[[Any], Any], losses: tuple[str, ...]) -> Run:
    model, run = Net(), Run()
    first: dict[Tensor, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        if parameter not in first and parameter.grad is not None:
            first[parameter] = parameter.grad.clone()

    with prepared(model, level, losses=losses) as session:
        loss_of = loss_under(session, model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(keep)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(x, y)
            session.backward(loss, name=losses[0])
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()
            return loss.detach()

        step = compiled(step)
        for i in range(5):
            run.losses.append(float(step(*batch(i, bad=i == 2))))
            assert session.last_step is not None
            run.skips.append(session.last_step.skipped)
            run.scales.append(session.loss_scale(losses[0]))
        run.weights = [p.detach().clone() for p in model.parameters()]
    run.grads = [first[p] for p in model.parameters()]
    return run


@REGIONS_IN_COMPILED_CODE
@pytest.mark.parametrize(("level", "losses", "backend"), STEPS, ids=str)
def test_a_whole_step_compiles_its_forward_pass_and_leaves_the_rest_as_written(
    level: str, losses: tuple[str, ...], backend: str
) -> None:
    plain = whole_steps(level, lambda function: function, losses)
    counters.clear()
    ours = whole_steps(level, compiler(backend, fullgraph=False), losses)
    check_same(ours, plain, tolerance(backend))
    assert counters["stats"]["unique_graphs"] <= 2  # forward pass and loss; loss.detach()
    assert counters["frames"]["total"] <= 12  # and none inside of backward and step, which have a hundred
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


def test_evaluation_in_a_compiled_model_between_steps() -> None:
    """Without gradients, in a region and in full precision, with one compiled model."""
    for level in ("O1", "O5"):
        torch._dynamo.reset()
        model = Net()
        run = torch.compile(model, backend="eager", fullgraph=True)
        with prepared(model, level) as session:
            for step in range(2):
                x, y = batch(step)
                with torch.no_grad(), session.autocast():
                    assert torch.equal(run(x), model(x))
                with torch.no_grad(), session.full_precision():
                    assert run(x).dtype is torch.float32 and torch.equal(run(x), model(x))
                with session.autocast():
                    out = run(x)
                    loss = nn.functional.cross_entropy(out, y)
                assert out.dtype is OUTPUT[level]
                session.backward(loss)
                session.step()
                session.zero_grad()
