"""What the model is given."""

from attach.situations import Situation

SITUATIONS = [
    Situation(
        "full batch from a numpy array",
        """
import numpy
inputs = numpy.random.default_rng(0).normal(size=(32, 4)).astype("float32")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(40):
    x = torch.from_numpy(inputs)
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
""",
        models={"model": 40},
    ),
    Situation(
        "full batch reshaped in every step",
        """
pictures = torch.randn(32, 2, 2)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(40):
    x = pictures.view(32, 4)
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
""",
        models={"model": 40},
    ),
    Situation(
        "a slice that does not advance",
        """
inputs = torch.randn(320, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    x = inputs[0:32]
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
""",
        exit_code=1,
        findings=["GS502"],
    ),
    Situation(
        "a loader that starts over in every step",
        """
data = torch.utils.data.TensorDataset(torch.randn(320, 4))
loader = torch.utils.data.DataLoader(data, batch_size=32)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    (x,) = next(iter(loader))
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
""",
        exit_code=1,
        findings=["GS502"],
    ),
]
