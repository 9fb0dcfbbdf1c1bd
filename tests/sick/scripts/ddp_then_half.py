"""A model wrapped in DistributedDataParallel, then cast to bf16: torch drops the hooks and ranks stop averaging."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def main():
    torch.manual_seed(31)
    store = tempfile.mkdtemp() + "/store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = DistributedDataParallel(Net())
    model = model.to(torch.bfloat16)  # sick: PA112 module=. line=any
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(32, 16).bfloat16(), torch.randint(0, 8, (32,))
    for step in range(6):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
