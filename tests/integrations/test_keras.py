"""Keras's `model.fit` with the torch backend trains as a plain loop with a session, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import preamp
from preamp.errors import SessionError

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when keras is imported
keras: Any = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("another backend of Keras is in use", allow_module_level=True)

from preamp.integrations.keras import KerasOptimizer, attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

BATCH, STEPS, AT, BAD = 4, 30, 20, 7
MAKERS: dict[str, Any] = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "accumulating": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(1e-2, STEPS), 0.9, gradient_accumulation_steps=2, global_clipnorm=0.05
    ),
}
CASES = [
    ("O1", "adam"), ("O4", "accumulating"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("O0", "adam"), ("O1", "accumulating"))),
]  # fmt: skip


def network(policy: Any = "float32") -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)), layers.Dense(8, dtype=policy, name="first"),
            layers.LayerNormalization(dtype=policy, name="norm"),
            layers.Activation("gelu", dtype=policy), layers.Dense(3, name="head"),
        ],
        name="net",
    )  # fmt: skip


def rows(first: int = 0, last: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Batches of four; one overflows."""
    random = np.random.RandomState(1)
    x, y = random.randn(50 * BATCH, 6).astype("float32"), random.randn(50 * BATCH, 3).astype("float32")
    x[BAD * BATCH] = np.inf
    return x[first * BATCH : last * BATCH], y[first * BATCH : last * BATCH]


def compiled(kind: str, level: str | None, model: Any = None, **options: Any) -> tuple[Any, Any]:
    """A model, and its attachment."""
    model = network() if model is None else model
    model.compile(optimizer=MAKERS[kind](), loss="mse", metrics=["mae"])
    return model, level and attach(model, level, **options)


def fit(model: Any, first: int = 0, last: int = STEPS, **options: Any) -> Any:
    return model.fit(*rows(first, last), batch_size=BATCH, shuffle=False, verbose=0, **options)


def bits(model: Any) -> list[Tensor]:
    return [variable.value.detach().clone() for variable in model.variables]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def plain(level: str, kind: str) -> tuple[list[Tensor], tuple[int, int, float]]:
    """A loop that knows sessions."""
    model, loss_of = network(), keras.losses.MeanSquaredError()
    optimizer = KerasOptimizer(MAKERS[kind](), model.trainable_variables)
    with preamp.prepare(model, optimizer, level=level) as session:
        for i in range(STEPS):
            x, y = map(torch.from_numpy, rows(i, i + 1))
            with session.autocast():
                loss = loss_of(y, model(x, training=True))
            session.backward(loss)
            session.step()
            session.zero_grad()
        return bits(model), (session.steps, session.skipped, session.loss_scale())


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_a_resumed_fit_is_a_session_loop(level: str, kind: str, tmp_path: Path) -> None:
    """20 steps, files, and 10 steps by a model that has loaded them; one of the 30 is skipped."""
    model, first = compiled(kind, level)
    history = fit(model, 0, AT, validation_data=rows(AT, AT + 2)).history
    skipped = first.session.skipped
    assert history["skipped_steps"] == [skipped] and history["loss_scale"] == [first.session.loss_scale()]
    assert kind != "adam" or int(model.optimizer.iterations) == AT - skipped
    model.save(tmp_path / "model.keras")
    first.close()
    torch.save(first.state_dict(), tmp_path / "amp.pt")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    resumed = attach(loaded, level)
    resumed.load_state_dict(torch.load(tmp_path / "amp.pt", weights_only=True))
    fit(loaded, AT)
    session = resumed.session
    counts = session.steps, session.skipped, session.loss_scale()
    resumed.close()
    wanted, its = plain(level, kind)
    assert same(bits(loaded), wanted) and counts == its and its[1] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "accumulating"])
def test_at_O0_a_model_trains_as_without_preamp(kind: str) -> None:
    def trained(level: str | None) -> tuple[list[Tensor], dict[str, Any]]:
        model, attached = compiled(kind, level, **({"log": False} if level else {}))
        stops = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
        falls = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)] if kind == "adam" else []
        options = {"epochs": 3, "callbacks": [stops, *falls], "validation_data": rows(BAD + 1, BAD + 5)}
        history = fit(model, BAD + 1, BAD + 20, **options).history
        history["evaluated"] = model.evaluate(*rows(BAD + 1, BAD + 5), verbose=0)
        history["predicted"] = model.predict(rows(BAD + 1, BAD + 5)[0], verbose=0).tolist()
        if attached is not None:
            attached.close()
        return [*bits(model), *(v.value.clone() for v in model.optimizer.variables)], history

    (ours, log), (stock, its) = trained("O0"), trained(None)
    assert same(ours, stock) and log == its


