"""`preamp migrate`: scripts for Apex, and what they become: text, notes, and trainings that end alike."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import preamp
from preamp.errors import MissingExtra
from preamp.migrate import CannotParse, NoSuchFile, migrate_source, run

from .migrations import DATA, by_hand, clean, migrated, trained

pytest.importorskip("libcst")

# -- trainings

SCRIPTS = {
    "imagenet": """
try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("Please install apex")


def main():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.fp16_opt_level,
                                      keep_batchnorm_fp32=None,
                                      loss_scale=None)
    for epoch in range(2):
        train(zip(X, Y), model, nn.MSELoss(), optimizer, epoch)


def train(loader, net, criterion, opt, epoch):
    net.train()
    for x, y in loader:
        # compute output
        output = net(x)
        loss = criterion(output, y)

        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        losses.append(loss.item())


main()
""",
    "huggingface": """
def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    for step, (x, y) in enumerate(zip(X, Y)):
        inputs = {"input": x}
        outputs = model(**inputs)
        loss = nn.functional.mse_loss(outputs, y)  # of the batch
        if args.accum > 1:
            loss = loss / args.accum

        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()

        losses.append(loss.item())
        if (step + 1) % args.accum == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            model.zero_grad()


train(nn.Linear(6, 1))
""",
    "gan": """
from apex import amp

netD = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
netG = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-2)
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=args.fp16_opt_level, num_losses=3)
for noise, real in zip(X, Y):
    netD.zero_grad()
    label = torch.ones(16, 1)
    output = netD(real)
    errD_real = criterion(output, label)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()

    # train with fake
    fake = netG(noise)
    output = netD(fake.detach())
    errD_fake = criterion(output, torch.zeros(16, 1))
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()

    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    losses += [errD_real.item() + errD_fake.item(), errG.item()]
""",
    "trainer": """
