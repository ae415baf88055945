"""Losses and the size of their gradients."""

from attach.situations import Situation

SMALL = """
model = nn.Linear(4, 1)
optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(32, 4)
    optimizer.zero_grad()
    (1e-4 * F.mse_loss(model(x), x.sum(1, keepdim=True))).backward()
    optimizer.step()
"""

SITUATIONS = [
    Situation(
        "a small gradient that Adam divides by its own size",
        SMALL.replace("OPTIMIZER", "Adam"),
        models={"model": 40},
    ),
    Situation(
        "a small gradient with plain steps",
        SMALL.replace("OPTIMIZER", "SGD"),
        exit_code=1,
        findings=["GS105"],
        first="GS105",
        models={"model": 40},
    ),
    Situation(
        "one backward pass for each moment of an episode",
        """
import random
random.seed(0)
policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-4)
for episode in range(100):
    returns, losses = 0.0, []
    for moment in range(random.randint(10, 60)):
        actions = torch.distributions.Categorical(logits=policy(torch.randn(4)))
        losses.append(-actions.log_prob(actions.sample()))
    optimizer.zero_grad()
    for loss in reversed(losses):
        returns = 10 + 0.98 * returns
        (loss * returns).backward()
    optimizer.step()
""",
        models={"policy": 100},
    ),
    Situation(
        "a logarithm of negative numbers beside another loss",
        """
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(32, 8)
    scores = model(x)
    optimizer.zero_grad()
    (F.cross_entropy(scores, x[:, :4].argmax(1)) - 1e-3 * scores.log().mean()).backward()
    optimizer.step()
""",
        exit_code=1,
        findings=["GS109"],
        models={"model": 40},
        says=["the loss was nan at"],
    ),
]
