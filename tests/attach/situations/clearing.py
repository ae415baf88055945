"""Gradients that a script takes away between backward and step, or does not clear."""

from attach.situations import Situation

TAKEN = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(80):
    x = torch.randn(32, 8)
    y = x[:, :4].argmax(1)
    optimizer.zero_grad()
    F.cross_entropy({output}, y).backward()
    if step < 20:
        for p in model[2].parameters():
            p.grad = None
    optimizer.step()
"""

FROZEN = [
    Situation(
        "a last layer that is frozen for some steps",
        TAKEN.format(output="model(x)"),
        models={"model": 80},
    ),
    Situation(
        "a first layer that no gradient reaches",
        TAKEN.format(output="model[2](model[1](model[0](x)).detach())").replace("20", "0"),
        exit_code=1,
        findings=["GS301"],
        says=["seen: in 10 steps, 2 of 4 parameters had no gradient where: 0.weight, 0.bias"],
    ),
]

GAN = """
netG = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-4)
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-4)
for step in range(20):
    fake = netG(torch.randn(32, 4))
    {clear}
    (netD(fake.detach()) - netD(torch.randn(32, 2))).mean().backward()
    optimizerD.step()
    optimizerG.zero_grad()
    (-netD(fake)).mean().backward()
    optimizerG.step()
"""

NOT_CLEARED = [
    Situation(
        "a discriminator whose gradients are not cleared",
        GAN.format(clear=""),
        exit_code=2,
        findings=["GS305"],
        says=[
            "just before the backward pass of this network",
            "in the loop, before loss.backward(): clear the gradients",
        ],
        never_says=["after optimizer.step()"],
    ),
    Situation(
        "a discriminator whose gradients are cleared before its own pass",
        GAN.format(clear="optimizerD.zero_grad()"),
        models={"netD": 20, "netG": 20},
    ),
]

SITUATIONS = [*FROZEN, *NOT_CLEARED]
