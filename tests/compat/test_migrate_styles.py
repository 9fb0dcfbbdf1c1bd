"""Trainings in the styles of public repositories: translated without a note, they run and end like the originals."""

from __future__ import annotations

from pathlib import Path

import pytest

from .migrations import DATA, clean, trained

pytest.importorskip("libcst")

STYLES = {
    "timm": """
import copy
from collections import OrderedDict
try:
    from apex import amp
    from apex.parallel import convert_syncbn_model
    has_fast = True
except ImportError:
    has_fast = False


class ModelEma:
    def __init__(self, model, decay=0.9):
        self.ema = copy.deepcopy(model)
        self.decay = decay

    def update(self, model):
        with torch.no_grad():
            for old, new in zip(self.ema.parameters(), model.parameters()):
                old.mul_(self.decay).add_(new.float(), alpha=1 - self.decay)


def train_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, use_amp=False, model_ema=None):
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        output = model(input)
        loss = loss_fn(output, target)
        losses.append(loss.item())
        optimizer.zero_grad()
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        if model_ema is not None:
            model_ema.update(model)
        if lr_scheduler is not None:
            lr_scheduler.step()
    return OrderedDict([("loss", losses[-1])])


def main():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    use_amp = False
    if has_fast and args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, loss_scale=128.0)
        use_amp = True
    model_ema = ModelEma(model)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6)
    train_epoch(0, model, list(zip(X, Y)), optimizer, nn.MSELoss(), args, lr_scheduler, use_amp, model_ema)


main()
""",
    "dali": """
import torch.nn.functional as F
from apex import amp
args.loss_scale = "128.0"  # as a command line gives it


def to_python_float(t):
    return t.item() if hasattr(t, "item") else t[0]


def reduce_tensor(tensor):
    return tensor.clone()


def adjust_learning_rate(optimizer, epoch, step):
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.05 * 0.99 ** step


def train(train_loader, model, criterion, optimizer, epoch):
    model.train()
    for i, (x, y) in enumerate(train_loader):
        adjust_learning_rate(optimizer, epoch, i)
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
        if args.fp16_opt_level is not None:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        reduced_loss = reduce_tensor(loss.data)
        losses.append(to_python_float(reduced_loss))


model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, loss_scale=args.loss_scale)
train(list(zip(X, Y)), model, F.mse_loss, optimizer, 0)
""",
    "maskrcnn": """
from apex import amp


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, images, targets):
        features = torch.relu(self.backbone(images))
        return {
            "loss_a": nn.functional.mse_loss(self.a(features).float(), targets),
            "loss_b": nn.functional.l1_loss(self.b(features).float(), targets),
        }


def reduce_loss_dict(loss_dict):
    return {k: v.detach() for k, v in loss_dict.items()}


def do_train(model, data_loader, optimizer, scheduler):
    model.train()
    for iteration, (images, targets) in enumerate(data_loader):
        loss_dict = model(images, targets)
        total = sum(loss for loss in loss_dict.values())
        loss_dict_reduced = reduce_loss_dict(loss_dict)
        losses.append(sum(loss_dict_reduced.values()).item())
        optimizer.zero_grad()
        # Note: If mixed precision is not used, this ends up doing nothing
        with amp.scale_loss(total, optimizer) as scaled_losses:
            scaled_losses.backward()
        optimizer.step()
        scheduler.step()


def train():
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    level = args.fp16_opt_level if args.fp16 else "O0"
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0)
    do_train(model, list(zip(X, Y)), optimizer, scheduler)


train()
""",
    "pix2pix": """
from apex import amp


class Pix2Pix:
    def __init__(self):
        self.netG = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.netD = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
        self.criterion = nn.MSELoss()
        self.optimizer_G = torch.optim.Adam(self.netG.parameters(), lr=1e-2, eps=1e-4)
        self.optimizer_D = torch.optim.Adam(self.netD.parameters(), lr=1e-2, eps=1e-4)
        [self.netG, self.netD], [self.optimizer_G, self.optimizer_D] = amp.initialize(
            [self.netG, self.netD], [self.optimizer_G, self.optimizer_D], opt_level=args.fp16_opt_level, num_losses=2)

    def set_requires_grad(self, net, requires_grad=False):
        for param in net.parameters():
            param.requires_grad = requires_grad

    def forward(self):
        self.fake = self.netG(self.real_A)

    def backward_D(self):
        pred_fake = self.netD(self.fake.detach())
        pred_real = self.netD(self.real_B)
        self.loss_D = self.criterion(pred_fake.float(), torch.zeros(16, 1)) + self.criterion(
            pred_real.float(), torch.ones(16, 1))
        with amp.scale_loss(self.loss_D, self.optimizer_D, loss_id=0) as scaled:
            scaled.backward()

    def backward_G(self):
        self.loss_G = self.criterion(self.netD(self.fake).float(), torch.ones(16, 1))
        with amp.scale_loss(self.loss_G, self.optimizer_G, loss_id=1) as scaled:
            scaled.backward()

    def optimize_parameters(self, x, y):
        self.real_A, self.real_B = x, y
        self.forward()
        self.set_requires_grad(self.netD, True)
        self.optimizer_D.zero_grad()
        self.backward_D()
        self.optimizer_D.step()
        self.set_requires_grad(self.netD, False)
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()


model = Pix2Pix()
for x, y in zip(X, Y):
    model.optimize_parameters(x, y)
    losses += [model.loss_D.item(), model.loss_G.item()]
""",
    "hf_trainer": """
class Trainer:
    def __init__(self, model, args, optimizer):
        self.model, self.args, self.optimizer = model, args, optimizer

    def train(self):
        model, optimizer = self.model, self.optimizer
        if self.args.fp16:
            try:
                from apex import amp
            except ImportError:
                raise ImportError("Please install apex")
            model, optimizer = amp.initialize(model, optimizer, opt_level=self.args.fp16_opt_level)
        for step, (x, y) in enumerate(zip(X, Y)):
            model.train()
            outputs = model(x)
            loss = nn.functional.mse_loss(outputs.float(), y)
            losses.append(loss.item())
            loss = loss / self.args.accum
            if self.args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            if (step + 1) % self.args.accum == 0:
                if self.args.fp16:
                    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), self.args.max_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_norm)
                optimizer.step()
                model.zero_grad()
            if step % 5 == 0:
                self.evaluate(model)

    def evaluate(self, model):
        model.eval()
        with torch.no_grad():
            model(X[0])


net = nn.Linear(6, 1)
Trainer(net, args, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)).train()
""",
    "fairseq": """
from apex import amp


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05)
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=args.fp16_opt_level)

    def train_step(self, samples):
        self.optimizer.zero_grad()
        for i, (x, y) in enumerate(samples):
            loss = self.criterion(x, y)
            with amp.scale_loss(loss / len(samples), self.optimizer) as scaled_loss:
                scaled_loss.backward()
            losses.append(loss.item())
        self.grad_norm = nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.5)
        self.take_step()

    def criterion(self, x, y):
        return nn.functional.mse_loss(self.model(x).float(), y)

    def take_step(self):
        self.optimizer.step()


trainer = Trainer(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
for at in range(0, 12, 2):
    trainer.train_step(list(zip(X, Y))[at : at + 2])
""",
    "own": """
from apex import amp


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])


class Scheduled:
    def __init__(self, optim):
        self.optim = optim
        self.steps = 0

    def step(self):
        self.steps += 1
        for group in self.optim.param_groups:
            group["lr"] = 0.05 / self.steps**0.5
        self.optim.step()

    def zero_grad(self):
        self.optim.zero_grad()


model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = Plain(model.parameters(), 0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
scheduled = Scheduled(optimizer)
for x, y in zip(X, Y):
    loss = nn.functional.mse_loss(model(x).float(), y)
    losses.append(loss.item())
    scheduled.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(model[2].parameters(), 0.1)
    scheduled.step()
""",
}

CASES = [(name, "O1", True) for name in STYLES]
CASES += [(name, "O2", True) for name in ("timm", "pix2pix", "fairseq")]
CASES += [(name, "O1", False) for name in ("timm", "maskrcnn", "hf_trainer")]


def test_the_styles_of_public_repositories(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for name, level, fp16 in CASES:
        text = DATA.replace("LEVEL", level).replace("FP16", str(fp16)).lstrip() + STYLES[name]
        for folder, body in ((old, text), (new, clean(text))):
            folder.mkdir(exist_ok=True)
            (folder / f"{name}_{level}_{fp16}.py").write_text(body, encoding="utf-8")
    before = trained("apex", tmp_path, sorted(old.iterdir()))
    after = trained("preamp", tmp_path, sorted(new.iterdir()))
    assert set(before) == set(after) and len(before) == len(CASES)
    for name, losses in before.items():
        assert len(losses) >= 12 and losses[-1] != losses[0]
        assert after[name] == pytest.approx(losses, rel=0.02, abs=0.02), name
