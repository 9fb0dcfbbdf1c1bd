"""`preamp migrate`: what becomes of backward passes, clipping, steps and states, and how sessions reach them."""

from __future__ import annotations

import pytest

from .migrations import SCRIPT, by_hand, clean, migrated

pytest.importorskip("libcst")


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
    region, _, _ = after.partition("    session_optd.backward(lossD)")  # it has what both losses are made of
    assert region.endswith("        fake = netG(x)\n        lossD = netD(fake.detach())\n")


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
        "nn.utils.clip_grad_norm_(amp.master_params(optimizer) if fast else model.parameters(), 1.0, 2)",
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
    assert found.left == 0 and "Apex saved is taken over by preamp.checkpoint.adopt_scale" in found.notes[0].write


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
