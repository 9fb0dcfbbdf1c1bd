"""Scripts for Apex and their translations, run: the trainings end alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from .migrations import DATA, clean, trained

pytest.importorskip("libcst")

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
