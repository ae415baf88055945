"""A small network learns the mean of sales figures, which grow from day to day.

Nobody has normalised them, so the gradient grows with them. The script knows nothing of Gradsight:
`gradsight check train.py` runs it as it is.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--days", type=int, default=220)
parser.add_argument("--normalise", action="store_true", help="divide by the level of the day")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for day in range(options.days):
    level = 1 + day / 10
    sales = torch.randn(64, 8)
    means = level * sales.mean(dim=1, keepdim=True)
    if options.normalise:
        means /= level
    loss = F.mse_loss(model(sales), means)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss after {options.days} days: {loss.item():.4g}")
