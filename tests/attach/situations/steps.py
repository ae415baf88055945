"""What one step is made of: micro-batches, closures, gradients that are kept, rates that change."""

from attach.situations import Situation

TOKENS = """
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randint(1, 64, (8, 12))
    y = x * 7 % 64
    scores = model(x).transpose(1, 2)
    {loss}
    {backward}
    if {condition}:
        optimizer.step()
        optimizer.zero_grad()
"""
MEAN = "loss = F.cross_entropy(scores, y)"
SMOOTH = "loss = F.cross_entropy(scores, y, label_smoothing=0.1)"
MASKED = """mask = torch.rand(8, 12) < 0.75
    loss = (F.cross_entropy(scores, y, reduction="none") * mask).sum() / {divisor}"""
BRANCHES = """if step % 2 == 0:
        with torch.enable_grad():
            loss.backward()
    else:
        loss.backward()"""
OTHER_LOSSES = """if step % 2 == 0:
        loss.backward()
    else:
        scores.square().mean().backward()"""
COUNTED = """
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    batches = [torch.randint(1, 64, (rows, 12)) for rows in torch.randint(2, 9, (2,)).tolist()]
    count = sum(x.numel() for x in batches)
    for x in batches:
        scores = model(x).transpose(1, 2)
        (F.cross_entropy(scores, x * 7 % 64, reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PENALTIES = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(16, 8)
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    for _ in range(1 + min(step, 1)):
        sum(each.square().mean() for each in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def accumulated(
    loss: str = MEAN, backward: str = "loss.backward()", condition: str = "step % 2 == 1"
) -> str:
    """Return a script with two micro-batches for each step."""
    return TOKENS.format(loss=loss, backward=backward, condition=condition)


UNDIVIDED = {
    "a first step of one": accumulated(condition="step % 2 == 0"),
    "label smoothing": accumulated(SMOOTH),
    "backward in two branches": accumulated(backward=BRANCHES),
    "means over a mask": accumulated(MASKED.format(divisor="mask.sum()")),
}
OTHERS = {
    "divided, with a first step of one": accumulated(
        backward="(loss / 2).backward()", condition="step % 2 == 0"
    ),
    "divided, with label smoothing": accumulated(SMOOTH, "(loss / 2).backward()"),
    "divided, with backward in two branches": accumulated(MEAN + " / 2", BRANCHES),
    "divided means over a mask": accumulated(MASKED.format(divisor="(2 * mask.sum())")),
    "other losses in two branches": accumulated(backward=OTHER_LOSSES),
    "more penalties from the second step on": PENALTIES,
}
ACCUMULATION = [
    *(
        Situation(
            f"micro-batches that are not divided: {name}",
            script,
            exit_code=1,
            findings=["GS609"],
            says=["ran 2 times for one step"],
        )
        for name, script in UNDIVIDED.items()
    ),
    *(Situation(f"micro-batches: {name}", script) for name, script in OTHERS.items()),
    Situation(
        "micro-batches: sums over the count of the whole step",
        COUNTED,
        reasons={"GS609": "count over the whole step"},
    ),
]

CLOSURE = """
model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")
x = torch.linspace(-1, 1, 50)[:, None].requires_grad_()


def closure():
    optimizer.zero_grad()
    y = model(x)
    slope = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]
    loss = ((y - torch.exp(-x)) ** 2).mean() + ((slope + y) ** 2).mean().detach()
    loss.backward()
    return loss


optimizer.step(closure)
"""
PRIVATE = """
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
model, optimizer, {given}loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier=1.0, max_grad_norm=1.0, {options}
)
for epoch in range(3):
    {loop}
"""
IN_PARTS = """with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=16, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()"""
AS_ONE = """for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()"""
THROWN_AWAY = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(24):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    if step % 4 == 3:
        optimizer.step()
"""
KEPT = [
    Situation("a closure that clears, in the only step of a run", CLOSURE),
    Situation(
        "Opacus with batches that are taken in parts",
        PRIVATE.format(given="", options="", loop=IN_PARTS),
        preload=["opacus"],
        slow=True,
    ),
    Situation(
        "Opacus with ghost clipping",
        PRIVATE.format(
            given="criterion, ",
            options='criterion=criterion, grad_sample_mode="ghost"',
            loop=AS_ONE,
        ),
        preload=["opacus"],
        slow=True,
    ),
    Situation("gradients of three batches of four are cleared", THROWN_AWAY, 1, findings=["GS611"]),
]

SWEEP = """
from copy import deepcopy

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
state = deepcopy(model.state_dict())


def train(optimizer, scheduler, steps):
    for step in range(steps):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        scheduler.step()
        if not torch.isfinite(loss) or loss > 20:
            break


optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
train(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.2**step), 90)
model.load_state_dict(state)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
train(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), 60)
"""
PER_BATCH = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)  # epochs
for epoch in range(30):
    for batch in range(10):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        scheduler.step()
"""
BEFORE_NORM = """
from torch.optim.swa_utils import SWALR, AveragedModel

model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
averaged = AveragedModel(model)
first, *others = model
optimizer = torch.optim.SGD(
    [
        {{"params": first.parameters(), "lr": {rate}}},
        {{"params": [weight for layer in others for weight in layer.parameters()]}},
    ],
    lr=0.05,
)
scheduler = SWALR(optimizer, swa_lr=[{rate} / 5, 0.01])
for step in range(80):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    if step > 40:
        averaged.update_parameters(model)
        scheduler.step()
"""
RATES = [
    Situation("a search for a learning rate, and another optimizer after it", SWEEP),
    Situation(
        "a scheduler that counts epochs is stepped with every batch",
        PER_BATCH,
        exit_code=1,
        findings=["GS304", "GS407"],
        first="GS407",
        caused_by={"GS304": "GS407"},
    ),
    Situation("averaged weights, and a bias before a norm", BEFORE_NORM.format(rate=0.05)),
    Situation(
        "averaged weights, and a layer whose group has no rate",
        BEFORE_NORM.format(rate=0.0),
        exit_code=1,
        findings=["GS304"],
    ),
]

SITUATIONS = [*ACCUMULATION, *KEPT, *RATES]
