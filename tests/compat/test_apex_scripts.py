"""Scripts as tutorials and posts print them, with a network of the zoo for torchvision's: they run as they stand."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from preamp.zoo import TASKS

pytestmark = pytest.mark.usefixtures("installed_as_apex")


def network() -> nn.Module:
    """In the place of torchvision.models.resnet18."""
    return TASKS["seresnext"].build("ci", seed=0)


def loader(batches: int = 3) -> list[Any]:
    task = TASKS["seresnext"]
    return [(x[0], y) for x, y in task.batches("ci", seed=0, steps=batches, batch_size=4)]


def run(script: str, **names: Any) -> dict[str, Any]:
    space = {"network": network, "dataloader": loader(), "math": math, **names}
    exec(compile(textwrap.dedent(script), "script.py", "exec"), space)
    return space


LOOP = """
    import torch
    import torch.nn as nn
    import torch.optim as optim
    from apex import amp

    # Check if GPU is available
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # Define model, loss, and optimizer
    model = network().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    # Initialize mixed precision with Apex
    model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")

    # Example training loop
    for epoch in range(2):
        for inputs, labels in dataloader:  # Assume `dataloader` is defined
            inputs, labels = inputs.to(device), labels.to(device)

            # Forward pass
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            if epoch == 0 and inputs is dataloader[0][0]:
                first = float(loss.detach())

            # Backward pass
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

            # Update weights
            optimizer.step()
"""


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_loop(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    space = run(LOOP.format(level=level))
    assert math.isfinite(float(space["loss"].detach()))
    assert f"Selected optimization level {level}" in capsys.readouterr().out


def test_gradient_accumulation() -> None:
    space = run("""
        from apex import amp
        import torch
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        criterion, device = torch.nn.CrossEntropyLoss(), "cpu"
        before = [p.clone() for p in model.parameters()]
        accumulation_steps = 4
        optimizer.zero_grad()

        for i, (inputs, labels) in enumerate(dataloader):
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            loss = criterion(outputs, labels)

            # Scale loss and backpropagate
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

            # Update weights after every accumulation_steps
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    """, dataloader=loader(8))  # fmt: skip
    after = list(space["model"].parameters())
    assert any(not torch.equal(a, b) for a, b in zip(space["before"], after, strict=True))


def test_multi_gpu_as_printed(tmp_path: Any) -> None:
    """DDP before initialize, which gets distributed=True: Apex had no such argument, and refused the order."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        run("""
            import torch
            from apex import amp
            from torch.nn.parallel import DistributedDataParallel as DDP
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

            # Wrap the model for DDP
            model = DDP(model)

            # Initialize mixed precision
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", distributed=True)
            for inputs, labels in dataloader:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)
                optimizer.step()
        """)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_clipping_and_validation_in_fp32(level: str) -> None:
    space = run(LOOP.format(level=level).replace("# Update weights\n", (
        "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)\n"
    )) + """
    model.float()
    model.eval()
    with torch.no_grad(), amp.disable_casts():
        outputs = model.forward(dataloader[0][0])
    """)  # fmt: skip
    assert space["outputs"].isfinite().all()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradient_penalty(level: str) -> None:
    """A WGAN-GP critic: the penalty's gradient is made inside the loss, unscaled, and differentiated again."""
    space = run("""
        import torch
        from apex import amp
        torch.manual_seed(0)
        critic = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1))
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
        critic, optimizer = amp.initialize(critic, optimizer, opt_level=level, verbosity=0)
        norms = []
        for step in range(40):
            real, fake = torch.randn(16, 4) + 2, torch.randn(16, 4)
            mix = torch.rand(16, 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_(True)
            score = critic(between)
            gradients, = torch.autograd.grad(score.sum(), between, create_graph=True)
            penalty = ((gradients.float().norm(2, dim=1) - 1) ** 2).mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            norms.append(float(penalty.detach()))
    """, level=level)  # fmt: skip
    assert space["norms"][-1] < space["norms"][0] and math.isfinite(space["norms"][-1])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gan_with_three_losses(level: str) -> None:
    """Two models, two optimizers, three losses with scales of their own."""
    space = run("""
        import torch
        from apex import amp
        torch.manual_seed(0)
        netD = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        netG = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        criterion = torch.nn.BCEWithLogitsLoss()
        optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3)
        optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3)
        [netD, netG], [optimizerD, optimizerG] = amp.initialize(
            [netD, netG], [optimizerD, optimizerG], opt_level=level, num_losses=3, verbosity=0
        )
        for i in range(20):
            netD.zero_grad()
            errD_real = criterion(netD(torch.randn(8, 4) + 3), torch.ones(8, 1))
            with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
                errD_real_scaled.backward()
            fake = netG(torch.randn(8, 2))
            errD_fake = criterion(netD(fake.detach()), torch.zeros(8, 1))
            with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
                errD_fake_scaled.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(8, 1))
            with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
                errG_scaled.backward()
            optimizerG.step()
        state = amp.state_dict()
    """, level=level)  # fmt: skip
    assert len(space["state"]) == 3 and all(s["unskipped"] >= 18 for s in space["state"].values())
    assert all(p.isfinite().all() for p in space["netG"].parameters())


def test_fp16_optimizer_and_network_to_half() -> None:
    space = run("""
        import torch
        from apex.fp16_utils import FP16_Optimizer, network_to_half
        import warnings
        warnings.simplefilter("ignore")
        model = network_to_half(network())
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.01), dynamic_loss_scale=True, verbose=False)
        losses = []
        for epoch in range(4):
            for inputs, labels in dataloader[:1]:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
                optimizer.backward(loss)
                optimizer.clip_master_grads(1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
    """)
    assert all(map(math.isfinite, space["losses"]))


def test_checkpoint_as_apex_documents_it(tmp_path: Any) -> None:
    space = run("""
        import torch
        from apex import amp
        def make():
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

        def step(batch):
            inputs, labels = batch
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            return float(loss.detach())

        model, optimizer = make()
        step(dataloader[0])
        checkpoint = {
            'model': model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'amp': amp.state_dict()
        }
        torch.save(checkpoint, path)
        expected = [step(batch) for batch in dataloader[1:]]

        model, optimizer = make()
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        amp.load_state_dict(checkpoint['amp'])
        resumed = [step(batch) for batch in dataloader[1:]]
    """, path=str(tmp_path / "amp_checkpoint.pt"))  # fmt: skip
    assert space["resumed"] == space["expected"]
