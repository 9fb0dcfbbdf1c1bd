"""fastai's Learner trains as a plain loop with a session, bit for bit. `test_scalers` runs these where fastai is."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import SessionError, StateError

basics: Any = pytest.importorskip("fastai.basics")
callbacks: Any = pytest.importorskip("fastai.callback.all")

from fastai.optimizer import SGD, Adam, Lamb, OptimWrapper, ranger  # noqa: E402

from preamp.integrations.fastai import FastaiOptimizer, PreampCallback  # noqa: E402

from .loops import CLIP, MICRO, STEPS, data, network  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZERS: dict[str, Any] = {
    "Adam": Adam,
    "SGD": partial(SGD, mom=0.9),
    "ranger": ranger,
    "Lamb": Lamb,
    "preamp": partial(OptimWrapper, opt=partial(preamp.optim.AdamW, eps=1e-4)),
    "fused": partial(OptimWrapper, opt=partial(torch.optim.AdamW, eps=1e-4, fused=True)),
}
SLOW = [("O0", "Adam"), ("O4", "Adam"), ("O2", "Adam"), ("O5", "SGD"), ("O2", "Lamb")]
CASES = [("O1", "Adam"), ("O3", "Adam"), ("O5", "Adam"), ("O2", "ranger"), ("O2", "preamp"), ("O5", "fused")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]  # type: ignore[misc]
LR, WD, AT = 1e-2, 0.1, 20


def loss_of(outputs: Tensor, wanted: Tensor) -> Tensor:
    assert outputs.dtype is torch.float32
    return nn.functional.mse_loss(outputs, wanted)


def halves(model: nn.Sequential) -> list[list[nn.Parameter]]:
    """Two groups, which fastai freezes and schedules apart."""
    return [list(model[:2].parameters()), list(model[2:].parameters())]


def learner(folder: Path, kind: str = "Adam", rows: Any = None, **options: Any) -> Any:
    rows = data() if rows is None else rows
    loaders = [torch.utils.data.DataLoader(each, batch_size=None) for each in (rows, data()[-4:])]
    learn = basics.Learner(
        basics.DataLoaders(*loaders, device="cpu"), network(), loss_func=loss_of, opt_func=OPTIMIZERS[kind],
        path=folder, splitter=halves, **options,
    )  # fmt: skip
    return learn.remove_cb(callbacks.ProgressCallback)


def bits(learn: Any) -> list[Tensor]:
    return [p.detach().clone() for p in learn.model.parameters()]


def moments(opt: Any) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    found: list[Tensor] = []
    basics.apply(lambda x: found.append(x.clone()) if isinstance(x, Tensor) else x, opt.state_dict())
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Counts(callbacks.Callback):
    """Counts cancelled steps, and looks at gradients as a callback for them does."""

    order = 20

    def __init__(self) -> None:
        self.cancelled, self.seen = 0, set[torch.dtype]()

    def before_step(self) -> None:
        self.seen |= {p.grad.dtype for p in self.learn.model.parameters()}

    def after_cancel_step(self) -> None:
        self.cancelled += 1


def plain(level: str, kind: str) -> tuple[list[Tensor], list[Tensor], float]:
    """A loop that knows sessions: weights, moments and loss scale."""
    model = network()
    opt = OPTIMIZERS[kind](halves(model), lr=LR)
    optimizer = opt.opt if isinstance(opt, OptimWrapper) else FastaiOptimizer(opt)
    opt.set_hypers(wd=WD)
    for parameter in basics.norm_bias_params(model):
        opt.state[parameter]["do_wd"] = False  # as Learner has it
    with preamp.prepare(model, optimizer, level=level) as session:
        for i in range(STEPS):
            for x, y in data()[i * MICRO : (i + 1) * MICRO]:
                with session.autocast():
                    loss = loss_of(model(x).float(), y)
                session.backward(loss / MICRO)
            session.unscale_()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            session.step()
            opt.zero_grad()
        scale = session.loss_scale()
    return [p.detach().clone() for p in model.parameters()], moments(opt), scale


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_fits_and_a_resumed_run_are_one_session_loop(level: str, kind: str, tmp_path: Path) -> None:
    """20 steps in two fits, a file, and 10 steps by a learner that has loaded it; one of the 30 is skipped."""
    counts = Counts()
    cbs = [callbacks.GradientAccumulation(4 * MICRO), callbacks.GradientClip(CLIP), counts]
    first = learner(tmp_path, kind, data()[: AT // 2 * MICRO], cbs=cbs).to_preamp(level)
    first.fit(1, LR, wd=WD)
    first.dls.loaders[0] = torch.utils.data.DataLoader(data()[AT // 2 * MICRO : AT * MICRO], batch_size=None)
    first.fit(1, LR, wd=WD)
    assert counts.cancelled == 1 and (first.preamp.state_dict()["steps"], first.preamp.state_dict()["skipped"]) == (
        AT,
        1,
    )
    assert counts.seen == ({torch.float32} if level != "O3" else {torch.float16})
    first.save("at20")
    cbs = [callbacks.GradientAccumulation(4 * MICRO), callbacks.GradientClip(CLIP), PreampCallback(level)]
    resumed = learner(tmp_path, kind, data()[AT * MICRO :], cbs=cbs)
    resumed.load("at20")
    resumed.fit(1, LR, wd=WD)
    weights, states, scale = plain(level, kind)
    state = resumed.preamp.state_dict()
    assert (state["steps"], state["skipped"], state["losses"]["loss"].get("scale", 1.0)) == (STEPS, 1, scale)
    assert states and same(moments(resumed.opt), states) and same(bits(resumed), weights)
    assert {p.dtype for p in resumed.model.parameters()} == {torch.float32} == {each.dtype for each in states}


@pytest.mark.parametrize("kind", ["ranger", "fused"])
def test_at_O0_a_learner_trains_as_without_preamp(kind: str, tmp_path: Path) -> None:
    """Frozen, thawed, with schedules and a new optimizer."""

    def trained(*cbs: Any) -> Any:
        learn = learner(tmp_path, kind, data()[-12:], cbs=[callbacks.GradientClip(CLIP), *cbs])
        learn.fine_tune(1, 1e-2)
        learn.fit_one_cycle(2, 1e-2)
        learn.fit(1, 1e-3, reset_opt=True)
        return learn

    ours, stock = trained(PreampCallback("O0")), trained()
    assert ours.preamp.state_dict()["steps"] == 5 * 12
    assert same(bits(ours), bits(stock)) and same(moments(ours.opt), moments(stock.opt))
    assert torch.equal(torch.tensor(ours.recorder.lrs), torch.tensor(stock.recorder.lrs))


@pytest.mark.parametrize("kind", ["Adam", "preamp"])
def test_frozen_groups_and_new_optimizers(kind: str, tmp_path: Path) -> None:
    learn = learner(tmp_path, kind, data()[-12:]).to_preamp("O2")
    before = bits(learn)
    learn.freeze()
    learn.fit(1, LR)
    linear = [0, 1]  # the norm of a frozen group trains, as fastai has it
    assert all(torch.equal(before[i], bits(learn)[i]) for i in linear) and not same(before, bits(learn))
    learn.unfreeze()
    learn.fit_one_cycle(1, LR)
    assert not any(torch.equal(before[i], bits(learn)[i]) for i in linear)
    opt = learn.opt
    learn.fit(1, LR, reset_opt=True)
    assert learn.opt is not opt and learn.preamp.state_dict()["steps"] == 36

    class Anew(callbacks.Callback):
        def before_train(self) -> None:
            self.learn.create_opt()

    before, opt = bits(learn), learn.opt
    learn.fit(2, LR, cbs=Anew())
    assert learn.opt is not opt and learn.preamp.state_dict()["steps"] == 60 and not same(bits(learn), before)
    assert "step" not in vars(opt) and "step" not in vars(learn.opt)


@pytest.mark.parametrize(
    ("level", "kind"),
    [("O2", "ranger"), pytest.param("O2", "Adam", marks=pytest.mark.slow), ("O5", "preamp")],
)
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_lr_find_leaves_no_trace(level: str, kind: str, trained: bool, tmp_path: Path) -> None:
    rows, held = data()[: 9 * MICRO], data()[-12:]
    learn = learner(tmp_path, kind, rows).to_preamp(level)
    other = learner(tmp_path, kind, rows).to_preamp(level)
    for each in (learn, other):
        if trained:
            each.fit(1, LR)
            assert each.preamp.state_dict()["skipped"] >= 1
        each.dls.loaders[0] = torch.utils.data.DataLoader(held, batch_size=None)
    before, states, kept = bits(learn), moments(learn.opt) if trained else [], learn.preamp._last
    found = learn.lr_find(start_lr=1e-4, end_lr=1e5, num_it=30, show_plot=False)
    assert 1e-4 < found.valley < 1e5
    assert same(bits(learn), before) and same(moments(learn.opt), states) and learn.preamp._last == kept
    learn.fit(1, LR)
    other.fit(1, LR)
    assert same(bits(learn), bits(other)) and same(moments(learn.opt), moments(other.opt))
    assert learn.preamp._last == other.preamp._last


@pytest.mark.parametrize(("level", "kind"), [("O2", "Adam"), ("O5", "fused")])
def test_files_have_float32_weights_and_load_without_preamp(level: str, kind: str, tmp_path: Path) -> None:
    saves = callbacks.SaveModelCallback(fname="best", with_opt=True)
    stops = callbacks.EarlyStoppingCallback(patience=2)
    learn = learner(tmp_path, kind, data()[-12:], cbs=[saves, stops]).to_preamp(level)
    learn.fit(8, 0.3)  # ends with the best weights
    best = torch.load(tmp_path / "models" / "best.pth", weights_only=False)
    assert {each.dtype for each in best["model"].values()} == {torch.float32}
    assert same([*best["model"].values()], bits(learn))
    assert best["opt"]["preamp"]["steps"] % 12 == 0 and best["opt"]["preamp"]["steps"] > 0
    assert learn.preamp._last == best["opt"]["preamp"]
    stock = learner(tmp_path, kind)
    stock.load("best")
    assert same(bits(stock), bits(learn)) and same(moments(stock.opt), moments(learn.opt))
    held = learn.remove_cbs([saves, stops]).dls[1]
    wanted = learn.get_preds(dl=held)[0]
    assert torch.equal(wanted, stock.get_preds(dl=held)[0]) and learn.validate()[0] == stock.validate()[0]


@pytest.mark.parametrize("level", ["O2", pytest.param("O4", marks=pytest.mark.slow)])
def test_a_tabular_learner_predicts_and_is_exported(level: str, tmp_path: Path) -> None:
    tabular: Any = pytest.importorskip("fastai.tabular.all")
    torch.manual_seed(0)
    frame = tabular.pd.DataFrame({"kind": ["a", "b", "c", "d"] * 16, "x": torch.randn(64).numpy()})
    frame["y"] = (frame.x > 0) ^ (frame.kind == "a")
    loaders = tabular.TabularDataLoaders.from_df(
        frame, tmp_path, [tabular.Categorify, tabular.Normalize], ["kind"], ["x"], "y", bs=16, device="cpu",
        valid_idx=range(16), y_block=tabular.CategoryBlock(),
    )  # fmt: skip
    learn = tabular.tabular_learner(loaders, layers=[8], metrics=tabular.accuracy).remove_cb(callbacks.ProgressCallback)
    learn.to_preamp(level).fit_one_cycle(4, 1e-2)
    wanted, state = learn.get_preds()[0], learn.preamp._last
    learn.export("learner.pkl")
    assert b"preamp" not in (tmp_path / "learner.pkl").read_bytes()
    loaded = basics.load_learner(tmp_path / "learner.pkl")
    assert torch.equal(loaded.get_preds(dl=learn.dls.valid)[0], wanted)
    assert torch.equal(loaded.predict(frame.iloc[3])[2], learn.predict(frame.iloc[3])[2])
    assert learn.preamp._last == state
    learn.fit(1, LR)  # with the optimizer that `export` has made
    assert learn.preamp.state_dict()["steps"] == 5 * 3


def test_the_progress_table(tmp_path: Path) -> None:
    def mae(outputs: Tensor, wanted: Tensor) -> Tensor:
        return (outputs - wanted).abs().mean()

    learn = learner(tmp_path, rows=data()[: 9 * MICRO], metrics=mae).to_preamp("O2")
    with pytest.raises(SessionError, match="no session now"):
        learn.preamp.session
    learn.fit(1, LR)
    names = ["epoch", "train_loss", "valid_loss", "mae", "loss_scale", "skipped_steps", "time"]
    state = learn.preamp.state_dict()
    assert list(learn.recorder.metric_names) == names and state["skipped"] >= 1
    assert list(learn.recorder.values[-1][-2:]) == [state["losses"]["loss"].get("scale", 1.0), state["skipped"]]
    assert len(learn.validate()) == 2 and len(learn.metrics) == 1
    silent = learner(tmp_path, rows=data()[-4:], metrics=mae).to_preamp("O2", log=False, scale=8.0)
    silent.fit(1, LR)
    assert (
        "loss_scale" not in silent.recorder.metric_names
        and silent.preamp.state_dict()["losses"]["loss"].get("scale", 1.0) == 8.0
    )


def test_a_fit_without_a_batch_that_trains(tmp_path: Path) -> None:
    class Validates(callbacks.Callback):
        def before_train(self) -> None:
            raise basics.CancelTrainException

    learn = learner(tmp_path).to_preamp("O2")
    learn.fit(1, LR, cbs=Validates())
    assert list(learn.recorder.values[-1][-2:]) == [None, None]


class Interrupts(callbacks.Callback):
    """Presses Ctrl-C in the middle of a batch."""

    def after_pred(self) -> None:
        if self.learn.training and self.learn.iter == 5:
            raise KeyboardInterrupt


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_an_interrupt_and_the_way_back(level: str, tmp_path: Path) -> None:
    learn = learner(tmp_path, "preamp", data()[-12:])
    assert learn.to_preamp(level) is learn
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, LR, cbs=Interrupts())
    assert not torch.is_autocast_enabled("cpu") and learn.preamp.state_dict()["steps"] == 5
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32} and type(learn.model) is nn.Sequential
    assert "step" not in vars(learn.opt)
    learn.save("interrupted")
    learn.fit(1, LR)
    assert learn.preamp.state_dict()["steps"] == 17
    assert learn.to_fp32() is learn
    assert not hasattr(learn, "preamp") and not {"fit", "save", "load", "export", "to_fp32"} & set(vars(learn))
    learn.fit(1, LR)


def test_what_casts_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="MixedPrecision, which casts by itself"):
        learner(tmp_path).to_fp16().to_preamp("O2")
    learn = learner(tmp_path).to_preamp("O2").to_bf16()
    with pytest.raises(SessionError, match="leave out to_fp16"):
        learn.fit(1, LR)
    learn = learner(tmp_path).to_preamp("O2")
    learn.add_cb(callbacks.ModelToHalf())
    with pytest.raises(SessionError, match="ModelToHalf, which casts"):
        learn.fit(1, LR)
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    learn = learner(tmp_path).to_preamp("O2")
    with pytest.raises(SessionError, match="has a PreampCallback already"):
        learn.to_preamp("O5")
    learn.to_fp32().to_preamp("O5")


def test_a_file_of_another_level_is_refused(tmp_path: Path) -> None:
    learn = learner(tmp_path, "Adam", data()[-12:]).to_preamp("O2")
    learn.fit(1, LR)
    learn.save("O2")
    other = learner(tmp_path, "Adam", data()[-12:]).to_preamp("O5")
    other.load("O2")
    for _ in range(2):
        with pytest.raises(StateError, match="made under the policy"):
            other.fit(1, LR)
    other.fit(0)
    assert same(bits(other), bits(learn))
    other.to_fp32().to_preamp("O5")  # goes on with its weights and moments
    other.fit(1, LR)


class Nested(callbacks.Callback):
    """Validates, and saves and loads everything, in the middle of gradients that add up."""

    order = 70

    def after_batch(self) -> None:
        if self.learn.training and self.learn.iter == 2:
            self.learn.save("nested")
            self.learn.load("nested")

    def after_epoch(self) -> None:
        learn = self.learn
        with learn.removed_cbs([self, learn.gradient_accumulation]):  # which would begin to count anew
            learn.validate()


def test_saving_and_validating_in_a_fit_changes_nothing(tmp_path: Path) -> None:
    def trained(*cbs: Any) -> Any:
        cbs = (callbacks.GradientAccumulation(8), callbacks.GradientClip(CLIP), *cbs)
        learn = learner(tmp_path, "Adam", data()[-13:], cbs=cbs).to_preamp("O2")
        learn.fit(2, LR)
        learn.fit(1, LR)  # with a gradient that is left over
        return learn

    nested, plainly = trained(Nested()), trained()
    assert same(bits(nested), bits(plainly)) and nested.preamp._last == plainly.preamp._last
    assert nested.preamp.state_dict()["steps"] == 2 * 13 // 2 + 13 // 2
    copied = copy.deepcopy(nested)
    for each in (copied, nested):
        each.opt.zero_grad()  # torch does not copy gradients
        each.fit(1, LR)
    assert same(bits(copied), bits(nested)) and copied.preamp.learn is copied
