"""`preamp.doctor.watch`: what it counts is what is there, and nothing of it stays."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.doctor import JsonLines
from preamp.doctor.exponents import Exponents
from preamp.doctor.measure import spread_of
from preamp.errors import PreampWarning, SessionError
from tests.doctor._kept import Kept

from ..releases import TORCH


class Net(nn.Module):
    """Parts, a function in between, an operation that works in place, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.again = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        x = self.again(self.again(x)).tanh()
        return self.last(x)


def rows(sample: dict[str, Any]) -> dict[tuple[str, str], Exponents]:
    found = {}
    for row in sample["rows"]:
        fields = {name: value for name, value in row.items() if name not in ("module", "kind", "dtype")}
        found[row["module"], row["kind"]] = Exponents.from_dict(fields)
    return found


def of(*tensors: Tensor) -> Exponents:
    return spread_of(torch.cat([tensor.detach().flatten() for tensor in tensors]))


def test_counts_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = Kept()
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        model(x).square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    (sample,) = kept.of("telemetry")
    found = rows(sample)
    old = Net()
    old.load_state_dict(before)
    first = old.first(x)
    inside = first.relu()
    once = old.again(inside)
    twice = old.again(once)
    end = old.last(twice.tanh())
    for tensor in (first, inside, once, twice, end):
        tensor.retain_grad()
    end.square().sum().backward()
    assert found["first", "activation"] == of(first), "before the module after it wrote in place"
    assert found["relu", "activation"] == of(inside)
    assert found["again", "activation"] == of(once, twice)
    assert found["last", "activation"] == of(end)
    assert ("", "activation") not in found, "the root only hands on what its last part gave"
    assert found["last", "activation gradient"] == of(end.grad)
    assert found["again", "activation gradient"] == of(once.grad, twice.grad)
    assert found["relu", "activation gradient"] == of(inside.grad)
    for name in ("first", "again", "last"):
        weight, bias = f"{name}.weight", f"{name}.bias"
        assert found[name, "weight"] == of(before[weight], before[bias])
        assert found[name, "gradient"] == of(grads[weight], grads[bias])


def test_a_session_s_gradients_are_counted_with_their_scale() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.01), Kept()
    with (
        preamp.prepare(model, optimizer, level="O1", scale=1024.0) as session,
        preamp.doctor.watch(session, every=2, sinks=[kept]) as w,
    ):
        for _ in range(4):
            with session.autocast():
                loss = model(x).float().square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        assert [s["step"] for s in kept.of("telemetry")] == [0, 2], "there as soon as the step is over, on a CPU"
    assert all(s["scale"] == s["backward_scale"] == 1024 for s in kept.of("telemetry"))
    assert [s["step"] for s in kept.of("step")] == [0, 1, 2, 3]
    found = rows(kept.of("telemetry")[0])
    dtypes = {(row["module"], row["kind"]): row["dtype"] for row in kept.of("telemetry")[0]["rows"]}
    assert dtypes["first", "activation"] == dtypes["first", "activation gradient"] == "fp16"
    assert dtypes["first", "weight"] == "fp32"
    assert found["last", "gradient"].largest > 10, "as it lies there: scaled"
    report = w.report()
    assert {f.code for f in report.findings} <= {"PA105"}
    assert "Magnitudes by layer" in [section.title for section in report.sections]


def test_the_origin_in_a_skipped_step_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "new" / "run.jsonl"
    with preamp.doctor.watch({"net": model}, every=1, sinks=[JsonLines(path)]) as w:
        for step in range(2):
            optimizer.zero_grad()
            out = model(torch.randn(5, 6))
            loss = out.sum() if not step else (out - out).sum().log().sum()  # log of zero
            loss.backward()
            if step == 0:
                optimizer.step()
        assert any(f.code == "PA201" for f in w.findings)
    (found,) = [f for f in w.findings if f.code == "PA201"]
    assert found.file == Path(__file__).name or str(found.file).endswith("test_watch.py")
    assert "log" in str(found.op)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "process"
    assert {"step", "telemetry", "finding", "audit", "end"} <= set(kinds)


