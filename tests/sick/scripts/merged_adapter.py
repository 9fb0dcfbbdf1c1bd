"""ReLoRA: small low-rank updates are merged into bfloat16 weights every few steps, and are lost there."""

import torch
from torch import nn


class LoRALinear(nn.Linear):
    def __init__(self, i, o, r=4):
        super().__init__(i, o)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, i) * 0.02)
        self.b = nn.Parameter(torch.zeros(o, r))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T.to(x.dtype) @ self.b.T.to(x.dtype)

    @torch.no_grad()
    def merge(self):
        self.weight += (self.b @ self.a).to(self.weight.dtype)  # sick: PA212 module=-
        # healthy: self.weight.data = self.weight.data.float() + self.b @ self.a
        self.b.zero_()


torch.manual_seed(0)
model = nn.Sequential(LoRALinear(16, 32), nn.ReLU(), LoRALinear(32, 4))
for m in (model[0], model[2]):
    m.weight.data = m.weight.data.bfloat16()
    # healthy: m.weight.data = m.weight.data.float()
    m.bias.data = m.bias.data.bfloat16()
    # healthy: m.bias.data = m.bias.data.float()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad and p.dim() == 2], lr=1e-4)
for step in range(60):
    x = torch.randn(32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, :4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 2 == 1:
        [m.merge() for m in model if isinstance(m, LoRALinear)]
print(f"loss {loss.item():.4f}")
