"""A feed-forward net in bf16 whose widest layer, which does nearly all the work, has odd dimensions."""

import torch
from torch import nn

torch.manual_seed(11)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 501)
        self.mixer = nn.Linear(501, 501)  # sick: PA105 module=mixer line=any
        self.head = nn.Linear(501, 8)

    def forward(self, x):
        return self.head(torch.relu(self.mixer(torch.relu(self.stem(x)))))


x, y = torch.randn(64, 64), torch.randint(0, 8, (64,))
model = Wide()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