def test_under_checkpointing_activations_count_once_and_have_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    class Outer(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.net, self.reentrant = Net(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        torch.manual_seed(0)
        model, kept = Outer(reentrant), Kept()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with preamp.doctor.watch(model, every=1, sinks=[kept]):
            model(torch.randn(5, 6, requires_grad=True)).sum().backward()
            optimizer.step()
        found = rows(kept.of("telemetry")[0])
        assert found["net.first", "activation"].total == 5 * 8
        assert found["net.again", "activation"].total == 2 * 5 * 8
        assert found["net.first", "activation gradient"].total == 5 * 8


def test_a_sink_that_fails_is_left_out_and_training_goes_on() -> None:
    class Full:
        def write(self, kind: str, facts: Any) -> None:
            raise OSError(28, "No space left on device")

    model, kept = Net(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(PreampWarning, match="Full failed.*No space left"),
        preamp.doctor.watch(model, every=1, sinks=[Full(), kept]),
    ):
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    assert kept.of("step")


def test_another_watch_listens_to_the_first() -> None:
    model, outer, inner = Net(), Kept(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()

    with preamp.doctor.watch(model, every=1, sinks=[outer]):
        train()
        with preamp.doctor.watch(model, every=7, sinks=[inner]) as second:
            train()
        train()
    assert [s["step"] for s in outer.of("step")] == [0, 1, 2]
    assert [s["step"] for s in inner.of("step")] == [1]
    assert second.report().verdict.startswith("Nothing is wrong")


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    model = Net()
    original = torch.autograd.backward
    with pytest.raises(ZeroDivisionError), preamp.doctor.watch(model):
        model(torch.randn(5, 6))
        1 / 0
    assert torch.autograd.backward is original
    assert _get_current_dispatch_mode() is None
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert not model._forward_hooks
    assert not model.first._forward_hooks


def test_two_models_of_one_name_are_both_known_and_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from preamp.doctor.names import Names

    looks = []
    look = Names.search
    monkeypatch.setattr(Names, "search", lambda self, optimizers: (looks.append(1), look(self, optimizers))[1])
    names, keep = Names(), []

    def fold() -> None:
        model = Net()
        keep.append(model)
        assert names.get(model.first) is not None
        stranger = nn.Sequential(*(nn.Dropout() for _ in range(9)))
        before = len(looks)
        assert [names.get(part) for part in stranger.modules()] == [None] * 10
        assert len(looks) == before + 1

    fold()
    fold()
    assert {names.get(model.first, "").rpartition(":")[2] for model in keep} == {"first"}
    assert len({names.get(model.first) for model in keep}) == 2


@pytest.mark.parametrize(("wrong", "others", "says"), [
    *((wrong, {}, r"Session, a torch\.nn\.Module, or several")
      for wrong in (3, "model", [], {}, [nn.Linear(1, 1), 2], {"a": None})),
    *((nn.Linear(1, 1), {"every": every}, "every=") for every in (0, -1, 1.5, True, None)),
    (nn.Linear(1, 1), {"sinks": [print]}, r"write\(kind, facts\)"),
])  # fmt: skip
def test_what_cannot_be_watched(wrong: Any, others: dict[str, Any], says: str) -> None:
    with pytest.raises(SessionError, match=says):
        preamp.doctor.watch(wrong, **others)


def test_a_report_without_a_step_and_files(tmp_path: Path) -> None:
    with preamp.doctor.watch(nn.Linear(1, 1)) as w:
        assert w.report().verdict.startswith("No optimizer step was seen")
    page = w.write(tmp_path / "out")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["steps"] == 0


@pytest.mark.slow
def test_a_long_accumulation_is_let_go_of_as_it_goes() -> None:
    import gc
    import weakref

    model, kept, alive = Net(), Kept(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.doctor.watch(model, sinks=[kept]):
        for _ in range(60):
            x = torch.randn(5, 6)
            alive.append(weakref.ref(x))
            model(x).sum().backward()
            del x
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 16
        for _ in range(300):
            x = torch.randn(5, 6)
            alive.append(weakref.ref(x))
            model(x)  # nobody goes back, nobody steps
            del x
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 128
        optimizer.step()
        model(torch.full((5, 6), float("inf"))).sum().backward()
        optimizer.step()
    assert [f["code"] for f in kept.of("finding") if f["severity"] == "error"] == ["PA207"], "a new step, a new tape"


def test_memory_that_is_used_again_is_not_taken_for_what_was_there() -> None:
    from preamp.doctor import operators
    from preamp.doctor.hooks import Clock
    from preamp.doctor.places import Places
    from preamp.doctor.replay.entries import tensor_key
    from preamp.doctor.replay.tape import Tape
    from preamp.doctor.shadow.source import Readings

    def keys(kept: bool) -> set[Any]:
        stream = operators.Stream(lambda: Places(lambda module, default: default, {}), Clock())
        tape, seen = Tape(stream, Readings()), set()
        for _ in range(50):
            tensor = torch.randn(1000)
            seen.add(tensor_key(tensor))
            if kept:
                list(tape._know(tensor))
            del tensor
        return seen

    assert len(keys(False)) < 50, "or this test shows nothing"
    assert len(keys(True)) == 50


def test_an_error_of_the_doctor_s_own_never_reaches_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from preamp.doctor import operators
    from preamp.doctor.follow import audit, magnitudes, soundness, steps
    from preamp.doctor.replay import tape

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    for owner, name in (
        (magnitudes, "spread_of"), (tape.Tape, "before"), (tape.Tape, "enter_model"), (operators, "Call"),
        (audit.Handled, "before"), (soundness.Soundness, "check"), (steps.Steps, "_first_step"),
        (steps.Steps, "before_backward"),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            before = model.first.weight.detach().clone()
            with preamp.doctor.watch(model, every=1) as w:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.randn(5, 6)).square().mean().backward()
                    optimizer.step()
                report = w.report()
            assert not torch.equal(before, model.first.weight), name
            assert "a fault of ours" in report.verdict, name
            assert _get_current_dispatch_mode() is None
            assert not nn.modules.module._global_forward_pre_hooks


def test_training_that_moves_to_another_thread_is_followed_there() -> None:
    model, kept = Net(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(2):
            loss = model(torch.randn(5, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        steps()
        model(torch.randn(5, 6)).square()  # left without a backward pass
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    looks = kept.of("shadow")
    assert [look["step"] for look in looks] == [0, 1, 2]
    assert len({look["operators"] for look in looks[:2]}) == 1 and looks[2]["operators"] > 0


@pytest.mark.skipif(TORCH < (2, 7), reason="under vmap of torch 2.6 the doctor stops, and says so")
def test_models_inside_vmap_are_left_alone() -> None:
    from torch.func import functional_call, grad, vmap

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(3, 5, 4), torch.randn(3, 5, 1)

    def inner(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, parameters, (x,)) - y).square().mean()

    with preamp.doctor.watch(model, every=1) as w:
        for _ in range(2):
            parameters = dict(model.named_parameters())
            per_task = vmap(grad(inner), (None, 0, 0))(parameters, x, y)
            loss = sum(g.square().sum() for g in per_task.values()) + model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "failed" not in w.report().verdict
    assert not [f for f in w.findings if f.severity == "error"]


@pytest.mark.parametrize("how", ["in place", "through .data"])
def test_steps_that_no_optimizer_takes_are_counted(how: str) -> None:
    """fastai has optimizers of its own, which write through .data; others write by hand."""
    torch.manual_seed(0)
    model, kept = Net(), Kept()
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        for _ in range(4):
            for _ in range(2):  # micro-batches: no step between them
                model(torch.randn(5, 6)).square().sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if how == "in place":
                    with torch.no_grad():
                        parameter.sub_(0.01 * parameter.grad)
                else:
                    parameter.data.sub_(0.01 * parameter.grad)
                parameter.grad = None
    steps = kept.of("step")
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert not any(step["skipped"] for step in steps)


@pytest.mark.parametrize("by", ["scaler", "session"])
def test_micro_batches_whose_gradients_overflow_are_no_steps(by: str) -> None:
    torch.manual_seed(0)
    model, kept = Net(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=by == "scaler")
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        session = preamp.prepare(model, optimizer, level="O1", scale=2.0**20) if by == "session" else None
        for _ in range(4):
            for _ in range(3):
                with torch.autocast("cpu", torch.float16) if session is None else session.autocast():
                    loss = model(100 * torch.randn(5, 6)).float().square().sum()
                scaler.scale(loss).backward() if session is None else session.backward(loss)
            scaler.step(optimizer) if session is None else session.step()
            scaler.update()
            optimizer.zero_grad()
        if session is not None:
            session.close()
    steps = kept.of("step")
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert steps[0]["skipped"]


@pytest.mark.parametrize("cleared", ["before the model", "before backward", "to zero"])
def test_a_step_that_the_script_leaves_out_is_a_skipped_one(cleared: str) -> None:
    torch.manual_seed(0)
    model, kept = Net(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        for step in range(5):
            if cleared == "before the model":
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(5, 6)).float().square().sum() * (1e30 if step in (1, 2) else 1)
            if cleared != "before the model":
                optimizer.zero_grad(set_to_none=cleared == "before backward")
            scaler.scale(loss).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
                scaler.step(optimizer)
                scaler.update()
    assert [(one["step"], one["skipped"]) for one in kept.of("step")] == [*enumerate([False, True, True, False, False])]
