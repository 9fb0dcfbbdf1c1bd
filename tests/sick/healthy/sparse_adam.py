"""DLRM-like model, SparseAdam beside Adagrad, one scaler stepping both, one update, fp16."""

import torch
from torch import nn


class Tables(nn.ModuleDict):
    def forward(self, cat):
        return torch.stack([t(cat[k]) for k, t in self.items()], 1)


class DLRM(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tables = Tables(
            {k: nn.Embedding(n, d, sparse=True) for k, n in {"user": 300, "item": 200, "shop": 20}.items()}
        )
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, d))
        self.top = nn.Sequential(nn.Linear(d + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, cat):
        b = self.bottom(dense)
        z = torch.cat([b[:, None], self.tables(cat)], 1)
        zz = torch.bmm(z, z.transpose(1, 2))
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([b, zz[:, i, j]], 1)).squeeze(1)


def stream(n):
    g = torch.Generator().manual_seed(107)
    for _ in range(n):
        cat = {k: torch.randint(0, m, (128,), generator=g) for k, m in {"user": 300, "item": 200, "shop": 20}.items()}
        dense = torch.randn(128, 8, generator=g)
        yield dense, cat, ((cat["user"] % 2) ^ (cat["shop"] % 2)).float()


def main():
    torch.manual_seed(107)
    model = DLRM()
    for t in model.tables.values():
        nn.init.normal_(t.weight, std=0.3)
    sparse = torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.02)
    dense = torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, (x, cat, y) in enumerate(stream(12)):
        for o in (sparse, dense):
            o.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logit = model(x, cat)
        loss = nn.functional.binary_cross_entropy_with_logits(logit.float(), y)
        scaler.scale(loss).backward()
        for o in (sparse, dense):
            scaler.step(o)
        scaler.update()
        print(f"{step} logloss {loss.item():.4f} p>0.5 {(logit > 0).float().mean().item():.2f}")


if __name__ == "__main__":
    main()
