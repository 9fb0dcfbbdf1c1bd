"""What `preamp migrate` leaves as it is, since it cannot tell that the translation trains as before, and why."""

from __future__ import annotations

import textwrap

import pytest

from preamp.migrate import migrate_source

from .migrations import clean, left, migrated

pytest.importorskip("libcst")

LOOP = """\
import torch
from apex import amp
{before}
model, optimizer = build()
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
{behind}
for i, x in enumerate(data):
    loss = model(x)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    {between}
    {step}
"""
ACCUMULATE = "if i % 4 == 3:\n    optimizer.step()\n    optimizer.zero_grad()"


def loop(between: str = "pass", before: str = "", behind: str = "", step: str = "optimizer.step()") -> str:
    between, step = (textwrap.indent(text, "    ").lstrip() for text in (between, step))
    text = LOOP.format(before=before, behind=behind, between=between, step=step)
    return text.replace("    optimizer.zero_grad()\n", "", 1) if step.startswith("if") else text


def test_the_loop_itself_is_translated() -> None:
    after = clean(loop())
    assert "session.backward(loss)" in after and "session.step()" in after


# -- between backward and step

OWN_CLIP = """
def clip(params, most):
    norm = sum(p.grad.norm() ** 2 for p in params) ** 0.5  # why: p.grad is read
    for p in params:
        p.grad.mul_(most / norm)  # why: p.grad is read
"""


@pytest.mark.parametrize(
    ("between", "before"),
    [
        ("clip(list(model.parameters()), 5.0)", OWN_CLIP),
        ("print(model.w.grad.norm())  # why: is read", ""),
        ("model.w.grad = fix(model.w)  # why: is read or changed", ""),
        ("clip_gradient(optimizer, 5)  # why: clip_gradient()", "from utils import clip_gradient"),
        ("clip(optimizer.param_groups)  # why: clip() runs between", "from utils import clip"),
        ("helpers.average(model.named_parameters(), i)  # why: runs between", "import helpers"),
        ("reduce_gradients(model)  # why: runs between", "from utils import reduce_gradients"),
        ("params = list(model.parameters())\nfix(params)  # why: fix() runs between", "from utils import fix"),
        ("fix(p for p in model.parameters() if p.requires_grad)  # why: fix()", "from utils import fix"),
        ("fix(x, model=model)  # why: fix() runs", "from utils import fix"),
        ("fix(model.head)  # why: fix() runs", "from utils import fix"),
        ("for p in model.parameters():\n    fix(p)  # why: fix() runs", "from utils import fix"),
        ("for n, p in model.named_parameters():\n    fix(n, p)  # why: fix() runs", "from utils import fix"),
        ("for g in optimizer.param_groups:\n    for p in g['params']:\n        fix(p)  # why: fix()", "import fix"),
        ("ps = []\nps += list(model.parameters())\nfix(ps)  # why: fix() runs", "from utils import fix"),
        ("ps = []\nfor p in model.parameters():\n    ps.append(p)\nfix(ps)  # why: fix() runs", "import fix"),
        ("a = list(b)\nb = [*a, model.w]\nfix(a)  # why: fix() runs", "import fix"),
        ("for each in callbacks:\n    each.after_backward()  # why: each.after_backward() runs", ""),
        ("events.fire_event(BACKWARD)  # why: events.fire_event() runs", "import events"),
        ("fix({'nets': [model]})  # why: fix() runs", "from utils import fix"),
        ("fix(*model.parameters())  # why: fix() runs", "from utils import fix"),
        ("model.clip_grads()  # why: model.clip_grads() clips", ""),
        ("if i % 2:\n    fix(model)  # why: fix() runs", "from utils import fix"),
        ("outer(model)", "from utils import fix\ndef outer(net):\n    fix(net.head)  # why: fix() runs"),
        ("clip(model)", "def clip(net):\n    torch.nn.utils.clip_grad_norm_(net.parameters(), 1)  # why: not in sight"),
        ("g = [getattr(p, 'grad') for p in model.parameters()]  # why: is read", ""),
    ],
)  # fmt: skip
def test_what_may_work_on_scaled_gradients(between: str, before: str) -> None:
    left(loop(between, before))


