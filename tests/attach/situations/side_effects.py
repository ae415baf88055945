"""Models that remember something of each call: nobody may call them once more unnoticed.

Each script prints what it has trained: it must be the same without Gradsight.
"""

import textwrap

from attach.situations import Situation

END = """
numbers = [float(each.detach().double().abs().sum()) for each in trained]
print("trained", sum(numbers).hex(), torch.rand(1).item())
"""

LOOP = """
{before}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)
{init}

    def forward(self, x):
{forward}


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(24):
    x = torch.randn(16, 8)
    if step == {nan}:
        x[3] = float("nan")
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    {after}
trained = [*model.parameters(), *model.buffers()]
"""


def script(
    forward: str, init: str = "pass", before: str = "", after: str = "pass", nan: int = -1
) -> str:
    """A training script of a model with this body of its methods."""
    return ending(
        LOOP.format(
            before=before,
            init=textwrap.indent(init, " " * 8),
            forward=textwrap.indent(forward, " " * 8),
            after=after,
            nan=nan,
        )
    )


def ending(text: str) -> str:
    """The script, and what it prints at its end."""
    return text + END


HEALTHY = {
    "batch norm and dropout": script(
        "return self.f(x)",
        "self.f = nn.Sequential(self.a, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), self.b)",
    ),
    "spectral norm": script(
        "return self.b(torch.tanh(self.a(x)))",
        "nn.utils.parametrizations.spectral_norm(self.a)",
    ),
    "hooks of spectral norm, and weight norm": script(
        "return self.b(torch.tanh(self.a(x)))",
        "nn.utils.spectral_norm(self.a); nn.utils.parametrizations.weight_norm(self.b)",
    ),
    "a codebook that is a moving average": script(
        """
z = self.a(x)
code = torch.cdist(z, self.book).argmin(1)
with torch.no_grad():
    one = F.one_hot(code, 12).float()
    self.count.mul_(0.9).add_(one.sum(0), alpha=0.1)
    self.sums = self.sums * 0.9 + 0.1 * (one.t() @ z)
    self.book.copy_(self.sums / (self.count[:, None] + 1e-5))
return self.b(z + (self.book[code] - z).detach())
""",
        """
self.register_buffer("book", torch.randn(12, 16))
self.register_buffer("count", torch.ones(12))
self.register_buffer("sums", self.book.clone())
""",
    ),
    "a codebook that is written by its data": script(
        """
z = self.a(x)
code = torch.cdist(z, self.book.weight).argmin(1)
self.book.weight.data[code] = 0.9 * self.book.weight.data[code] + 0.1 * z.data
return self.b(z + (self.book(code) - z).detach())
""",
        "self.book = nn.Embedding(12, 16).requires_grad_(False)",
    ),
    "a schedule that counts calls": script(
        "self.steps += 1\nreturn self.b(torch.tanh(self.a(x)) * min(1, self.steps / 30))",
        "self.steps = 0",
    ),
    "a schedule that counts calls in a global name": script(
        "global steps\nsteps += 1\nreturn self.b(torch.tanh(self.a(x)) * min(1, steps / 30))",
        before="steps = 0",
    ),
    "a schedule that counts calls in a list of the script": script(
        "note(x)\nreturn self.b(torch.tanh(self.a(x)) * min(1, len(history) / 30))",
        before="history = []\ndef note(x): history.append(x.mean().item())",
    ),
    "a schedule that counts calls in an object of the script": script(
        "clock.now += 1\nreturn self.b(torch.tanh(self.a(x)) * min(1, clock.now / 30))",
        before="class Clock: now = 0\nclock = Clock()",
    ),
    "a schedule that counts calls in a class": script(
        "Net.steps += 1\nreturn self.b(torch.tanh(self.a(x)) * min(1, self.steps / 30))"
    ).replace("class Net(nn.Module):", "class Net(nn.Module):\n    steps = 0"),
    "noise from an iterator": script(
        "return self.b(torch.tanh(self.a(x)) + 0.1 * next(self.noise))",
        "self.noise = iter(torch.randn(40, 16))",
    ),
    "random numbers of Python and numpy": script(
        "return self.b(torch.tanh(self.a(x)) * uniform(0, 1) + rng.normal() + random.random())",
        before="import numpy, random\nfrom random import uniform\n"
        "random.seed(0); rng = numpy.random.default_rng(0)",
    ),
    "a queue of earlier outputs": script(
        """
h = torch.tanh(self.a(x))
out = self.b(h + 0.1 * self.queue.mean(0).clone())
self.queue[self.place : self.place + 16] = h.detach()
self.place = (self.place + 16) % 64
return out
""",
        'self.register_buffer("queue", torch.zeros(64, 16)); self.place = 0',
    ),
    "a state that is kept from call to call": script(
        "self.h = torch.tanh(self.a(x) + self.h.detach())\nreturn self.b(self.h)",
        "self.h = torch.zeros(16, 16)",
    ),
    "a teacher that is updated in forward": script(
        """
with torch.no_grad():
    for mine, its in zip(self.a.parameters(), self.teacher.parameters()):
        its.lerp_(mine, 0.05)
return self.b(torch.tanh(self.a(x)) + 0.1 * self.teacher(x))
""",
        "import copy; self.teacher = copy.deepcopy(self.a).requires_grad_(False)",
    ),
    "an averaged model beside": script(
        "return self.b(torch.tanh(self.a(x)))", after="averaged.update_parameters(model)"
    )
    .replace("for step", "averaged = torch.optim.swa_utils.AveragedModel(model)\nfor step")
    .replace("trained = [", "trained = [*averaged.parameters(), "),
    "an embedding with a largest norm": script(
        "return self.b(self.e((x[:, 0].abs() * 5).long().clamp(max=19)) + self.a(x))",
        "self.e = nn.Embedding(20, 16, max_norm=1.0)",
    ),
    "gradient checkpointing with dropout": script(
        "return self.b(checkpoint(self.f, x, use_reentrant=False))",
        "self.f = nn.Sequential(self.a, nn.Dropout(0.2), nn.Tanh())",
        "from torch.utils.checkpoint import checkpoint",
    ),
    "reentrant gradient checkpointing with dropout": script(
        "return self.b(checkpoint(self.f, x.requires_grad_(), use_reentrant=True))",
        "self.f = nn.Sequential(self.a, nn.Dropout(0.2), nn.Tanh())",
        "from torch.utils.checkpoint import checkpoint",
    ),
    "a tensor that is made at the first call": script(
        """
if self.extra is None:
    self.extra = torch.randn(16)
return self.b(torch.tanh(self.a(x)) * self.extra)
""",
        "self.extra = None",
    ),
    "a cached random table": script(
        "return self.b(torch.tanh(self.a(x)) + table(16))",
        before="import functools\n@functools.lru_cache\ndef table(size): return torch.randn(size)",
    ),
    "a batch that the model takes apart": script(
        'x = batch.pop("x")\nx += 1\nreturn self.b(torch.tanh(self.a(x)))'
    )
    .replace("forward(self, x)", "forward(self, batch)")
    .replace("model(x)", 'model({"x": x})'),
}

