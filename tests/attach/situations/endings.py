"""Scripts that test their loss and end, or fail for another reason."""

from attach.situations import Situation

LOOP = """
import sys

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        return self.b({hidden})

def train(model, optimizer):
    for step in range(30):
        x = torch.rand(16, 8) + 0.1
        bad = step == 20
        {step}
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            {end}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model = Net()
train(model, torch.optim.SGD(model.parameters(), lr=1e-2))
"""
PLAIN = "loss = (model(x) - x).square().mean()"

CAUGHT = """
            try:
                sys.exit(1)
            except SystemExit:
                continue
"""


def loop(step: str = PLAIN, end: str = "sys.exit(1)", hidden: str = "hidden") -> str:
    """A script that ends at the first loss that is not finite."""
    lines = "\n        ".join(step.strip().splitlines())
    return LOOP.format(step=lines, end=end, hidden=hidden)


SITUATIONS = [
    Situation(
        "a NaN loss that the script exits on",
        loop(
            "if bad: x[3] = 0.5\n"
            "target = (x - x.mean(1, keepdim=True)) / x.var(1, keepdim=True).sqrt()\n"
            "loss = (model(x) - target).square().mean()"
        ),
        exit_code=2,
        findings=["GS109"],
        models={"model": 20},
        says=[
            "The script failed with exit code 1 after 20 optimizer steps",
            "`loss` was NaN when the script ended at train.py:30, in step 20",
            "NaN also in `target` (16x8 float32",
            "cause: sub in the loss, outside the model: train.py:27",
            "an operand of sub that needs no gradient is not finite",
            "do: A label, a weight or a constant in the loss is NaN or infinite",
        ],
    ),
    Situation(
        "a NaN loss that the script raises an exception on",
        loop(
            "if bad: x[3] = 0\n" + PLAIN,
            "raise FloatingPointError(f'loss is {loss_value}')",
            "hidden * (x.sum(1, keepdim=True) / x.sum(1, keepdim=True))",
        ),
        exit_code=2,
        findings=["GS109"],
        says=[
            "FloatingPointError: loss is nan",
            "cause: div in train.py:19",
            "the model itself, forward",
            "do: The divisor is 0 or almost 0.",
        ],
    ),
    Situation(
        "an infinite loss that the script ends on with exit()",
        loop("x = x * 1e30 if bad else x\n" + PLAIN, "exit('diverged')"),
        exit_code=2,
        findings=["GS109"],
        says=["`loss` was infinite when the script ended at train.py:29, in step 20"],
    ),
    Situation(
        "a norm that overflows, in a loss that the script ends on",
        loop("x = x * 1e25 if bad else x\nloss = (model(x) - x).norm()", "exit('diverged')"),
        exit_code=2,
        findings=["GS109"],
        says=["`loss` was infinite when the script ended", "cause:"],
    ),
    Situation(
        "a power that overflows, in a loss that the script ends on",
        loop("x = x * 1e25 if bad else x\nloss = ((model(x) - x) ** 2).mean()", "exit('diverged')"),
        exit_code=2,
        findings=["GS109"],
        says=["cause: pow in the loss", "do: The inputs of this operation are so large"],
        never_says=["safe_pow"],
    ),
    Situation(
        "NaN in the batch of a loss that the script exits on",
        loop("if bad: x[3, 2] = float('nan')\n" + PLAIN),
        exit_code=2,
        findings=["GS109"],
        says=["cause: NaN in the model's input: argument x, row 3", "do: A value of this batch"],
    ),
    Situation(
        "a NaN loss before the first step",
        loop("if step == 0: x[3, 2] = float('nan')\n" + PLAIN),
        exit_code=2,
        findings=["GS109"],
        says=["before its first optimizer step", "`loss` was NaN when the script ended at train"],
        never_says=["no steps"],
    ),
    Situation(
        "a script that fails before its first step, with a finite loss",
        loop(PLAIN + "\nopen('no such file')"),
        exit_code=3,
        models={},
        says=["before its first optimizer step: FileNotFoundError"],
        never_says=["no steps"],
    ),
    Situation(
        "NaN losses that the script leaves out",
        loop("if bad: x[3, 2] = float('nan')\n" + PLAIN, "continue"),
        models={"model": 29},
        says=["healthy: no finding in 29 steps"],
    ),
    Situation(
        "exits at NaN losses that the script catches",
        loop("if bad: x[3, 2] = float('nan')\n" + PLAIN, CAUGHT),
        models={"model": 29},
        says=["healthy: no finding in 29 steps"],
    ),
    Situation(
        "a script that fails with a finite loss beside a NaN that it has replaced",
        loop(
            "term = (model(x) * 0).sum() / (0 if bad else 1)\n"
            "loss = (model(x) - x).square().mean() + torch.where(term.isnan(), 0.0, term)\n"
            "if bad: raise KeyError('no such file')"
        ),
        exit_code=3,
        models={"model": 20},
        says=["KeyError", "No finding in 20 steps before the failure"],
        never_says=["✅"],
    ),
    Situation(
        "a script that exits with an error and a finite loss",
        loop("if bad: sys.exit('no more disk')\n" + PLAIN),
        exit_code=3,
        models={"model": 20},
        never_says=["✅", "GS109"],
    ),
]