def test_a_training_step_of_ones_own_and_the_way_back() -> None:
    """As Keras's guide writes it; built by its first batch."""
    seen = []

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
            assert not torch.is_autocast_enabled("cpu")
            loss.backward()
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            return {"loss": loss}

    model = Own()
    model.compile("adam", "mse")
    attached = attach(model, "O4")
    with pytest.raises(SessionError, match="no session now"):
        attached.session
    fit(model)
    assert attached.session.steps == STEPS and 1 <= attached.session.skipped < 5 and seen[-1]
    attached.close()
    attached.close()
    assert not {"train_step", "test_step", "predict_step", "compute_metrics"} & set(vars(model))
    assert not {"apply", "scale_loss"} & set(vars(model.optimizer))
    fit(model, BAD + 1)
    assert not seen[-1]


def clip_by_norm(gradients: list[Tensor]) -> list[Tensor]:
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (0.01 / norm).clamp(max=1) for gradient in gradients]


def clip_in_place(gradients: list[Tensor]) -> list[Tensor]:
    return [gradient.clamp_(-1e-3, 1e-3) for gradient in gradients]


EDITS: dict[str, Any] = {
    "times 0.1": lambda gradients: [gradient * 0.1 for gradient in gradients],
    "zeros": lambda gradients: [gradient * 0 for gradient in gradients],
    "signs": lambda gradients: [gradient.sign() for gradient in gradients],
    "by norm": clip_by_norm, "in place": clip_in_place, "last layer": lambda gradients: gradients[2:],
    "none": lambda gradients: [None, None, *gradients[2:]],
    "float64": lambda gradients: [gradient.double() for gradient in gradients],
}  # fmt: skip


