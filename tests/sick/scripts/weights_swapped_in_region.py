"""Fine-tune with a KL anchor; the reference weights are swapped in for its forward."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(8)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 12))
anchor = {n: p.detach().clone() for n, p in model.named_parameters()}


class swapped:
    """Run the block with the anchor's weights."""

    def __enter__(self):
        self.kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        for n, p in model.named_parameters():
            p.data.copy_(anchor[n])  # sick: PA110 module=.

    def __exit__(self, *exc):
        for n, p in model.named_parameters():
            p.data.copy_(self.kept[n])


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    x = torch.randn(64, 16)
    y = x[:, :12].argmax(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits = model(x)
        with torch.no_grad(), swapped():
            ref = model(x)
        kl = F.kl_div(
            logits.float().log_softmax(-1), ref.float().log_softmax(-1), log_target=True, reduction="batchmean"
        )
        loss = F.cross_entropy(logits.float(), y) + 2.0 * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(step, round(loss.item(), 4), "kl", round(kl.item(), 5))
