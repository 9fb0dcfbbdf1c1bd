"""An Apex script that clips inside scale_loss, where the gradients are still scaled (the docs clip after it)."""

import torch
from apex import amp
from torch import nn

torch.manual_seed(14)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=1024.0, verbosity=0)
for step in range(8):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # sick: PA106 module=-
        # healthy:
    optimizer.step()
    # healthy: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    # healthy: optimizer.step()
    print(step, loss.item())
