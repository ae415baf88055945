"""Models beside a copy of themselves, in one module: averages, and students with their teachers."""

from attach.situations import Situation

PREFLIGHT = ("GS601", "GS602", "GS607", "GS608", "GS611")

AVERAGE = """
import copy


class Average(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.online_model = model
        self.ema_model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for mine, other in zip(self.ema_model.parameters(), self.online_model.parameters()):
            mine.lerp_(other, 0.01)

    def forward(self, x):
        return self.ema_model(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.body(x){mixed}
        return self.head(x.relu())


{made}
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    ema.update()
"""
BEFORE = """model = Net()
ema = Average(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
AFTER = """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ema = Average(model)
"""

AVERAGES = [
    Situation(
        "a model that a class averages",
        AVERAGE.format(mixed="", made=BEFORE),
        models={"model": 60},
        says=["Adam of model: made"],
        not_skipped=PREFLIGHT,
    ),
    Situation(
        "a model that mixes rows and that a class averages",
        AVERAGE.format(mixed=" - x.mean(0).sum()", made=AFTER),
        exit_code=1,
        findings=["GS602"],
        models={"model": 60},
        not_skipped=PREFLIGHT,
    ),
]

DISTILLED = """
import copy


class Distilled(nn.Module):
    def __init__(self, {arguments}):
        super().__init__()
        self.student = {student}
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x{mixed}), self.teacher(x)


{made}
optimizer = torch.optim.Adam(model.student.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    mine, other = model(x)
    (F.cross_entropy(mine, x[:, :4].argmax(1)) + 0.1 * F.mse_loss(mine, other)).backward()
    optimizer.step()
"""
INSIDE = {"arguments": "", "student": "nn.Linear(8, 4)", "made": "model = Distilled()"}
GIVEN = {
    "arguments": "student",
    "student": "student",
    "made": "student = nn.Linear(8, 4)\nmodel = Distilled(student)",
}

STUDENTS = [
    Situation(
        "a model of a student and a teacher",
        DISTILLED.format(mixed="", **INSIDE),
        models={"model": 60},
        not_skipped=PREFLIGHT,
    ),
    Situation(
        "a model of a student and a teacher that mixes rows",
        DISTILLED.format(mixed=" - x.mean(0)", **INSIDE),
        exit_code=1,
        findings=["GS602"],
        models={"model": 60},
    ),
    Situation(
        "a model of a student and a teacher that has a variable, and mixes rows",
        DISTILLED.format(mixed=" - x.mean(0)", **GIVEN),
        exit_code=1,
        findings=["GS602"],
        models={"model": 60},
        not_skipped=PREFLIGHT,
    ),
]

LIBRARY = """
import sys
from pathlib import Path
folder = Path("site-packages")
folder.mkdir()
(folder / "ranking.py").write_text('''
import torch


class RankingLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


def train(model):
    loss = RankingLoss(model)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    for step in range(20):
        optimizer.zero_grad()
        loss(torch.randn(8, 4)).backward()
        optimizer.step()
''')
sys.path.insert(0, str(folder.resolve()))
import ranking
encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
ranking.train(encoder)
"""
IN_A_LIBRARY = Situation(
    "a library that puts the model into a loss of its own", LIBRARY, models={"encoder": 20}
)

SITUATIONS = [IN_A_LIBRARY, *AVERAGES, *STUDENTS]
