"""Lightning Fabric's loop with the plugin trains as a plain loop with a session, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import PreampWarning, SessionError

pytest.importorskip("lightning")
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy

from preamp.integrations.fabric import PreampPrecision
from preamp.integrations.lightning import PreampPrecision as TrainerPrecision

from .loops import CASES, CLIP, MAKERS, MICRO, STEPS, data, network, plain

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", f"error::{PreampWarning.__module__}.PreampWarning"
)
HALF = 20
"""The step after which a run is saved."""


MADE: list[PreampPrecision] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def fabric_with(precision: PreampPrecision) -> Fabric:
    MADE.append(precision)
    return Fabric(plugins=[precision], accelerator="cpu", devices=1)


class Run:
    """A Fabric with the plugin, a model and an optimizer. `apart`: set up by calls of their own."""

    def __init__(self, level: str, kind: str = "preamp", kept: Any = PreampPrecision, apart: bool = False) -> None:
        self.precision = kept(level)
        self.fabric = fabric_with(self.precision)
        self.net = network()
        raw = MAKERS[kind](self.net.parameters())
        if apart:
            self.model, self.optimizer = self.fabric.setup_module(self.net), self.fabric.setup_optimizers(raw)
        else:
            self.model, self.optimizer = self.fabric.setup(self.net, raw)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "precision": self.precision}

    def train(self, steps: range, clip: str = "norm") -> None:
        rows = data()
        for i in steps:
            for j, (x, y) in enumerate(rows[i * MICRO : (i + 1) * MICRO]):
                with self.fabric.no_backward_sync(self.model, enabled=j < MICRO - 1):
                    loss = nn.functional.mse_loss(self.model(x), y)
                    self.fabric.backward(loss / MICRO)
            if clip == "norm":
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP, error_if_nonfinite=False)
            elif clip == "value":
                self.fabric.clip_gradients(self.model, self.optimizer, clip_val=CLIP / 10)
            self.optimizer.step()
            self.optimizer.zero_grad()


def assert_same(run: Run, wanted: dict[str, Any], parameters: list[Tensor]) -> None:
    state = run.precision.session.state_dict()
    torch.testing.assert_close(state["masters"], wanted["masters"], rtol=0, atol=0)
    torch.testing.assert_close([p.detach() for p in run.net.parameters()], parameters, rtol=0, atol=0)
    assert {**state, "masters": 0} == {**wanted, "masters": 0} and wanted["skipped"] == 1


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_a_loop_is_a_session_loop(level: str, kind: str) -> None:
    run = Run(level, kind, apart=kind == "fused")
    run.train(range(STEPS))
    assert_same(run, *plain(level, kind, scheduled=False)[:2])
    run.precision.close()
    assert {p.dtype for p in run.net.parameters()} == {torch.float32}


@pytest.mark.parametrize("clip", ["value", ""])
@pytest.mark.parametrize("kept", [PreampPrecision, TrainerPrecision])
def test_clipping_by_value_or_not_by_either_class(kept: Any, clip: str) -> None:
    run = Run("O2", kept=kept)
    run.train(range(STEPS), clip)
    assert_same(run, *plain("O2", "preamp", clip, scheduled=False)[:2])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(
    "when", ["closed", *(pytest.param(when, marks=pytest.mark.slow) for when in ("open", "open, into one that began"))]
)
def test_a_run_resumes_bit_for_bit(level: str, when: str, tmp_path: Path) -> None:
    run = Run(level)
    run.train(range(HALF))
    if when == "closed":
        run.precision.close()
    run.fabric.save(tmp_path / "at.ckpt", run.state)
    saved = torch.load(tmp_path / "at.ckpt", weights_only=True)
    assert {value.dtype for value in saved["model"].values()} == {torch.float32}
    same, x = network(), data()[0][0]
    same.load_state_dict(saved["model"])  # without preamp
    assert when != "closed" or torch.equal(run.model(x), same(x)), "it goes on in float32"
    resumed = Run(level)
    if "began" in when:
        resumed.train(range(2))
    resumed.fabric.load(tmp_path / "at.ckpt", resumed.state)
    resumed.train(range(HALF, STEPS))
    assert_same(resumed, *plain(level, "preamp", scheduled=False)[:2])


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_two_models_and_optimizers(level: str) -> None:
    """Steps of a GAN: each optimizer steps by itself, and the second one only every other time."""

    def loop(first: Any, second: Any, one: Any, two: Any, backward: Any, step: Any) -> None:
        for i in range(12):
            x, y = data()[i]
            backward(nn.functional.mse_loss(first(x), y))
            step(one)
            one.zero_grad(), two.zero_grad()
            if i % 2:
                backward(nn.functional.mse_loss(second(torch.cat([first(x).detach()] * 2, 1)), y))
                step(two)
                two.zero_grad()

    def nets() -> list[nn.Module]:
        return [network(), network()]

    precision = PreampPrecision(level)
    fabric = fabric_with(precision)
    mine = nets()
    first, one = fabric.setup(mine[0], MAKERS["preamp"](mine[0].parameters()))
    second, two = fabric.setup(mine[1], MAKERS["preamp"](mine[1].parameters()))
    loop(first, second, one, two, fabric.backward, lambda optimizer: optimizer.step())

    theirs = nets()
    makers = [MAKERS["preamp"](net.parameters()) for net in theirs]
    session = preamp.prepare(theirs, makers, level=level)
    called = [lambda x, net=net: session.autocast()(net)(x).float() for net in theirs]
    loop(*called, *makers, session.backward, session.step)
    mine_state, wanted = precision.session.state_dict(), session.state_dict()
    torch.testing.assert_close(mine_state.pop("masters"), wanted.pop("masters"), rtol=0, atol=0)
    torch.testing.assert_close([*mine[1].parameters()], [*theirs[1].parameters()], rtol=0, atol=0)
    assert mine_state == wanted
    session.close()
    assert list(precision.session.models.values()) == mine


def test_losses_with_scales_of_their_own_and_autocast() -> None:
    precision = PreampPrecision("O1", losses=("d", "g"))
    fabric = fabric_with(precision)
    net = network()
    model, optimizer = fabric.setup(net, MAKERS["preamp"](net.parameters()))
    x, y = data()[0]
    with fabric.autocast():
        hidden = net[0](x)  # part of the model, called by itself
    assert hidden.dtype is torch.float16 and model(x).dtype is torch.float32
    fabric.backward(nn.functional.mse_loss(model(x), y), name="d")
    with pytest.raises(SessionError, match="several losses"):
        fabric.backward(model(x).sum())
    optimizer.step(lambda: fabric.backward(nn.functional.mse_loss(model(x), y), name="g"))
    assert precision.session.steps == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_model_that_is_set_up_can_be_copied_while_it_trains(level: str) -> None:
    """As for an average of weights: the copy is float32, and runs without a session."""
    run = Run(level)
    run.train(range(3))
    average, x = copy.deepcopy(run.model), data()[0][0]
    with run.precision.session.full_precision():
        torch.testing.assert_close(average(x), run.net(x), rtol=0, atol=0)
    assert {p.dtype for p in average.parameters()} == {torch.float32}
    run.train(range(3, 5))
    assert run.precision.session.steps == 5 and not torch.equal(next(average.parameters()), run.net[0].weight)


@pytest.mark.parametrize("own", [False, True])
def test_what_fabric_hands_out_for_an_optimizer_exchanges_masters(own: bool) -> None:
    """`own`: a session of the loop's own, prepared with what Fabric has set up."""
    schedulefree: Any = pytest.importorskip("schedulefree")
    ends = []
    for level in ("O0", "O5"):
        precision, net = PreampPrecision(level), network()
        fabric = Fabric(accelerator="cpu", devices=1) if own else fabric_with(precision)
        model, optimizer = fabric.setup(net, schedulefree.AdamWScheduleFree(net.parameters(), lr=0.05))
        session = preamp.prepare(model, optimizer, level=level) if own else None
        for _ in range(2):
            optimizer.train()
            for x, y in data()[:6]:
                if session is None:
                    fabric.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                else:
                    session.backward(nn.functional.mse_loss(session.autocast()(model)(x).float(), y))
                    session.step()
                optimizer.zero_grad()
            optimizer.eval()
            optimizer.load_state_dict(optimizer.state_dict())
        (session or precision).close()
        assert not {"train", "eval", "load_state_dict"} & vars(optimizer).keys()
        ends.append(net.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0.02)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?i)received both .precision"):
        Fabric(plugins=[PreampPrecision("O5")], precision="bf16-mixed")
    with pytest.raises(TypeError, match="shard by ModelParallelStrategy"):
        FSDPStrategy(precision=PreampPrecision("O5"))
    run = Run("O2")
    assert run.precision.session.steps == 0
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        run.model(data()[0][0]).sum().backward()
    with pytest.raises(SessionError, match=r"session\.step"):
        run.fabric.backward(run.model(data()[0][0]).sum())
        run.optimizer.optimizer.step()
    late = run.fabric.setup(other := network(), torch.optim.SGD(other.parameters(), 0.1))
    run.fabric.backward(late[0](data()[0][0]).sum() * 0 + run.model(data()[0][0]).sum())
    with pytest.raises(SessionError, match="not one of the session's optimizers"):
        late[1].step()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [PreampPrecision, TrainerPrecision])
