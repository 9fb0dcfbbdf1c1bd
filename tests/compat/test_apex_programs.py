"""Programs in the styles of those that were written for Apex: two rivals, and pretraining."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from preamp.compat.apex import amp

from .toys import Weights, scaled_backward, trains

pytestmark = pytest.mark.usefixtures("installed_as_apex")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_networks_against_each_other(level: str) -> None:
    """Three losses with scales of their own, a penalty with second derivatives, an average of the generator."""
    trains("""
        import copy
        from apex import amp
        G = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        D = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        opt_G, opt_D = torch.optim.Adam(G.parameters(), 2e-3), torch.optim.Adam(D.parameters(), 2e-3)
        [G, D], [opt_G, opt_D] = amp.initialize([G, D], [opt_G, opt_D], opt_level=LEVEL, num_losses=3, verbosity=0)
        average = copy.deepcopy(G).eval()
        for i in range(60):
            real = DATA[i % 4][0] + 2
            D.zero_grad()
            fake = G(torch.randn(16, 4))
            loss_D = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
            with amp.scale_loss(loss_D, opt_D, loss_id=0) as scaled:
                scaled.backward()
            if i % 4 == 0:
                points = real.clone().requires_grad_()
                grad, = torch.autograd.grad(D(points).sum(), points, create_graph=True)
                penalty = 0.1 * grad.float().square().sum(1).mean()
                with amp.scale_loss(penalty, opt_D, loss_id=1) as scaled:
                    scaled.backward()
            opt_D.step()
            G.zero_grad()
            with amp.scale_loss(F.softplus(-D(fake)).mean() + (fake.float().mean(0) - real.mean(0)).square().mean(),
                                opt_G, loss_id=2) as scaled:
                scaled.backward()
            opt_G.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), G.parameters()):
                    a.lerp_(p.to(a.dtype), 0.1)
                losses.append(float((average(torch.randn(64, 4)).float().mean(0) - 2).square().mean()))
    """, LEVEL=level)  # fmt: skip


def test_pretraining_that_reduces_gradients_by_itself() -> None:
    """Gradients of all micro-batches are flattened, reduced and judged by the script, in the scaler's place."""
    space = trains("""
        from apex import amp
        from apex.optimizers import FusedLAMB
        from apex.amp import _amp_state
        import amp_C
        import apex_C

        model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        decay = [p for n, p in model.named_parameters() if "bias" not in n]
        groups = [{"params": decay, "weight_decay": 0.01},
                  {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0}]
        optimizer = FusedLAMB(groups, lr=0.02)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic",
                                          cast_model_outputs=torch.float16, verbosity=0)
        amp._amp_state.loss_scalers[0]._loss_scale = 2**20
        overflow_buf = torch.zeros(1, dtype=torch.int)
        skipped = 0
        for step in range(24):
            for x, y in DATA[:2]:
                loss = F.cross_entropy(model(x).float(), y) / 2
                with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
                    scaled_loss.backward()
            losses.append(float(loss.detach()))
            loss_scale = _amp_state.loss_scalers[0].loss_scale()
            master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
            flat_raw = torch.empty(sum(p.numel() for p in master_grads), dtype=torch.float16)
            views = apex_C.unflatten(flat_raw, master_grads)
            overflow_buf.zero_()
            amp_C.multi_tensor_scale(65536, overflow_buf, [master_grads, views], loss_scale)
            overflow_buf.zero_()
            amp_C.multi_tensor_scale(65536, overflow_buf, [views, master_grads], 1.0 / loss_scale)
            scaler = _amp_state.loss_scalers[0]
            old_overflow_buf = scaler._overflow_buf
            scaler._overflow_buf = overflow_buf
            had_overflow = scaler.update_scale()
            scaler._overflow_buf = old_overflow_buf
            if had_overflow == 0:
                optimizer.step()
            else:
                skipped += 1
                if _amp_state.opt_properties.master_weights:
                    for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                        param.grad = None
            for param in model.parameters():
                param.grad = None
    """)  # fmt: skip
    assert space["skipped"] > 0 and space["loss_scale"] < 2**20


def test_pretraining_that_resumes_with_masters_of_its_own(tmp_path: Any) -> None:
    trains("""
        import apex
        from apex import amp
        from apex.optimizers import FusedAdam

        def build():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
            optimizer = FusedAdam(model.parameters(), lr=0.01, bias_correction=False)
            return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

        def train(model, optimizer, steps):
            for i in steps:
                x, y = DATA[i % 4]
                loss = F.cross_entropy(model(x), y)
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                model.zero_grad()
                losses.append(float(loss.detach()))

        model, optimizer = build()
        train(model, optimizer, range(12))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(),
                    "master params": list(amp.master_params(optimizer))}, path)
        train(model, optimizer, range(12, 24))
        expected = [p.detach().clone() for p in amp.master_params(optimizer)]
        apex.amp.close()

        model, optimizer = build()
        checkpoint = torch.load(path, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
        optimizer.load_state_dict(checkpoint["optimizer"])
        for param, saved in zip(amp.master_params(optimizer), checkpoint["master params"]):
            param.data.copy_(saved.data)
        amp.load_state_dict(checkpoint["amp"])
        train(model, optimizer, range(12, 24))
        for param, other in zip(amp.master_params(optimizer), expected):
            assert torch.equal(param, other)
    """, path=tmp_path / "checkpoint.pt")  # fmt: skip


@pytest.mark.parametrize("passes", [(False,), (False, False), (True, False), (False, True, False)])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_penalty_on_what_the_optimizer_steps(level: str, passes: tuple[bool, ...]) -> None:
    """Its gradient comes to the masters at once, and scaled as the model's. `passes`: which leave theirs scaled."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    given = torch.ones(3)
    scaled_backward(model(given), optimizer)  # makes the masters
    optimizer.zero_grad()
    for delay in passes:
        (weight,) = amp.master_params(optimizer)
        scaled_backward(model(given) + weight.float().pow(2).sum(), optimizer, delay_unscale=delay)
    (weight,) = amp.master_params(optimizer)
    assert weight.grad is not None and torch.equal(weight.grad, 3.0 * len(passes) * given)


@pytest.mark.parametrize("levels", [("O1", "O1"), ("O2", "O4"), ("O1", "O0")])
def test_every_optimizer_steps_without_casts_when_models_are_initialized_one_by_one(levels: tuple[str, str]) -> None:
    """The second `initialize` has casts of its own, and the first optimizer multiplies matrices in its step."""

    class Preconditioned(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            dtypes.append(torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    dtypes: list[torch.dtype] = []
    optimizers = []
    for level in levels:
        model = Weights()
        optimizers.append(Preconditioned(model.parameters(), 0.125))
        amp.initialize(model, optimizers[-1], opt_level=level, verbosity=0)
    for optimizer in optimizers:
        optimizer.step()
    assert dtypes == [torch.float32] * 2


@pytest.mark.parametrize("later", [{"opt_level": "O0"}, {"opt_level": "O3"}, {"enabled": False}])
def test_masters_train_on_after_another_model_was_initialized_without_any(later: dict[str, Any]) -> None:
    """A teacher, say, that comes after its student."""
    student, teacher = Weights(), Weights()
    optimizer = torch.optim.SGD(student.parameters(), 0.125)
    amp.initialize(student, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    amp.initialize(teacher, verbosity=0, **later)
    scaled_backward(student(torch.ones(3)), optimizer)
    optimizer.step()
    assert torch.equal(student.weight.float(), torch.full((3,), 0.875))
