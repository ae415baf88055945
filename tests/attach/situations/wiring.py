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
    Situation(
        "gradients that add up because no optimizer holds their parameters",
        """
encoder, decoder = nn.Linear(8, 16), nn.Linear(16, 4)
model = nn.Sequential(encoder, nn.Tanh(), decoder)
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
for step in range(400):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
""",
        exit_code=1,
        findings=["GS101", "GS202", "GS302"],
        first="GS302",
        caused_by={"GS101": "GS302", "GS202": "GS302"},
    ),
]