def test_no_session_without_an_optimizer_and_none_after_close(kept: Any) -> None:
    precision = kept("O5")
    fabric = fabric_with(precision)
    net = network()
    model = fabric.setup_module(net)
    x, y = data()[0]
    assert model(x).dtype is torch.float32 and precision.state_dict() == {}
    with pytest.raises(SessionError, match="set up the optimizer too"):
        fabric.backward(nn.functional.mse_loss(model(x), y))
    with pytest.raises(SessionError, match=r"no session now.*fabric\.setup"):
        precision.session
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="mat1"):
        model(x[:, :3])  # an exception leaves nothing behind
    assert not torch.is_autocast_enabled("cpu") and net[0].weight.dtype is torch.bfloat16
    fabric.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    precision.close()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    before = net[0].weight.clone()
    fabric.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    assert net[0].weight.ne(before).any() and type(net[0]) is nn.Linear


@pytest.mark.slow
def test_after_close_others_can_be_set_up_beside_the_first() -> None:
    precision = PreampPrecision("O2")
    fabric = fabric_with(precision)
    weights, kept = [], []
    for _ in range(2):
        net = network()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
        kept.append((model, optimizer))
        for x, y in data()[:3]:
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert list(precision.session.optimizers.values()) == [optimizer.optimizer]
        precision.close()
        weights.append(net.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    again = fabric.setup(kept[0][0].module, kept[0][1].optimizer)
    again[0](data()[0][0])
    assert list(precision.session.optimizers.values()) == [kept[0][1].optimizer]
