"""A hidden Markov model whose forward recursion runs in fp16 probabilities: they grow small step by step, to zero."""

import torch
from torch import nn

torch.manual_seed(10)


class HMM(nn.Module):
    def __init__(self, states, words):
        super().__init__()
        self.transition = nn.Parameter(torch.randn(states, states))
        self.emission = nn.Parameter(torch.randn(states, words))

    def forward(self, seq):
        move = self.transition.softmax(-1).half()
        # healthy: move = self.transition.softmax(-1)
        emit = self.emission.softmax(-1).half()
        # healthy: emit = self.emission.softmax(-1)
        alpha = emit[:, seq[:, 0]].t() / 8
        for t in range(1, seq.shape[1]):
            alpha = (alpha @ move) * emit[:, seq[:, t]].t()
        return torch.log(alpha.sum(-1))  # sick: PA201 module=.


model = HMM(8, 20)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(5):
    seq = torch.randint(0, 20, (32, 12))
    loss = -model(seq).float().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
