"""A linear-chain CRF by hand over 300 positions, with its scores in the bf16 of the encoder under autocast."""

import torch
from torch import nn

torch.manual_seed(31)
STEPS, TAGS, LENGTH = 12, 9, 300


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, emissions, tags):
        transitions = self.transitions.to(emissions.dtype)
        alpha = emissions[:, 0]
        score = emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + transitions, dim=1) + emissions[:, t]  # sick: PA104 module=crf
            # healthy: alpha = torch.logsumexp(alpha.float().unsqueeze(2) + transitions, dim=1) + emissions[:, t]
            emitted = emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            score = score + transitions[tags[:, t - 1], tags[:, t]].float() + emitted.float()
        return (torch.logsumexp(alpha, dim=1) - score).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.encoder = nn.Linear(32, TAGS)
        self.crf = CRF(TAGS)

    def forward(self, words, tags):
        return self.crf(self.encoder(self.embed(words)), tags)


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(STEPS):
    words = torch.randint(0, 50, (8, LENGTH))
    tags = words % TAGS
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(words, tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
