"""Training scripts that know nothing of Gradsight. `{extra}` stands in the loop, between backward
and step.
"""

PLAIN = """
import argparse
import torch
from torch import nn
import neighbour

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(640, neighbour.WIDTH)
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=options.workers)
    classifier = nn.Sequential(nn.Linear(neighbour.WIDTH, 16), nn.ReLU(), nn.Linear(16, 3))
    adam = torch.optim.SGD(classifier.parameters(), lr=options.lr)
    for step, (inputs, targets) in enumerate(loader):
        adam.zero_grad()
        loss = nn.functional.cross_entropy(classifier(inputs), targets)
        loss.backward()
        {extra}
        adam.step()
    print("trained with", options.lr)
"""

UNCLEARED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""

ADVERSARIES = """
import torch
from torch import nn
from torch.nn import functional as F


def main():
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3)
    second = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for step in range(30):
        fake = maker(torch.randn(16, 4))
        second.zero_grad()
        (F.softplus(-critic(torch.randn(16, 2))).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        second.step()
        first.zero_grad()
        (F.softplus(-critic(fake)).mean() * (float("nan") if step == 20 else 1.0)).backward()
        first.step()


main()
"""

TRAINER = """
import tempfile
import torch
import transformers
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


torch.manual_seed(0)
x = torch.randn(400, 6)
data = [{"x": row, "labels": int(row[:3].argmax())} for row in x]
arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=25, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    learning_rate=1e-3, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
)
transformers.Trainer(model=Model(), args=arguments, train_dataset=data).train()
"""

LIGHTNING = """
import lightning
import torch
from torch import nn


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 16), nn.Linear(16, 4)

    def training_step(self, batch, index):
        return (self.decoder(torch.tanh(self.encoder(batch[0]))) - batch[0][:, :4]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 8)), batch_size=8, shuffle=True)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
lightning.Trainer(max_steps=25, accelerator="cpu", gradient_clip_val=0.01, **quiet).fit(Model(), loader)
"""

RANKS = """
import torch
from torch import nn

torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    (model(x) - x[:, :4]).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""

FORKS = """
import os
import sys
import torch
from torch import nn

torch.set_num_threads(1)


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()


def in_a_child(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


def make():
    model = nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


torch.manual_seed(0)
if sys.argv[1] == "both":  # a child that goes on with the same model, then trains one of its own
    model, optimizer = make()
    train(model, optimizer, 10)
    in_a_child(lambda: [train(model, optimizer, 5), train(*make(), 7)])
    train(model, optimizer, 10)
else:  # the parent only starts children
    in_a_child(lambda: train(*make(), 9))
"""

STARTS_ANOTHER = """
import subprocess
import sys

subprocess.run([sys.executable, sys.argv[1]], check=True)
"""

ACCELERATED = """
import torch
from accelerate import Accelerator
from torch import nn

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(320, 6)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (inputs, targets) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    if accelerator.process_index == 1 and step == 15:
        loss = loss * float("nan")
    accelerator.backward(loss)
    optimizer.step()
accelerator.end_training()
"""

TOO_LARGE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3))
model[2].weight.data.mul_(100)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(32, 6)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
"""