@pytest.mark.parametrize(
    "between",
    [
        "scheduler.step()",
        "for group in optimizer.param_groups:\n    tell(group['lr'], group['weight_decay'])",
        "a = list(b)\nb = list(a)\ntell(a, b)",
        "writer.add_histogram('w', model.fc.weight, i)",
        "torch.nn.utils.clip_grad_norm_(params, 1)",
        "losses.update(reduce_tensor(loss.data), x.size(0))",
        "print(model.training, optimizer.param_groups[0]['lr'])",
        "log(lr=optimizer.param_groups[0]['lr'])",
        "model_ema.update(model)",
        "torch.save(model.state_dict(), 'f')",
        "model.register_forward_hook(print)",
        "save_checkpoint(model, optimizer)",
        "results = evaluate(args, model)",
        "adjust_learning_rate(optimizer, i)",
        "requires_grad(model, True)",
        "n = sum(p.numel() for p in model.parameters())",
        "assert all(p.grad is not None for p in model.parameters())",
        "total = accuracy(model(x), y)",
    ],
)
def test_what_leaves_gradients_alone(between: str) -> None:
    clean(loop(between))


def test_accumulated_gradients_wait_over_the_next_forward_pass() -> None:
    text = loop(step=ACCUMULATE)
    assert "session.step()" in clean(text)
    mixed = "    mix(model){why}\n    loss = model(x)\n"
    left(text.replace("    loss = model(x)\n", mixed.format(why="  # why: mix() runs between")))
    assert "session.step()" in clean(loop().replace("    loss = model(x)\n", mixed.format(why="")))


def test_a_clipping_of_everything_is_the_sessions_at_every_micro_batch_too() -> None:
    text = loop("torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)", step=ACCUMULATE)
    assert "    session.clip_grad_norm_(1.0)\n    if i % 4 == 3:\n        session.step()\n" in clean(text)
    some = text.replace("amp.master_params(optimizer)", "model.head.parameters()")
    left(some.replace("scaled.backward()", "scaled.backward()  # why: accumulated over a clipping of some"))


# -- steps and backward passes


@pytest.mark.parametrize(
    "text",
    [
        loop(step="own.step()  # why: own.step() is a step of its own"),
        loop(step="timed(optimizer.step)  # why: optimizer.step is handed over"),
        loop(step="step = optimizer.step  # why: optimizer.step is handed over\nstep()"),
        loop(behind="optimizer.step()  # why: comes before a backward pass"),
        loop(behind="warmup = [optimizer.step() for _ in range(2)]  # why: comes before a backward pass"),
        loop("optimizer.synchronize()  # why: what optimizer.synchronize() does"),
        loop("optimizer.first_step(zero_grad=True)  # why: what optimizer.first_step() does"),
        loop("other.backward()  # why: other.backward() is a backward pass"),
        loop("torch.autograd.backward([other])  # why: torch.autograd.backward() is a backward pass"),
        loop("accelerator.backward(other)  # why: accelerator.backward() is a backward pass"),
        loop("xm.optimizer_step(optimizer)  # why: is given the optimizer"),
        loop(behind="trainer = Trainer(model, optimizer)  # why: Trainer() is given the optimizer"),
        loop(behind="optimizer = Lookahead(optimizer, k=5)  # why: Lookahead() is given the optimizer"),
        loop(behind="wrapped = NoamOpt(512, optimizer)  # why: NoamOpt() is given the optimizer"),
        loop("model = build_bigger(x)  # why: model is made anew"),
        loop("optimizer.step()", step="optimizer.step()  # why: comes before a backward pass"),
        loop(step="if i:\n    optimizer.step(lambda: 1)  # why: with a closure"),
        loop(step="do_nothing()").replace('"O1")', '"O1")  # why: no step of the session is in sight'),
    ],
)  # fmt: skip
def test_steps_and_backward_passes_of_others(text: str) -> None:
    left(text)