def hands_over(edit: str, loop: str = "") -> Any:
    """A model whose training step hands edited gradients to its optimizer."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.sums, self.count = keras.layers.Dense(8), keras.layers.Dense(3), None, 0

        def call(self, x: Any) -> Any:
            return self.b(self.a(x))

        def penalize(self) -> None:
            sum(v.value.square().sum() for v in self.trainable_weights).backward()
            self.penalties = [v.value.grad.clone() for v in self.trainable_weights]

        def train_step(self, data: Any) -> Any:
            x, y = data
            weights = self.trainable_weights[-len(EDITS[edit]([torch.zeros(1)] * 4)) :]
            if loop != "accumulates" or self.count % 2 == 0:
                self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = loss if loop == "no scale_loss" else self.optimizer.scale_loss(loss)
            if loop.startswith("penalty"):
                self.penalize()
            if "autograd.grad" in loop:
                gradients = list(torch.autograd.grad(scaled, [v.value for v in self.trainable_weights]))
            else:
                other = self.optimizer.scale_loss(loss * 2) if loop == "two losses" else None
                scaled.backward(retain_graph=True)
                if other is not None:
                    other.backward()
                gradients = [v.value.grad for v in self.trainable_weights]
            if loop == "sums":
                sums = self.sums if self.count % 2 else [torch.zeros_like(each) for each in gradients]
                gradients = self.sums = [*map(torch.add, sums, gradients)]
                self.zero_grad()
            self.count += 1
            if loop in ("sums", "accumulates") and self.count % 2:
                return {"loss": loss}
            gradients = EDITS[edit](gradients)
            with torch.no_grad():
                if loop == "pairs":
                    self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                elif loop == "no variables":
                    self.optimizer.apply(gradients)
                elif loop == "two applies":
                    self.optimizer.apply(gradients[:2], weights[:2])
                    self.optimizer.apply([each * 2 for each in gradients[2:]], weights[2:])
                else:
                    self.optimizer.apply(gradients, weights)
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    model = Own()
    model(rows(0, 1)[0])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def moved(model: Any, level: str | None) -> tuple[list[Tensor], Any]:
    before = bits(model)
    attached = attach(model, level) if level else None
    fit(model, BAD + 1, BAD + 9)
    return [b - a for a, b in zip(before, bits(model), strict=True)], attached


@pytest.mark.parametrize(("edit", "loop"), [
    *((edit, "") for edit in EDITS), ("times 0.1", "pairs"), ("by norm", "no variables"), ("by norm", "sums"),
    ("by norm", "accumulates"), ("in place", "accumulates"), ("by norm", "two losses"),
    ("by norm", "two applies"), ("in place", "two applies"),
])  # fmt: skip
def test_what_a_training_step_hands_over_is_what_is_applied(edit: str, loop: str) -> None:
    wanted, _ = moved(hands_over(edit, loop), None)
    largest = max(float(each.abs().max()) for each in wanted)
    for level in ("O0", "O4"):
        if edit == "signs" and level != "O0":
            continue  # of gradients near zero they differ
        found, attached = moved(hands_over(edit, loop), level)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 if level == "O0" else 0.2 * largest)
        assert attached.session.skipped == 0
        assert attached.session.steps == {"sums": 4, "accumulates": 4, "two applies": 16}.get(loop, 8)
        attached.close()


@pytest.mark.parametrize("options", [{"level": "O1"}, {"level": "O0", "scale": 1024.0}])
def test_a_training_step_of_ones_own_is_refused_where_there_is_a_scale(options: Any) -> None:
    model = hands_over("by norm")
    with pytest.raises(SessionError, match="train_step of its own"):
        attach(model, **options)
    wanted, _ = moved(hands_over("by norm"), None)
    assert same(moved(model, None)[0], wanted), "it trains as Keras's own"


@pytest.mark.parametrize("loop", ["no scale_loss", "autograd.grad", "penalty, autograd.grad"])
def test_gradients_beside_those_that_are_handed_over_stay_the_users(loop: str) -> None:
    wanted, _ = moved(hands_over("by norm", loop), None)
    largest = max(float(each.abs().max()) for each in wanted)
    for level in ("O0", "O4"):
        model = hands_over("by norm", loop)
        found, attached = moved(model, level)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 if level == "O0" else 0.2 * largest)
        assert attached.session.steps == 8
        if loop.startswith("penalty"):
            assert same([v.value.grad for v in model.trainable_weights], model.penalties)
        attached.close()


def test_further_optimizers_are_refused() -> None:
    model = hands_over("zeros")
    model.d_optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(SessionError, match=r"further optimizers \(d_optimizer\)"):
        attach(model, "O1")


def test_a_step_that_fails_leaves_no_region_open() -> None:
    model, attached = compiled("adam", "O4")
    with pytest.raises(Exception, match=r"(?i)shape"):
        model.train_step((torch.zeros(2, 5), torch.zeros(2, 3)))
    assert not torch.is_autocast_enabled("cpu")
    attached.close()


def test_layers_frozen_and_unfrozen_after_attach() -> None:
    """Keras trains what is still trainable, and refuses what its optimizer has not seen. So does a session."""
    model, attached = compiled("adam", "O4")
    model.layers[0].trainable = False
    before = [weight.copy() for weight in model.layers[0].get_weights()]
    fit(model, 0, 2)
    assert all((a == b).all() for a, b in zip(before, model.layers[0].get_weights(), strict=True))
    attached.close()
    model, attached = compiled("adam", "O4", model)
    model.layers[0].trainable = True
    with pytest.raises(SessionError, match="made trainable after attach"):
        fit(model, 0, 2)
    attached.close()


def test_a_subclass_that_is_built_before_its_layers() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(rows(0, 1)[1].shape[1])

        def call(self, x: Any) -> Any:
            return self.inner(x)

    model = Own()
    model.build(rows(0, 1)[0].shape)
    _, attached = compiled("adam", "O4", model)
    fit(model, 0, 2)
    assert attached.session.steps == 2
    attached.close()


def test_kerass_own_casting_takes_a_loss_scale_from_a_session() -> None:
    """Keras's mixed_float16 says what is 16-bit; a level without regions scales and skips."""
    model = network("mixed_float16")
    model.compile("adam", "mse", auto_scale_loss=False)
    with pytest.raises(SessionError, match="computes in float16 by its dtype policy"):
        attach(model, "O1")
    assert "train_step" not in vars(model)
    attached = attach(model, "O0", scale="dynamic")
    fit(model)
    assert attached.session.skipped >= 1 and 1 < attached.session.loss_scale() < 2**16
    assert all(variable.value.isfinite().all() for variable in model.variables)
    attached.close()


def test_what_cannot_be_is_refused() -> None:
    model = network()
    with pytest.raises(SessionError, match="is not compiled"):
        attach(model)
    with pytest.raises(SessionError, match="takes a model of Keras"):
        attach(torch.nn.Linear(2, 2))
    model.compile("adam", "mse")
    for level in ("O2", "O3", "O5"):
        with pytest.raises(SessionError, match="is a layer of Keras"):
            attach(model, level)
    attached = attach(model, "O1")
    with pytest.raises(SessionError, match="attached already"):
        attach(model, "O1")
    model.compile("adam", "mse")
    with pytest.raises(SessionError, match="compiled after attach"):
        fit(model)
    attached.close()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    with pytest.raises(SessionError, match="a loss scale of its own"):
        attach(model, "O1")
    model.compile("adam", "mse", jit_compile=True)
    with pytest.raises(SessionError, match="jit_compile"):
        attach(model, "O1")
    model.compile(None, "mse")
    with pytest.raises(SessionError, match="without an optimizer"):
        attach(model, "O1")
