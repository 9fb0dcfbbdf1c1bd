"""Actor-critic with two optimizers in float16; the actor goes through the scaler and the critic does not."""

import itertools

import torch
from torch import nn
from torch.distributions import Categorical


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Agent:
    def __init__(self, obs, actions):
        self.actor, self.critic = mlp(obs, 32, actions), mlp(obs, 32, 1)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def update(self, obs, action, reward):
        with torch.autocast("cpu", dtype=torch.float16):
            value = self.critic(obs).squeeze(-1)
            logits = self.actor(obs)
        value, logits = value.float(), logits.float()
        advantage = (reward - value).detach()
        policy_loss = -(Categorical(logits=logits).log_prob(action) * advantage).mean()
        value_loss = nn.functional.mse_loss(value, reward)

        self.actor_opt.zero_grad()
        self.scaler.scale(policy_loss).backward()
        self.scaler.step(self.actor_opt)
        self.scaler.update()

        self.critic_opt.zero_grad()
        value_loss.backward()  # sick: PA107 module=-
        self.critic_opt.step()
        return policy_loss.item(), value_loss.item()


if __name__ == "__main__":
    torch.manual_seed(13)
    agent = Agent(8, 4)
    for episode in range(6):
        obs = torch.randn(32, 8)
        with torch.no_grad():
            action = Categorical(logits=agent.actor(obs)).sample()
        print(episode, *agent.update(obs, action, obs[:, 0] * (action == 1)))
