"""Steps under FSDP2 and DistributedDataParallel, counted: `session.memory()` of rank 0, and what it sent, as JSON."""

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import preamp

CASES = {
    "FSDP2 O0": ("fsdp2", "O0", "float32"), "FSDP2 O2": ("fsdp2", "O2", "float32"),
    "FSDP2 O5": ("fsdp2", "O5", "float32"), "FSDP2 O4, 8 bits": ("fsdp2", "O4", "8bit"),
    "DDP O0": ("ddp", "O0", "float32"), "DDP O4": ("ddp", "O4", "float32"), "DDP O5": ("ddp", "O5", "float32"),
}  # fmt: skip


def build() -> nn.Sequential:
    """First dimensions are even; three tensors are large enough for moments in 8 bits, one has rows of whole blocks."""
    return nn.Sequential(
        nn.Linear(64, 66), nn.LayerNorm(66), nn.GELU(), nn.Linear(66, 64), nn.Linear(64, 256), nn.Linear(256, 16)
    )  # fmt: skip


def size(tensor: Any) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in FSDP2's collectives, if they are rings."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {"_allgather_base_": 1, "_reduce_scatter_base_": 0}
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in own:
            self.bytes += (dist.get_world_size() - 1) * size(args[own[name]])
        return func(*args, **(kwargs or {}))


def counted(shard: str, level: str, states: str) -> dict[str, Any]:
    model: Any = build()
    if shard == "fsdp2":
        mixed = preamp.policy(level).fsdp()
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mp_policy=mixed)
        fully_shard(model, mp_policy=mixed)
    else:
        model = DistributedDataParallel(model)
    reduced = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal reduced
        reduced += size(bucket.buffer())
        return allreduce_hook(None, bucket)

    hook.__annotations__.clear()
    optimizer = preamp.optim.AdamW(model.parameters(), states=states)
    with preamp.prepare(model, optimizer, level=level) as session:
        if shard == "ddp":
            model.register_comm_hook(None, hook)
        for _ in range(2):
            session.zero_grad()
            reduced = 0
            with Sent() as sent, session.autocast():
                session.backward(model(torch.randn(8, 64)).float().square().mean())
            session.step()
        # of S bytes a ring all-reduce sends 2 (N-1)/N S, which is S for two ranks
        return {"rows": session.memory().to_json()["rows"], "sent": sent.bytes if shard == "fsdp2" else reduced}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {name: counted(*case) for name, case in CASES.items()}
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
