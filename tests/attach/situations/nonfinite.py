"""Where a NaN comes from: each diagnosis names the origin, with its line."""

from typing import Any

from attach.situations import Situation

LOOP = """
{before}
model = {model}
optimizer = torch.optim.{optimizer}
for step in range(30):
    x = torch.randn(16, 8)
    y = x.sum(1, keepdim=True)
    bad = step == 20
    optimizer.zero_grad()
{step}
    optimizer.step()
"""
NETWORK = "nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))"


def nan(
    name: str,
    step: str,
    *says: str,
    model: str = NETWORK,
    before: str = "",
    optimizer: str = "Adam(model.parameters(), lr=1e-2)",
    **expected: Any,
) -> Situation:
    """A script that gets a NaN gradient at step 20."""
    lines = "\n".join(f"    {line}" for line in step.strip().splitlines())
    text = LOOP.format(before=before, model=model, optimizer=optimizer, step=lines)
    expected = {"exit_code": 2, "findings": ["GS103"], **expected}
    never = ["was not called in this step", "GradsightWarning", *expected.pop("never_says", ())]
    return Situation(name, text, says=says, never_says=never, **expected)


def network(forward: str, before: str = "") -> str:
    """A class of networks with this forward pass."""
    body = "\n".join(f"        {line}" for line in forward.strip().splitlines())
    return f"""{before}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 1)

    def forward(self, x):
{body}

"""


DATA = [
    nan(
        "NaN in the data",
        "if bad: x[3, 2] = float('nan')\nF.mse_loss(model(x), y).backward()",
        "NaN in the model's input: argument input, row 3; called in train.py:19",
        never_says=["outside the model"],
    ),
    nan(
        "NaN in the targets",
        "if bad: y[3] = float('nan')\nF.mse_loss(model(x), y).backward()",
        "mse_loss in the loss, outside the model: train.py:19",
        "input 16x1 float32, -5.71 .. 4.58, 1 NaN",
        "an operand of mse_loss that needs no gradient is not finite",
    ),
    nan(
        "NaN in the targets of a hand-made loss",
        "if bad: y[3] = float('nan')\nout = model(x)\nloss = ((out - y) ** 2).mean()\n"
        "loss.backward()",
        "sub in the loss, outside the model: train.py:20",
        "an operand of sub that needs no gradient is not finite",
        "sample 3: gradient not finite",
    ),
    nan(
        "NaN in weights that a loss is multiplied by",
        "weight = (y - y.mean()) / (y - y).abs().max() if bad else y\nout = model(x)\n"
        "loss = (out * weight).square().mean()\nloss.backward()",
        "mul in the loss, outside the model: train.py:20",
        "an operand of mul that needs no gradient is not finite",
    ),
    nan(
        "NaN in a parameter, of a rate that is too large",
        "out = model(x)\nloss = ((out - y) ** 4).mean()\nloss.backward()",
        "pow in the loss, outside the model: train.py:19",
        "it makes an infinity out of finite numbers",
        model=NETWORK.replace("Tanh", "ReLU"),
        optimizer="SGD(model.parameters(), lr=10.0)",
        findings=["GS103", "GS104", "GS401"],
        first="GS401",
        never_says=["that needs no gradient is not finite"],
    ),
]

LOSSES = [
    nan(
        "log of 0 in a hand-made loss",
        "p = torch.sigmoid(model(x) * (1000 if bad else 1))\nlabel = (y > 0).float()\n"
        "loss = -(label * p.log() + (1 - label) * (1 - p).log()).mean()\nloss.backward()",
        "log in the loss, outside the model: train.py:20",
        "it makes an infinity out of finite numbers",
    ),
    nan(
        "division by 0 in the loss",
        "scale = x[:, :1].abs() * (not bad)\nout = model(x)\n"
        "loss = ((out - y) / scale).square().mean()\nloss.backward()",
        "div in the loss, outside the model: train.py:20",
        "it divides by 0",
    ),
    nan(
        "a mean over an empty mask",
        "mask = (x[:, 0] > 0) & (not bad)\nout = model(x)\n"
        "loss = ((out - y).square().squeeze(1) * mask).sum() / mask.sum()\nloss.backward()",
        "div in the loss, outside the model: train.py:20",
        "input scalar int64, 0 it divides by 0",
    ),
    nan(
        "sqrt at 0 in the loss",
        "out = model(x)\nerror = (out - (out.detach() if bad else y)) ** 2\n"
        "distance = error.sum(1).sqrt()\n"
        "loss = distance.mean() + 0.01 * out.pow(2).mean()\nloss.backward()",
        "sqrt in the loss, outside the model: train.py:20",
        "the loss is finite, so the fault is in a derivative",
    ),
    nan(
        "acos at 1 in the loss",
        "out = model(x)\ncosine = (out * (0 if bad else 1)).cos()\n"
        "loss = torch.acos(cosine * (1 if bad else 0.9)).mean()\nloss.backward()",
        "acos in the loss, outside the model: train.py:20",
    ),
    nan(
        "a Kullback-Leibler divergence with a probability of 0",
        "p = F.softmax(model(x) * (200 if bad else 1), 1)\nq = F.softmax(x[:, :4], 1)\n"
        "loss = (p * (p.log() - q.log())).sum(1).mean()\nloss.backward()",
        "log in the loss, outside the model: train.py:20",
        model="nn.Linear(8, 4)",
    ),
    nan(
        "a Function of the script's own in the loss",
        "loss = Distance.apply(model(x), y, bad)\nloss.backward()",
        "Distance.apply in the loss, outside the model: train.py:29",
        before="""class Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, broken):
        ctx.save_for_backward(x, y)
        ctx.broken = broken
        return (x - y).square().mean()

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (x - y) / (0 if ctx.broken else 8), None, None
""",
    ),
    nan(
        "the penalty of a gradient that is 0",
        "x.requires_grad_()\nout = model(x * (0 if bad else 1))\n"
        "(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
        "penalty = (slope.square().sum(1).sqrt() - 1).square().mean()\n"
        "(F.mse_loss(out, y.detach()) + penalty).backward()",
        "sqrt in the loss, outside the model: train.py:21",
    ),
]

