"""Fine-tuning with bf16 parameters and a learning rate of 1e-5: nearly every update is less than half a bit."""

import torch
from torch import nn

torch.manual_seed(64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16).bfloat16(), torch.randint(0, 8, (32,))
model = Net()
model.to(torch.bfloat16)  # sick: PA204 module=. line=any
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
# healthy: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(8):
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
