"""Programs in the styles of those that were written for Apex: fine-tuning, vision, recommendation."""

from __future__ import annotations

import pytest
import torch

from .toys import trains

pytestmark = pytest.mark.usefixtures("installed_as_apex")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fine_tuning_of_2019(level: str) -> None:
    """Accumulation, clipping by a switch, a schedule, a global `amp` behind a try."""
    trains("""
        from torch.optim.lr_scheduler import LambdaLR
        fp16 = True
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16 training.")
        model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.1), nn.Linear(32, 4))
        data = [(torch.randint(0, 50, (16, 8)), y) for _, y in DATA]
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-8)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        model, optimizer = amp.initialize(model, optimizer, opt_level=LEVEL, verbosity=0)
        model.zero_grad()
        for epoch in range(12):
            for step, (x, y) in enumerate(data):
                model.train()
                loss = F.cross_entropy(model(x), y) / 2
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                if (step + 1) % 2 == 0:
                    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                    optimizer.step()
                    scheduler.step()
                    model.zero_grad()
                losses.append(float(loss.detach()))
    """, LEVEL=level)  # fmt: skip


def test_detection_with_functions_kept_in_float32() -> None:
    trains("""
        from apex import amp

        def roi_align(x):
            assert x.dtype is torch.float32
            return x * 1.0

        class ROIAlign(nn.Module):
            @amp.float_function
            def forward(self, x, rois=None):
                assert x.dtype is torch.float32
                return roi_align(x)

        nms = amp.float_function(roi_align)
        model = nn.Sequential(nn.Linear(8, 32), ROIAlign(), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        amp_opt_level = "O1"
        model, optimizer = amp.initialize(model, optimizer, opt_level=amp_opt_level, verbosity=0)
        for i in range(24):
            x, y = DATA[i % 4]
            logits = model(x)
            assert logits.dtype is torch.float16 and nms(logits).dtype is torch.float32
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_losses:
                scaled_losses.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    """)


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


def test_self_supervision_with_larc_by_its_module() -> None:
    trains("""
        import apex
        from apex.parallel.LARC import LARC
        model = nn.ModuleDict({"body": nn.Linear(8, 32), "prototypes": nn.Linear(32, 4, bias=False)})
        model = apex.parallel.convert_syncbn_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9, weight_decay=1e-6)
        optimizer = LARC(optimizer=optimizer, trust_coefficient=0.02, clip=False)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for i in range(40):
            x, y = DATA[i % 4]
            for group in optimizer.param_groups:
                group["lr"] = 2.0 * 0.5 * (1 + math.cos(math.pi * i / 40))
            loss = F.cross_entropy(model["prototypes"](torch.relu(model["body"](x))), y)
            optimizer.zero_grad()
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if i < 2:
                for name, p in model.named_parameters():
                    if "prototypes" in name:
                        p.grad = None
            optimizer.step()
            losses.append(float(loss.detach()))
        torch.save({"amp": apex.amp.state_dict(), "optimizer": optimizer.state_dict()}, __import__("io").BytesIO())
        assert isinstance(apex.parallel.LARC, type)
    """)


def test_recommendation_with_apexs_perceptrons() -> None:
    """Dense layers from apex.mlp, read and filled from outside; sparse embeddings with an optimizer of their own."""
    trains("""
        from apex import amp, mlp
        bottom, top = mlp.MLP([8, 32, 8]), mlp.MLP([16, 32, 4], activation="none")
        for weight, bias in zip(bottom.weights, bottom.biases):
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / len(bias)))
        embedding = nn.Embedding(50, 8, sparse=True)
        model = nn.ModuleList([bottom, top, embedding])
        dense = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.05)
        sparse = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.02)
        model, optimizers = amp.initialize(model, [dense, sparse], opt_level="O1", loss_scale=1024.0, verbosity=0)
        ids = torch.randint(0, 50, (16,))
        for i in range(60):
            x, y = DATA[i % 4]
            loss = F.cross_entropy(top(torch.cat([bottom(x), embedding(ids)], 1)), y)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with amp.scale_loss(loss, optimizers) as scaled:
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(float(loss.detach()))
    """)


def test_classification_with_a_static_scale_and_masters_by_hand() -> None:
    trains("""
        from apex.fp16_utils import *
        from apex import amp, optimizers
        from apex.multi_tensor_apply import multi_tensor_applier
        model = network_to_half(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
        model_params, master_params = prep_param_lists(model)
        optimizer = optimizers.FusedSGD(master_params, lr=0.1, momentum=0.9)
        for i in range(24):
            x, y = DATA[i % 4]
            loss = F.cross_entropy(model(x).float(), y)
            (loss * 128.0).backward()
            model_grads_to_master_grads(model_params, master_params)
            for param in master_params:
                param.grad.data.div_(128.0)
            optimizer.step()
            master_params_to_model_params(model_params, master_params)
            model.zero_grad()
            losses.append(to_python_float(loss.detach()))
    """)


def test_a_model_that_asks_apex_for_float32_norms() -> None:
    """Registrations by module and name, before initialize."""
    space = trains("""
        import apex
        import apex.normalization
        from apex import amp
        apex.amp.register_float_function(apex.normalization.FusedLayerNorm, "forward")
        apex.amp.register_half_function(torch, "einsum")
        BertLayerNorm = apex.normalization.FusedLayerNorm
        model = nn.Sequential(nn.Linear(8, 32), BertLayerNorm(32, eps=1e-12), nn.GELU(), nn.Linear(32, 4))
        optimizer = apex.optimizers.FusedLAMB(model.parameters(), lr=0.02)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        seen = []
        model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        for i in range(24):
            x, y = DATA[i % 4]
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        amp.close()
    """)
    assert set(space["seen"]) == {torch.float32}