HOOKS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.waiting = self.calls = 0
        self.a.register_forward_hook(self.called)
        self.b.register_full_backward_hook(self.done)

    def called(self, module, inputs, output):
        if self.waiting:
            raise RuntimeError("backward did not follow forward")
        self.calls += 1
        self.waiting += 1

    def done(self, module, grad_in, grad_out):
        self.waiting -= 1

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(24):
    x = torch.randn(16, 8)
    if step == NAN:
        x[3] = float("nan")
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1).clamp(0, 3)).backward()
    optimizer.step()
assert model.calls == 24, model.calls
trained = [*model.parameters()]
"""

OPEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.is_open = nn.Linear(8, 16), nn.Linear(16, 4), False

    def forward(self, x):
        if self.is_open:
            raise RuntimeError("backward did not follow forward")
        self.is_open = True
        return self.b(torch.tanh(self.a(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(24):
    x = torch.randn(16, 8)
    if step == NAN:
        x[3] = float("nan")
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1).clamp(0, 3)).backward()
    model.is_open = False
    optimizer.step()
trained = [*model.parameters()]
"""

SITUATIONS = [
    *(Situation(name, text, never_says=["GradsightWarning"]) for name, text in HEALTHY.items()),
    Situation("hooks that remember calls", ending(HOOKS.replace("NAN", "-1"))),
    Situation(
        "hooks that remember calls, and a NaN",
        ending(HOOKS.replace("NAN", "10")),
        exit_code=2,
        findings=["GS103"],
        says=[
            "NaN in the model's input: argument x, row 3",
            "the step was not run again: the hook Net.called of __main__ (on module a) would see",
        ],
    ),
    Situation("a model that must not be called twice", ending(OPEN.replace("NAN", "-1"))),
    Situation(
        "a model that must not be called twice, and a NaN",
        ending(OPEN.replace("NAN", "10")),
        exit_code=2,
        findings=["GS103"],
        says=[
            "NaN in the model's input: argument x, row 3",
            "running the model again to find its operations raised RuntimeError: backward did not follow",
        ],
    ),
    Situation(
        "a schedule that counts calls, and a NaN",
        script(
            "global steps\nsteps += 1\nself.n += 1\nreturn self.b(torch.tanh(self.a(x)) / steps)",
            "self.n = 0",
            "steps = 0",
            after="assert steps == model.n == step + 1",
            nan=10,
        ),
        exit_code=2,
        findings=["GS103"],
        says=["NaN in the model's input: argument x, row 3", "sample 3: gradient not finite"],
    ),
]
