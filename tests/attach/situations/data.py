"""What the model is given."""

from attach.situations import Situation

LIGHTNING = """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        return F.mse_loss(self.network(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return (self.make(step) for step in range(40))


def train(make):
    loader = torch.utils.data.DataLoader(Batches(make), batch_size=None)
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


"""

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
        "full batch with an initial state that is made in every step",
        """
x = torch.randn(32, 5, 4)
model = nn.RNN(4, 1, batch_first=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(40):
    state = torch.zeros(1, 32, 1)
    optimizer.zero_grad()
    F.mse_loss(model(x, state)[0][:, -1], x[:, -1, :1]).backward()
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
    Situation(
        "a Lightning module that is never called itself",
        f"""{LIGHTNING}
train(lambda step: torch.randn(16, 4))
""",
        models={"Module": 40},
        not_skipped=["GS502"],
        preload=["lightning"],
        slow=True,
    ),
    Situation(
        "a Lightning module that is given the same batch in every step",
        f"""{LIGHTNING}
batch = torch.randn(16, 4)
train(lambda step: batch.clone())
""",
        exit_code=1,
        findings=["GS502"],
        preload=["lightning"],
        slow=True,
    ),
    Situation(
        "the whole model is saved and loaded with weights_only",
        """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(20):
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    torch.save(model, "model.pt")
with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
    loaded = torch.load("model.pt", weights_only=True)
assert torch.equal(loaded(x), model(x))
""",
        models={"model": 20},
    ),
]