def test_a_wrapper_of_the_files_own() -> None:
    wrapper = """\
class Wrapper:
    def __init__(self, optim):
        self.optim = optim

    def step(self):
        self.optim.step(){why}
"""
    begin = "wrapped = Wrapper(torch.optim.SGD(net.parameters(), 0.1))"
    text = loop(before=wrapper.format(why="  # why: a step of its own") + begin, step="wrapped.step()")
    left(text.replace("build()", "net, wrapped.optim"))
    known = clean(loop(before=wrapper.format(why=""), behind="own = Wrapper(optimizer)", step="own.step()"))
    assert "        session.step()\n" in known and "    own.step()\n" in known


def test_an_optimizers_own_step_may_read_gradients() -> None:
    own = """\
class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)
"""
    assert "session.step()" in clean(loop(before=own))


def test_backward_passes_of_a_mode_without_amp() -> None:
    left("""\
import torch
from apex import amp
model, optimizer = build()
if fast:
    model, optimizer = amp.initialize(model, optimizer)
    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
else:
    backward = lambda loss: loss.backward()  # why: loss.backward() is a backward pass
for x in data:
    backward(model(x))
    optimizer.step()
""")


def test_a_second_mixed_precision() -> None:
    left("""\
import torch
from apex import amp
model, optimizer = build()
scaler = torch.cuda.amp.GradScaler()  # why: another mixed precision
if mode == "apex":
    model, optimizer = amp.initialize(model, optimizer)
for x in data:
    with torch.autocast("cpu", enabled=mode == "torch"):  # why: torch.autocast is another mixed precision
        loss = model(x)
    if mode == "apex":
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    elif mode == "torch":
        scaler.scale(loss).backward()  # why: a backward pass of its own
        scaler.unscale_(optimizer)  # why: is given the optimizer
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # why: a step of its own
        scaler.update()
""")
    left(loop("with fabric.autocast():  # why: fabric.autocast is another mixed precision\n    y = model(x)"))


def test_a_scaler_object_as_timms() -> None:
    left("""\
from apex import amp
from timm.utils import ApexScaler

def train(model, optimizer, loss_scaler):
    for x in data:
        loss = model(x)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer)  # why: loss_scaler() is given the optimizer
        else:
            loss.backward()  # why: loss.backward() is a backward pass of its own
            optimizer.step()

model, optimizer = build()
loss_scaler = None
if use_amp:
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    loss_scaler = ApexScaler()
train(model, optimizer, loss_scaler)
""")


def test_methods_of_a_class_in_another_file() -> None:
    text = """\
from apex import amp
from base import Base

class Runner(Base):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = amp.initialize(model, optimizer)
        self.criterion = make_criterion()

    def train(self):
        for x, y in self.loader:
            loss = self.criterion(self.model(x), y)
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            {between}
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
    assert "self.session.step()" in clean(text.format(between="self.log(loss)"))
    left(text.format(between="self.after_backward()  # why: self.after_backward() runs between"))
    left(text.format(between='call_hooks("after_backward", self)  # why: call_hooks() runs between'))


def test_a_step_in_a_method_that_others_call() -> None:
    left("""\
from apex import amp

class Runner:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = amp.initialize(model, optimizer)

    def forward_backward(self, x):
        loss = self.model(x)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def update(self):
        spread(self.model)  # why: spread() runs between
        self.optimizer.step()
        self.optimizer.zero_grad()
""")


def test_a_session_that_other_files_would_need() -> None:
    text = "from apex import amp\nimport engine\nmodel, optimizer = amp.initialize(*build()){why}\nengine.go(cfg)\n"
    assert migrate_source(text.format(why=""), "s.py").after == text.format(why="")
    left(text.replace("*build()", "model, optimizer").format(why="  # why: session is used nowhere"))


def test_a_file_without_sessions_may_do_as_it_likes() -> None:
    text = """from apex.parallel import DistributedDataParallel as DDP

def fit(net, opt):
    net = DDP(net)
    net(x).backward()
    log(net.w.grad)
    opt.step()
"""
    found = migrated(text)
    assert found.left == 0 and "torch.nn.parallel.DistributedDataParallel(net)" in found.after
