"""Optimizers and what they train."""

from attach.situations import Situation

SITUATIONS = [
    Situation(
        "gradients not cleared",
        """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
""",
        exit_code=2,
        findings=["GS305"],
        models={"model": 20},
    ),
]
