"""Imports, options, optimizers and layers of Apex, and what `preamp migrate` makes of each."""

from __future__ import annotations

import textwrap

import pytest
import torch

import preamp

from .migrations import LOOP, by_hand, clean, migrated

pytest.importorskip("libcst")


@pytest.mark.parametrize(
    ("imports", "amp"),
    [
        ("from apex import amp", "amp."),
        ("import apex", "apex.amp."),
        ("import apex.amp", "apex.amp."),
        ("import apex.amp as A", "A."),
        ("from apex import amp as mixed", "mixed."),
        ("from apex.amp import initialize, scale_loss", ""),
        ("from apex.amp.frontend import initialize\nfrom apex.amp.handle import scale_loss", ""),
        ("from preamp.compat.apex import amp", "amp."),
        ("import preamp.compat.apex.amp as amp", "amp."),
        ("try:\n    from apex import amp\nexcept ImportError:\n    amp = None", "amp."),
        ("try:\n    import apex\nexcept ImportError as e:\n    print(e)\n    raise", "apex.amp."),
        ("try:\n    from apex import amp\nexcept ImportError:\n    from torch.cuda import amp", "amp."),
    ],
)
def test_every_spelling_of_an_import(imports: str, amp: str) -> None:
    after = clean(LOOP.format(imports=imports, amp=amp).lstrip())
    assert after.count("import preamp\n") == 1
    assert after.split("import preamp\n")[1] == textwrap.dedent("""\
        session = preamp.prepare(model, optimizer, level="O1")
        for x in data:
            with session.autocast():
                loss = model(x)
            session.backward(loss)
            session.step()
    """)


def test_imports_keep_their_company() -> None:
    after = clean("""
        '''Doc.'''
        from __future__ import annotations

        import os
        import torch, apex
        try:
            from apex import amp
            HAS_AMP = True
        except ImportError:
            HAS_AMP = False
        from apex.normalization import FusedLayerNorm  # never used
        from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model


        def wrap(model):
            return DDP(convert_syncbn_model(model), delay_allreduce=True)


        @amp.float_function
        def norm(x):
            return x / x.norm()
    """)
    assert after == textwrap.dedent("""
        '''Doc.'''
        from __future__ import annotations

        import os
        import torch
        HAS_AMP = True
        import preamp


        def wrap(model):
            return torch.nn.parallel.DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))


        @preamp.float_function
        def norm(x):
            return x / x.norm()
    """)


def prepared(arguments: str) -> str:
    """What `initialize(...)` becomes: the arguments of prepare, on one line."""
    after = migrated(f"from apex import amp\nmodel, optimizer = amp.initialize({arguments})\n").after
    return " ".join(after.partition("preamp.prepare(")[2].split()).removesuffix(")").strip(", ")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", 'level="O1"'),
        ("True, 'O2'", "level='O2'"),
        ("opt_level='O2', loss_scale=1024", "level='O2', scale=1024"),
        ("opt_level='O2', loss_scale='dynamic'", "level='O2', scale='dynamic'"),
        ("opt_level='O2', loss_scale='128.0'", "level='O2', scale=128.0"),
        ("opt_level='O3', keep_batchnorm_fp32=True", "level='O3', norms=\"fp32\""),
        ("opt_level='O2', keep_batchnorm_fp32='False'", "level='O2', norms=\"fp16\""),
        ("opt_level='O5', keep_batchnorm_fp32=False", "level='O5', norms=\"bf16\""),
        ("opt_level='O2', master_weights=False", "level='O2', masters=False"),
        ("opt_level='O2', master_weights=True", "level='O2'"),
        ("opt_level=level, enabled=on", 'level=level if on else "O0"'),
        ("enabled=False", 'level="O0"'),
        ("max_loss_scale=2.**16", 'level="O1", scale=preamp.DynamicScale(max_scale=2.**16)'),
        ("loss_scale=scale", 'level="O1", scale=scale if scale in (None, "dynamic") else float(scale)'),
        (
            "loss_scale=a.s, enabled=on",
            'level="O1" if on else "O0", scale=(a.s if a.s in (None, "dynamic") else float(a.s)) if on else None',
        ),
        ("num_losses=2", 'level="O1", losses=("loss0", "loss1")'),
        ("num_losses=n", 'level="O1", losses=[f"loss{i}" for i in range(n)]'),
        ("cast_model_outputs=torch.float16", 'level="O1", output="fp16"'),
        ("verbosity=0, cast_model_type=None", 'level="O1"'),
    ],
)
def test_options(before: str, after: str) -> None:
    assert prepared(f"model, optimizer, {before}".rstrip(", ")) == f"model, optimizer, {after}"
    named = prepared(f"models=model, optimizers=optimizer, {before}") if "True, '" not in before else ""
    assert not named or named == f"model=model, optimizer=optimizer, {after}"


@pytest.mark.parametrize(
    "options", ["loss_scale='128.0'", "keep_batchnorm_fp32=False", "master_weights=False", "max_loss_scale=2.**16"]
)
def test_options_have_a_meaning_to_prepare(options: str) -> None:
    model = torch.nn.Linear(2, 2)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "preamp": preamp}
    arguments = prepared(f"model, optimizer, opt_level='O2', {options}")
    eval(f"preamp.prepare({arguments})", given).close()


