"""Programs in the styles of those that pretrained language models with Apex, which took its parts to hand."""

from __future__ import annotations

from typing import Any

import pytest

from .toys import trains

pytestmark = pytest.mark.usefixtures("installed_as_apex")


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


def test_a_language_model_that_probes_for_kernels() -> None:
    """Its norm and its clipping call Apex's functions, each behind a question whether they are there."""
    trains("""
        import inspect
        from apex.optimizers import FusedAdam as Adam
        from apex.multi_tensor_apply import multi_tensor_applier
        import amp_C
        try:
            from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
            HAVE_PERSIST_LAYER_NORM = True
        except ImportError:
            HAVE_PERSIST_LAYER_NORM = False
        from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction
        try:
            from apex.transformer.functional import FusedScaleMaskSoftmax
            raise AssertionError
        except ImportError:
            FusedScaleMaskSoftmax = None

        class Norm(nn.Module):
            def __init__(self, size, persist):
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
                self.size = size
                self.persist = persist and HAVE_PERSIST_LAYER_NORM

            def forward(self, x):
                if self.persist:
                    return FastLayerNormFN.apply(x, self.weight, self.bias, 1e-5)
                if "memory_efficient" in inspect.getfullargspec(FusedLayerNormAffineFunction.forward).args:
                    return FusedLayerNormAffineFunction.apply(x, self.weight, self.bias, (self.size,), 1e-5, True)
                return FusedLayerNormAffineFunction.apply(x, self.weight, self.bias, (self.size,), 1e-5)

        model = nn.Sequential(nn.Linear(8, 32), Norm(32, True), nn.GELU(), Norm(32, False), nn.Linear(32, 4)).half()
        low = list(model.parameters())
        masters = [p.detach().clone().float().requires_grad_() for p in low]
        optimizer = Adam(masters, lr=0.01)
        scale = 2.0**10
        for i in range(24):
            x, y = DATA[i % 4]
            loss = F.cross_entropy(model(x.half()).float(), y)
            (loss * scale).backward()
            for p, m in zip(low, masters):
                m.grad, p.grad = p.grad.float(), None
            found = torch.zeros(1, dtype=torch.int)
            grads = [m.grad for m in masters]
            multi_tensor_applier(amp_C.multi_tensor_scale, found, [grads, grads], 1.0 / scale)
            norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, found, [grads], False)
            multi_tensor_applier(amp_C.multi_tensor_scale, found, [grads, grads], min(1.0, 1.0 / (norm.item() + 1e-6)))
            optimizer.step()
            multi_tensor_applier(amp_C.multi_tensor_scale, found, [masters, low], 1.0)
            assert found.item() == 0
            losses.append(float(loss.detach()))
    """)  # fmt: skip


def test_a_toolkits_wrapper_of_fused_adam() -> None:
    """It prefers an old extension, falls back, and refuses an Apex without the operator."""
    trains("""
        import importlib

        def get_fused_adam_class():
            try:
                assert callable(importlib.import_module("fused_adam_cuda").adam)
                raise ImportError("this one has the new interface")
            except ImportError:
                from apex.optimizers import FusedAdam as _FusedAdam
                from apex.multi_tensor_apply import multi_tensor_applier
                return _FusedAdam if multi_tensor_applier.available else None

        FusedAdam = get_fused_adam_class()

        class FusedAdamV2(FusedAdam):
            def __init__(self, *args, use_fp16_stats=False, **kwargs):
                super().__init__(*args, **kwargs)
                if not hasattr(self, "multi_tensor_adam"):
                    raise Exception("Apex installation is outdated.")

            @property
            def supports_flat_params(self):
                return True

        class Wrapper:
            def __init__(self, params, lr):
                self._optimizer = FusedAdamV2(params, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)

            def step(self, closure=None, scale=1.0, groups=None):
                self._optimizer.step(closure)

            def set_lr(self, lr):
                for group in self._optimizer.param_groups:
                    group["lr"] = lr

        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = Wrapper(model.parameters(), 0.01)
        for i in range(24):
            x, y = DATA[i % 4]
            loss = F.cross_entropy(model(x), y)
            optimizer._optimizer.zero_grad()
            loss.backward()
            optimizer.set_lr(0.02 * min(1, i / 10))
            optimizer.step()
            losses.append(float(loss.detach()))
    """)