MODELS = [
    nan(
        "log of 0 before the first layer",
        "F.mse_loss(model(x * (not bad)), y).backward()",
        "log in train.py:17 (`x = torch.log(x.abs())`), the model itself, forward",
        model="Net()",
        before=network("x = torch.log(x.abs())\nreturn self.b(torch.tanh(self.a(x)))"),
        never_says=["outside the model"],
    ),
    nan(
        "the length of a vector that is 0 in the model",
        "F.mse_loss(model(x * (not bad)), y).backward()",
        "sqrt in train.py:18 (`length = h.square().sum(1, keepdim=True).sqrt()`), the model",
        model="Net()",
        before=network(
            "h = self.a(x)\nlength = h.square().sum(1, keepdim=True).sqrt()\n"
            "return self.b(h / (length + 1e-8))"
        ),
        never_says=["outside the model"],
    ),
    nan(
        "a Function of the script's own in the model",
        "Scale.broken = bad\nF.mse_loss(model(x), y).backward()",
        "div in train.py:18 (`return grad / (x - x) if Scale.broken else gr...`), the model itself",
        model="Net()",
        before=network(
            "return self.b(torch.tanh(Scale.apply(self.a(x))))",
            """class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (x - x) if Scale.broken else grad * 2
""",
        ),
        never_says=["outside the model"],
    ),
]

WITHOUT_A_CALL = [
    nan(
        "log of 0 after a part of the model",
        "h = torch.tanh(model[0](x))\np = torch.sigmoid(model[2](h) * (-1000 if bad else 1))\n"
        "loss = -p.log().mean()\nloss.backward()",
        "log in the loss, outside the model: train.py:20",
    ),
    nan(
        "division by 0 in a method other than forward",
        "model.loss(x, y, 0 if bad else 1).backward()",
        "div in the loss, outside the model: train.py:16",
        model="Net()",
        before="""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)

    def loss(self, x, y, scale):
        return ((self.b(self.a(x).tanh()) - y).square() / scale).mean()
""",
    ),
    nan(
        "NaN in the data of a part of the model after a call that failed",
        "try: model.loss(x[:, :5], y)\nexcept RuntimeError: pass\n"
        "if bad: x[2] = float('nan')\nmodel.loss(x, y).backward()",
        "NaN in the model's input: argument input of a, row 2",
        model="Net()",
        before="""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)

    def loss(self, x, y):
        return F.mse_loss(self.b(self.a(x).tanh()), y)
""",
        never_says=["outside the model"],
    ),
    nan(
        "NaN in the data of the first of two networks of one optimizer",
        "if bad: x[3, 2] = float('nan')\nh = encoder(x)\nF.mse_loss(model(h), y).backward()",
        "NaN in the model's input: argument input of encoder, row 3; called in train.py:19",
        before="encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())",
        optimizer="Adam([*encoder.parameters(), *model.parameters()], lr=1e-2)",
    ),
    nan(
        "log of 0 after the second of two networks of one optimizer",
        "h = encoder(x)\np = torch.sigmoid(model(h) * (-1000 if bad else 1))\n"
        "loss = -p.log().mean()\nloss.backward()",
        "log in the loss, outside the model: train.py:20",
        before="encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())",
        optimizer="Adam([*encoder.parameters(), *model.parameters()], lr=1e-2)",
    ),
    nan(
        "NaN in the data of a parameter without a module",
        "if bad: x[3, 2] = float('nan')\nloss = (x @ model - y).square().mean()\nloss.backward()",
        "mm in train.py:19",
        "an operand of mm that needs no gradient is not finite",
        "because it called no module with these parameters, as model(x) would",
        model="nn.Parameter(torch.randn(8, 1))",
        optimizer="SGD([model], lr=1e-3)",
    ),
]

ONE_UNPACKING = """
kept = {}


def pack(tensor):
    kept[len(kept)] = tensor
    return len(kept) - 1


model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):
        loss = (model(torch.randn(16, 8)).softmax(1) * (0 if step == 12 else 1)).log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HOOKS = [
    Situation(
        "saved tensors that a hook of the script unpacks once",
        ONE_UNPACKING,
        exit_code=2,
        findings=["GS103"],
        models={"model": 16},
        never_says=["KeyError", "Warning"],
    ),
]
GRADIENT_PENALTY = """
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
nn.init.zeros_(critic[2].weight)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(20):
    real, fake = torch.randn(32, 2) + 2, torch.randn(32, 2)
    optimizer.zero_grad()
    mixed = (0.5 * real + 0.5 * fake).requires_grad_(True)
    grad, = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = ((grad.pow(2).sum(1).sqrt() - 1) ** 2).mean()
    (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
    optimizer.step()
"""
FIRST_STEP = [
    Situation(
        "the root of 0 in a gradient penalty of the first step",
        GRADIENT_PENALTY,
        exit_code=2,
        findings=["GS103"],
        says=[
            "cause: sqrt, backward",
            "the loss is finite, and no other operation has a derivative",
            "the first step cannot be run again, because Gradsight starts watching at its backward",
            "do: The derivative of a square root is infinite at 0",
        ],
        never_says=["it called no module"],
    ),
]
SITUATIONS = [*DATA, *LOSSES, *MODELS, *WITHOUT_A_CALL, *HOOKS, *FIRST_STEP]