def test_options_without_a_counterpart_are_told() -> None:
    line = "m, o = amp.initialize(m, o, opt_level='O2', cast_model_type=torch.bfloat16)"
    (where, words), _ = by_hand(f"from apex import amp\n{line}\n")
    assert where == 2 and "cast_model_type=torch.bfloat16" in words and "O5" in words


@pytest.mark.parametrize(
    ("keep", "norms"), [(None, {}), ("True", {"norms": "fp32"}), (True, {"norms": "fp32"}), (False, {"norms": "fp16"})]
)
def test_a_variable_batchnorm_option(keep: object, norms: dict[str, str]) -> None:
    text = prepared("model, optimizer, opt_level=level, keep_batchnorm_fp32=keep")
    assert eval(f"dict({text.partition('level=level,')[2]})", {"keep": keep}) == norms


@pytest.mark.parametrize(
    ("target", "given", "after"),
    [
        ("model", "model, opt_level='O2'", ["session = preamp.prepare(model, None, level='O2')"]),
        (
            "net, opt", "model, optimizer",
            ["net, opt = model, optimizer", 'session = preamp.prepare(net, opt, level="O1")'],
        ),
        (
            "self.model, self.opt", "model.cuda(), SGD(model.parameters(), 0.1)",
            [
                "self.model, self.opt = model.cuda(), SGD(model.parameters(), 0.1)",
                'self.session = preamp.prepare(self.model, self.opt, level="O1")',
            ],
        ),
        ("[a, b], opt", "[a, b], opt", ['session = preamp.prepare([a, b], opt, level="O1")']),
    ],
)  # fmt: skip
def test_targets(target: str, given: str, after: list[str]) -> None:
    found = migrated(f"import preamp\nfrom apex import amp\n{target} = amp.initialize({given})\n").after
    assert found.splitlines()[1:] == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("FusedAdam(ps)", "preamp.optim.AdamW(ps, weight_decay=0.0)"),
        (
            "FusedAdam(ps, 1e-3, True, (0.9, 0.99), 1e-6, False, 0.1)",
            "preamp.optim.Adam(ps, lr=1e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)",
        ),
        (
            "FusedAdam(ps, lr=lr, adam_w_mode=w, set_grad_none=True)",
            "(preamp.optim.AdamW if w else preamp.optim.Adam)(ps, lr=lr, weight_decay=0.0)",
        ),
        ("FusedSGD(ps, 0.1, 0.9, materialize_master_grads=False)", "preamp.optim.SGD(ps, 0.1, 0.9)"),
        ("FusedLAMB(ps, 0.1, use_nvlamb=True)", "preamp.optim.LAMB(ps, lr=0.1, use_nvlamb=True)"),
        (
            "FusedNovoGrad(ps, 0.1, True, (0.9, 0.9), norm_type=2)",
            "preamp.optim.NovoGrad(ps, lr=0.1, bias_correction=True, betas=(0.9, 0.9), norm_type=2)",
        ),
        ("FusedAdagrad(ps, 0.1, 1e-8)", "preamp.optim.Adagrad(ps, lr=0.1, eps=1e-8)"),
    ],
)
def test_fused_optimizers(before: str, after: str) -> None:
    name = before.partition("(")[0]
    assert clean(f"from apex.optimizers import {name}\nopt = {before}\n") == f"import preamp\nopt = {after}\n"
    assert clean(f"import apex\nopt = apex.optimizers.{before}\n") == f"import preamp\nopt = {after}\n"
    made = eval(after, {"preamp": preamp, "ps": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1, "w": True})
    assert made.param_groups[0]["weight_decay"] in (0.0, 0.1) or "LAMB" in name


def test_what_fused_optimizers_cannot_say() -> None:
    notes = by_hand("""\
        from apex.optimizers import FusedAdam, FusedSGD
        a = FusedAdam(ps, bias_correction=False)
        b = FusedSGD(ps, lr=0.1, wd_after_momentum=True)
        c = FusedAdam(ps, **options)
        d = {"adam": FusedAdam}
        e = FusedAdam(ps, max_grad_norm=1.0)
    """)
    assert [line for line, _ in notes] == [2, 3, 4, 5, 6] and "max_grad_norm=1.0 is no argument" in notes[4][1]
    assert "bias_correction=False" in notes[0][1] and "star" in notes[2][1] and "weight_decay" in notes[3][1]


def test_norm_layers_and_wrappers() -> None:
    assert clean("""
        import torch.nn as nn
        from apex.normalization.fused_layer_norm import FusedLayerNorm as LN, FusedRMSNorm
        from apex.parallel import SyncBatchNorm
        layers = [LN(8, eps=1e-6, memory_efficient=True), FusedRMSNorm(8), SyncBatchNorm(8, channel_last=False)]
        kind = LN
    """) == textwrap.dedent("""
        import torch.nn as nn
        import torch
        layers = [torch.nn.LayerNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-5), torch.nn.SyncBatchNorm(8)]
        kind = torch.nn.LayerNorm
    """)


def test_a_fallback_takes_the_place_of_what_it_was_for() -> None:
    after = clean("""
        import torch
        try:
            from apex.parallel import DistributedDataParallel as DDP
        except ImportError:
            from torch.nn.parallel import DistributedDataParallel as DDP
        wrapped = DDP(model), isinstance(model, DDP)
    """)
    assert "try" not in after and "wrapped = torch.nn.parallel.DistributedDataParallel(model), " in after