import apex.amp as A
from apex.optimizers import FusedAdam


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = A.initialize(model, optimizer, opt_level=args.fp16_opt_level, loss_scale=128.0)
        self.criterion = nn.MSELoss()

    def compute_loss(self, x, y):
        return self.criterion(self.model(x), y)

    def step(self, x, y):
        loss = self.compute_loss(x, y)
        with A.scale_loss(loss, self.optimizer) as s:
            s.backward()
        nn.utils.clip_grad_value_(A.master_params(self.optimizer), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses.append(loss.item())

    def state(self):
        return {"amp": A.state_dict()}


net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
trainer = Trainer(net, FusedAdam(net.parameters(), lr=1e-2, eps=1e-4))
for x, y in zip(X, Y):
    trainer.step(x, y)
state = trainer.state()
""",
    "handed": """
import apex


class Runner:
    def __init__(self, model, optimizer):
        super().__init__()
        self.net = model
        self.opt = optimizer

    def epoch(self, criterion):
        for number, (x, y) in enumerate(zip(X, Y)):
            loss = criterion(self.net(x), y)
            with apex.amp.scale_loss(loss / args.accum, self.opt, delay_unscale=number % 2 == 0) as scaled:
                scaled.backward()
            losses.append(loss.item())
            if number % 2:
                self.update()

    def update(self):
        self.opt.step()
        self.opt.zero_grad()


def main():
    net = nn.Linear(6, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net, opt = apex.amp.initialize(net, opt, enabled=args.fp16, opt_level=args.fp16_opt_level)
    runner = Runner(net, opt)
    runner.epoch(nn.MSELoss())


main()
""",
    "nested": """
from apex.amp import initialize, scale_loss


def fit(model):
    opts = [torch.optim.SGD(model[0].parameters(), lr=0.05), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    model, optimizers = initialize(model, opts, opt_level=args.fp16_opt_level, loss_scale=128.0, verbosity=0)

    def one(x, y):
        with scale_loss(nn.functional.mse_loss(model(x), y), optimizers) as scaled: scaled.backward()
        for opt in optimizers:
            opt.step()
        for opt in optimizers:
            opt.zero_grad()
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(model(x).float(), y).item())

    for x, y in zip(X, Y):
        one(x, y)


fit(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
""",
}

CASES = [(name, level, True) for name in SCRIPTS for level in ("O1", "O2", "O4", "O5")] + [("huggingface", "O1", False)]
assert CASES


def test_translated_trainings_run_and_end_like_the_originals(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for name, level, fp16 in CASES:
        head = DATA.replace("LEVEL", level).replace("FP16", str(fp16))
        text = head.lstrip() + SCRIPTS[name]
        for folder, body in ((old, text), (new, clean(text))):
            folder.mkdir(exist_ok=True)
            (folder / f"{name}_{level}_{fp16}.py").write_text(body, encoding="utf-8")
    before = trained("apex", tmp_path, sorted(old.iterdir()))
    after = trained("preamp", tmp_path, sorted(new.iterdir()))
    assert set(before) == set(after) and len(before) == len(CASES)
    for name, losses in before.items():
        assert len(losses) == len(after[name]) >= 12
        rel = 0.1 if "_O4_" in name or "_O5_" in name else 0.02  # bfloat16 has three bits less
        assert after[name] == pytest.approx(losses, rel=rel, abs=0.02), name


# -- text

LOOP = """
{imports}
model, optimizer = {amp}initialize(model, optimizer, opt_level="O1")
for x in data:
    loss = model(x)
    with {amp}scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
SCRIPT = LOOP.format(imports="from apex import amp", amp="amp.").lstrip()


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
    """)
    assert [line for line, _ in notes] == [2, 3, 4, 5]
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


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("scaled.backward(retain_graph=True)", "session.backward(loss, retain_graph=True)"),
        ("scaled.mean().backward()", "session.backward(loss.mean())"),
        ("(scaled / 4).backward()", "session.backward(loss / 4)"),
        ("# why\n        scaled.backward()  # now", "# why\n    session.backward(loss)  # now"),
        (
            "if last:\n            scaled.backward()\n        else:\n            scaled.backward(retain_graph=True)",
            "if last:\n        session.backward(loss)\n    else:\n        session.backward(loss, retain_graph=True)",
        ),
        ("print(step)\n        scaled.backward()", "print(step)\n    session.backward(loss)"),
    ],
)
def test_bodies_of_scale_loss(body: str, after: str) -> None:
    found = clean(SCRIPT.replace("scaled.backward()", body))
    assert f"        loss = model(x)\n    {after}\n    session.step()\n" in found


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("scaled.backward()\n        optimizer.step()", "gradients that Apex has not unscaled"),
        ("scaled.backward()\n        clip_grad_norm_(amp.master_params(optimizer), 1)", "gradients that Apex has not"),
        ("fabric.backward(scaled)", "otherwise than by .backward()"),
        ("scaled.backward(gradient)", "not understood"),
        ("(scaled + extra).backward()", "something made of the scaled loss"),
    ],
)
def test_bodies_that_stay_with_a_note(body: str, why: str) -> None:
    found = migrated(SCRIPT.replace("scaled.backward()", body))
    assert f"    with amp.scale_loss(loss, optimizer) as scaled:\n        {body}\n" in found.after
    assert (5, True) in [(note.line, why in note.seen) for note in found.notes if note.by_hand]


def test_registered_functions() -> None:
    found = migrated("""\
        import torch
        from apex import amp
        import mine
        amp.register_float_function(torch, "sigmoid")
        amp.register_half_function(torch.nn.functional, "softmax")
        amp.register_half_function(mine, "fused")
        amp.register_float_function(torch, "no_such_thing")
        m, o = amp.initialize(m, o)
    """)
    assert "mine.fused = preamp.half_function(mine.fused)\n" in found.after
    rules = "".join(found.after.partition("ops=")[2].split())
    assert rules.startswith('preamp.OpRules().with_full("sigmoid").with_low("softmax")')
    first, _ = [note for note in found.notes if note.by_hand]
    assert first.line == 7 and "no_such_thing" in first.seen


def test_two_sessions_have_two_names() -> None:
    after = clean("""
        from apex import amp
        netD, optD = amp.initialize(netD, optD)
        netG, optG = amp.initialize(netG, optG)
        for x in data:
            fake = netG(x)
            lossD = netD(fake.detach())
            with amp.scale_loss(lossD, optD) as s:
                s.backward()
            optD.step()
            lossG = -netD(fake)
            with amp.scale_loss(lossG, optG) as s:
                s.backward()
            optG.step()
    """)
    assert "session_optd = preamp.prepare(netD, optD" in after and "session_optg.backward(lossG)" in after
    assert "session_optd.backward(lossD)" in after and "session_optg.step()" in after


def test_a_free_name_and_a_global() -> None:
    after = clean("""
        from apex import amp
        session = open("log")
        model = optimizer = None

        def setup():
            global model, optimizer
            model, optimizer = make()
            model, optimizer = amp.initialize(model, optimizer)

        def step(x):
            loss = model(x)
            with amp.scale_loss(loss, optimizer) as s:
                s.backward()
            optimizer.step()
    """)
    assert "global model, optimizer, amp_session\n" in after and "    amp_session.backward(loss)\n" in after


def test_branches_without_amp_get_a_session_too() -> None:
    after = clean("""
        from apex import amp
        model, optimizer = make()
        if args.amp:
            print("amp")
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        elif args.other:
            model = other(model)
        else:
            raise SystemExit
        for x in data:
            loss = model(x)
            if args.amp:
                with amp.scale_loss(loss, optimizer) as s:
                    s.backward()
            else:
                loss.backward()
            # one step
            optimizer.step()
    """)
    assert after.count("preamp.prepare(") == 2
    assert '    model = other(model)\n    session = preamp.prepare(model, optimizer, level="O0")\nelse:\n' in after
    assert "        loss = model(x)\n    session.backward(loss)\n    # one step\n    session.step()\n" in after


def test_gradients_that_are_read_need_to_be_true() -> None:
    text = SCRIPT.replace("    optimizer", "    clip_grad_norm_(model.head.parameters(), 1)\n    optimizer")
    after = clean("from torch.nn.utils import clip_grad_norm_\n" + text)
    assert "    session.unscale_()\n    clip_grad_norm_(model.head.parameters(), 1)\n    session.step()\n" in after
    ((line, words),) = by_hand(SCRIPT.replace("    optimizer", "    log(model.w.grad)\n    optimizer"))
    assert line == 7 and "session.unscale_()" in words


@pytest.mark.parametrize(
    "clip",
    [
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2)",
        "nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), max_norm=1.0, norm_type=2)",
        "nn.utils.clip_grad_norm_([p for p in amp.master_params(optimizer)], 1.0, 2)",
    ],
)
def test_clips_of_everything(clip: str) -> None:
    after = clean("import torch.nn as nn\n" + SCRIPT.replace("    optimizer", f"    norm = {clip}\n    optimizer"))
    assert "    norm = session.clip_grad_norm_(1.0, norm_type=2)\n    session.step()\n" in after


def test_a_forward_out_of_sight_is_a_note() -> None:
    ((line, words),) = by_hand("""\
        from apex import amp

        class Solver:
            def __init__(self, net, opt):
                self.net, self.opt = amp.initialize(net, opt)

            def backward(self, loss):
                with amp.scale_loss(loss, self.opt) as scaled:
                    scaled.backward()
                self.opt.step()
    """)
    assert line == 8 and "with self.session.autocast():" in words


def test_sessions_that_are_out_of_reach_are_notes() -> None:
    notes = by_hand("""\
        from apex import amp

        def make(net, opt, **options):
            return amp.initialize(net, opt, **options)

        def step(loss, opt):
            with amp.scale_loss(loss, opt) as scaled:
                scaled.backward()
    """)
    assert [line for line, _ in notes] == [4, 7]
    assert all("session" in words for _, words in notes)


def test_a_function_is_not_handed_a_session_that_is_not_there_yet() -> None:
    found = migrated("""
        from apex import amp

        def save(opt):
            return amp.state_dict()

        def main():
            save(None)
            model, opt = amp.initialize(make(), None)
    """)
    assert "def save(opt):\n    return amp.state_dict()" in found.after and found.left


def test_what_has_no_counterpart_is_told() -> None:
    notes = by_hand("""\
        import apex
        from apex import amp
        from apex.fp16_utils import FP16_Optimizer
        from apex.parallel import LARC, Reducer
        handle = amp.init()
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        optimizer = LARC(optimizer)
        scale = amp._amp_state.loss_scalers[0].loss_scale()
        for p in amp.master_params(optimizer):
            p.grad.mul_(2)
        if amp is None:
            raise SystemExit
    """)
    assert [line for line, _ in notes] == [5, 6, 7, 8, 9, 11]
    told = [words for _, words in notes]
    assert 'level="O2"' in told[1] and "preamp run" in told[2] and "session.loss_scale()" in told[3]
    assert "session.unscale_()" in told[4]


def test_stars_are_named() -> None:
    ((line, words),) = by_hand("from apex.fp16_utils import *\nmodel = network_to_half(model)\n")
    assert line == 1 and "network_to_half" in words


def test_states_and_casts() -> None:
    found = migrated("""
        from apex import amp
        model, optimizer = amp.initialize(model, optimizer)
        torch.save({"amp": amp.state_dict()}, "f")
        amp.load_state_dict(torch.load("f")["amp"])
        with amp.disable_casts():
            y = model(x)
    """)
    assert '{"amp": session.state_dict()}' in found.after
    assert 'session.load_state_dict(torch.load("f")["amp"])' in found.after
    assert "with session.autocast(enabled=False):" in found.after
    assert found.left == 0 and "Apex saved does not load" in found.notes[0].write


# -- files


def test_without_apex() -> None:
    text = "import torch  # not apex\nfrom torch.cuda import amp\nwith amp.autocast():\n    pass\n"
    found = migrate_source(text, "s.py")
    assert found.after == text and not found.uses_apex and not found.notes
    assert not migrate_source("", "s.py").changed


def test_what_does_not_parse_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CannotParse, match=r"^s\.py:2: not Python"):
        migrate_source("from apex import amp\nprint 'x'\n", "s.py")
    file = tmp_path / "s.py"
    file.write_bytes(b"# coding: utf-8\nfrom apex import amp  # \xe9\n")
    text, status = run([file])
    assert status == 2 and text.startswith("error: ") and "UTF-8" in text
    with pytest.raises(NoSuchFile, match=r"nothing\.py"):
        run([tmp_path / "nothing.py"])


def test_folders_and_status(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCRIPT, encoding="utf-8")
    for name, text in (("sub/b.py", "print('plain')\n"), (".venv/c.py", SCRIPT)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    text, status = run([tmp_path])
    assert status == 0 and text.count("+++ b/") == 1 and "1 file uses nothing of Apex" in text
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == SCRIPT
    text, status = run([tmp_path / "sub" / "b.py"])
    assert status == 0 and "uses nothing of Apex" in text
    (tmp_path / "d.py").write_text("from apex.parallel import LARC\nopt = LARC(opt)\n", encoding="utf-8")
    text, status = run([tmp_path])
    assert status == 1 and f"{tmp_path}/d.py:2: by hand: apex.parallel.LARC: " in text


def test_the_difference_is_a_patch(tmp_path: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("there is no patch here")
    found = migrate_source(SCRIPT.rstrip("\n"), "a.py")
    (tmp_path / "a.py").write_text(SCRIPT.rstrip("\n"), encoding="utf-8")
    done = subprocess.run(["patch", "-p1"], input=found.diff(), text=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == found.after


def test_written_files_keep_encoding_line_ends_and_mode(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\n# caf\xe9\n" + SCRIPT + "from apex.parallel import LARC\nopt = LARC(opt)\n"
    file = tmp_path / "a.py"
    file.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    file.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(file)
    said, status = run([link], write=True)
    data = file.read_bytes().decode("latin-1")
    assert status == 1 and "rewritten" in said and link.is_symlink()
    assert data.count("\r\n") == data.count("\n") and "caf\xe9" in data and "session.backward(loss)\r\n" in data
    assert file.stat().st_mode & 0o777 == 0o750
    line = int(said.splitlines()[1].partition("link.py:")[2].partition(":")[0])
    assert data.splitlines()[line - 1] == "opt = LARC(opt)"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py", "link.py"]
    run([link], write=True)
    assert file.read_bytes().decode("latin-1") == data


def test_without_libcst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(MissingExtra, match=r"preamp\[migrate\]"):
        migrate_source(SCRIPT, "s.py")


def test_regions_in_the_methods_that_make_what_a_loss_is_made_of() -> None:
    after = clean("""
        from apex import amp

        class Model:
            def __init__(self, net):
                self.net, self.optim = amp.initialize(net, make(net), opt_level="O1")

            def set_input(self, x, y):
                self.x, self.y = x.cuda(), y.cuda()

            def forward(self):
                self.out = self.net(self.x)

            def judge(self):
                self.loss = criterion(self.out, self.y)

            def train(self):
                self.forward()
                self.judge()
                self.optim.zero_grad(); self.backward()
                self.optim.step()

            def backward(self):
                with amp.scale_loss(self.loss, self.optim) as s:
                    s.backward()
    """)
    region = "        with self.session.autocast():\n            "
    assert f"{region}self.out = self.net(self.x)\n" in after
    assert f"{region}self.loss = criterion(self.out, self.y)\n" in after
    assert after.count("autocast()") == 2
    assert "        self.session.zero_grad(); self.backward()\n        self.session.step()\n" in after
    assert "        self.session.backward(self.loss)\n" in after


def test_a_session_that_nobody_gets_is_a_note() -> None:
    ((line, words),) = by_hand("""\
        import apex

        def prepare(model, optimizer, opt_level="O1"):
            model, optimizer = apex.amp.initialize(model, optimizer, opt_level=opt_level)
            return model, optimizer
    """)
    assert line == 4 and "used nowhere" in words and "session.backward(loss)" in words
