"""A script for two ranks: FSDP2 by Lightning's `ModelParallelStrategy`, in Trainer and Fabric, against a plain loop."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import preamp
from preamp.integrations.lightning import PreampPrecision
from preamp.sharding import full_tensor

from .loops import CLIP, network

STEPS, MICRO, HALF, BAD = 8, 2, 4, 5


def rows() -> list[tuple[Tensor, Tensor]]:
    """Batches of this rank; one of them overflows on one rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(16)]
    if dist.get_rank() == 1:
        made[BAD * MICRO] = (made[BAD * MICRO][0] * float("inf"), made[BAD * MICRO][1])
    return made


def shard(net: nn.Module, level: str) -> nn.Module:
    policy = preamp.policy(level)
    for layer in (net[0], net[3]):
        fully_shard(layer, mp_policy=policy.fsdp())
    return fully_shard(net, mp_policy=policy.fsdp())


def optimizer_of(net: nn.Module) -> Any:
    return preamp.optim.AdamW(net.parameters(), 1e-2, eps=1e-4)


def whole(net: nn.Module) -> list[Tensor]:
    for part in net.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    return [full_tensor(p.detach()).float() for p in net.parameters()]


def plain(level: str) -> tuple[list[Tensor], dict[str, Any]]:
    net = shard(network(), level)
    optimizer = optimizer_of(net)
    with preamp.prepare(net, optimizer, level=level) as session:
        for i in range(STEPS):
            for j, (x, y) in enumerate(rows()[i * MICRO : (i + 1) * MICRO]):
                net.set_requires_gradient_sync(j == MICRO - 1)
                with session.autocast():
                    loss = nn.functional.mse_loss(net(x).float(), y)
                session.backward(loss / MICRO)
            session.clip_grad_norm_(CLIP)
            session.step()
            session.zero_grad()
        return whole(net), session.state_dict()


class Module(L.LightningModule):
    def __init__(self, level: str) -> None:
        super().__init__()
        self.level, self.net = level, network()

    def configure_model(self) -> None:
        if not hasattr(self.net, "reshard"):
            self.net = shard(self.net, self.level)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = rows()[index]
        return nn.functional.mse_loss(self.net(x).float(), y)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Keep(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == HALF and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.state = trainer.precision_plugin.session.state_dict()
        self.weights = whole(module.net)


def trainer(level: str, at: Path, together: bool, load: Path | None) -> Keep:
    kept = Keep(at)
    made = L.Trainer(
        plugins=[PreampPrecision(level)], accelerator="cpu", devices=2, max_steps=STEPS, logger=False,
        strategy=ModelParallelStrategy(2, 1, save_distributed_checkpoint=not together), callbacks=[kept],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, accumulate_grad_batches=MICRO, gradient_clip_val=CLIP, max_epochs=1,
        default_root_dir=at.parent,
    )  # fmt: skip
    made.fit(Module(level), DataLoader(range(16), batch_size=None), ckpt_path=load and str(load))  # type: ignore[arg-type]
    return kept


def fabric(level: str, folder: Path, begin: int, end: int) -> tuple[list[Tensor], dict[str, Any]]:
    precision = PreampPrecision(level)
    made = Fabric(
        plugins=[precision], accelerator="cpu", devices=2,
        strategy=FabricStrategy(lambda net, mesh: shard(net, level), 2, 1),
    )  # fmt: skip
    made.launch()
    net = made.setup_module(network())
    optimizer = made.setup_optimizers(optimizer_of(net))
    state = {"net": net, "optimizer": optimizer, "precision": precision}
    if begin:
        made.load(folder / "fabric", state)
        precision.load_state_dict(state["precision"])
    for i in range(begin, end):
        for j, (x, y) in enumerate(rows()[i * MICRO : (i + 1) * MICRO]):
            with made.no_backward_sync(net, enabled=j < MICRO - 1):
                made.backward(nn.functional.mse_loss(net(x), y) / MICRO)
        made.clip_gradients(net, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    made.save(folder / "fabric", state)
    told = whole(net.module), precision.session.state_dict()
    precision.close()
    return told


def main(level: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    weights, state = plain(level)
    assert state["skipped"] == 1 and state["steps"] == STEPS
    for together in (False, True):  # checkpoints in parts, and whole
        at = folder / f"trainer-{together}"
        for load in (None, at):
            kept = trainer(level, at, together, load)
            torch.testing.assert_close(kept.weights, weights, rtol=0, atol=0)
            assert kept.state == state
            dist.barrier()
    saved = torch.load(folder / "trainer-True", weights_only=False)["state_dict"]
    assert {value.dtype for value in saved.values()} == {torch.float32}
    once, kept_state = fabric(level, folder, 0, STEPS)
    torch.testing.assert_close(once, weights, rtol=0, atol=1e-7)  # clipped by torch
    fabric(level, folder, 0, HALF)
    resumed, resumed_state = fabric(level, folder, HALF, STEPS)
    torch.testing.assert_close(resumed, once, rtol=0, atol=0)
    assert kept_state == resumed_state == state
    print("equal\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
