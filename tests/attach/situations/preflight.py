"""What is decided in the first step: leaks into the past, targets that are given to the model."""

from attach.situations import Situation

GRU = """
T, V = {length}, 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 32)
        self.mix = nn.GRU(32, 32, batch_first=True, bidirectional={both})
        self.head = nn.Linear(64 if {both} else 32, V)

    def forward(self, x):
        return self.head(self.mix(self.embed(x))[0])


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, s):
        return F.cross_entropy(self.net(s[:, :-1]).transpose(1, 2), s[:, 1:])


model = Wrapper()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    optimizer.zero_grad()
    model(torch.randint(V, (8, T + 1))).backward()
    optimizer.step()
"""

LEAKS = [
    Situation(
        "as many positions as classes, and a causal model",
        GRU.format(length=64, both=False),
        models={"model": 12},
        not_skipped=["GS601"],
    ),
    Situation(
        "as many positions as classes, and a model that sees the future",
        GRU.format(length=64, both=True),
        exit_code=2,
        findings=["GS601"],
    ),
    Situation(
        "fewer positions than classes, and a model that sees the future",
        GRU.format(length=48, both=True),
        exit_code=2,
        findings=["GS601"],
    ),
]

ATTENTION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        h = self.embed(x)
        mask = {mask}
        return self.head(h + self.attention(h, h, h, attn_mask=mask{more})[0])


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    s = torch.randint(50, (8, 17))
    optimizer.zero_grad()
    F.cross_entropy(model(s[:, :-1]).flatten(0, 1), s[:, 1:].flatten()).backward()
    optimizer.step()
"""


def attention(mask: str, more: str = "") -> str:
    """Return a script whose attention has this mask."""
    return ATTENTION.format(mask=mask, more=more)


MASKS = [
    Situation(
        "a mask of numbers that is added to the scores",
        attention("torch.ones(16, 16).tril()"),
        exit_code=2,
        findings=["GS601"],
        says=["attention is given a float mask of zeros and ones, which is added to the scores"],
        never_says=["tril()"],
    ),
    Situation("a mask of True for what is hidden", attention("torch.ones(16, 16).bool().triu(1)")),
    Situation(
        "a mask of True for what may be seen",
        attention("torch.ones(16, 16).bool().tril()", ", need_weights=False"),
        exit_code=2,
        findings=["GS601"],
    ),
]

DECODER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.transformer = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        h = self.transformer(self.embed(x), self.embed(y), tgt_mask=mask)
        return F.log_softmax(self.head(h), -1).view(-1, 50)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    s, q = torch.randint(50, (16, 13)), torch.randint(50, (16, 9))
    optimizer.zero_grad()
    {body}
    optimizer.step()
"""

REVERSED = """
model = nn.Sequential(nn.Linear({size}, 16), nn.Tanh(), nn.Linear(16, {size}))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(16, {size})
    optimizer.zero_grad()
    F.mse_loss(model(x), x.flip(1)).backward()
    optimizer.step()
"""

TARGETS = [
    *(
        Situation(
            f"{size} features in reverse order", REVERSED.format(size=size), models={"model": 12}
        )
        for size in (2, 3, 4, 5, 8)
    ),
    Situation(
        "a decoder that is fed its own target",
        DECODER.format(
            body="x, y = s[:, :-1], s[:, 1:]; F.nll_loss(model(x, y), y.reshape(-1)).backward()"
        ),
        exit_code=2,
        findings=["GS604"],
    ),
    Situation(
        "a decoder that is fed the targets before its own",
        DECODER.format(
            body="y = s[:, 1:]; F.nll_loss(model(q, s[:, :-1]), y.reshape(-1)).backward()"
        ),
    ),
]

TIME_FIRST = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.mix = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64), 1)
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        mask = {mask}
        return self.head(self.mix(self.embed(x), mask=mask))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
text = torch.randint(50, (12 * 15 + 1, 20))
for start in range(0, 12 * 15, 15):
    x = text[start : start + 15]
    y = {targets}
    optimizer.zero_grad()
    F.cross_entropy(model(x).view(-1, 50), y.reshape(-1)).backward()
    optimizer.step()
"""
TIME_FIRST_DECODER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.transformer = nn.Transformer(32, 2, 1, 1, 64)
        self.head = nn.Linear(32, 50)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(len(y))
        return self.head(self.transformer(self.embed(x), self.embed(y), tgt_mask=mask))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    source, target = torch.randint(50, (9, 16)), torch.randint(50, (13, 16))
    optimizer.zero_grad()
    F.cross_entropy(model(source, target[:-1]).flatten(0, 1), {targets}.flatten()).backward()
    optimizer.step()
"""
CAUSAL_MASK = "nn.Transformer.generate_square_subsequent_mask(len(x))"


def time_first(targets: str, mask: str = CAUSAL_MASK) -> str:
    """Return a script of a model that is given [time, rows], with these targets and this mask."""
    return TIME_FIRST.format(targets=targets, mask=mask)


TIME_BEFORE_ROWS = [
    Situation(
        "time before rows, and targets that are not shifted",
        time_first("text[start : start + 15]"),
        exit_code=2,
        findings=["GS604"],
        says=["inputs, targets = inputs[:-1], inputs[1:]"],
    ),
    Situation(
        "time before rows, and targets that are shifted",
        time_first("text[start + 1 : start + 16]"),
        not_skipped=["GS601", "GS602", "GS604"],
    ),
    Situation(
        "time before rows, and labels of tokens of a model that sees all",
        time_first("x * 7 % 50", "None"),
        not_skipped=["GS601", "GS602", "GS604"],
    ),
    Situation(
        "time before rows, and a model that sees all and gives its input back",
        time_first("x", "None"),
        not_skipped=["GS601", "GS602", "GS604"],
    ),
    Situation(
        "time before rows, and a decoder that is fed its own target",
        TIME_FIRST_DECODER.format(targets="target[:-1]"),
        exit_code=2,
        findings=["GS604"],
        says=["decoder_inputs, targets = targets[:-1], targets[1:]"],
    ),
    Situation(
        "time before rows, and a decoder that is fed the targets before its own",
        TIME_FIRST_DECODER.format(targets="target[1:]"),
        not_skipped=["GS601", "GS602", "GS604"],
    ),
]

HOOKS = [
    Situation(
        "hooks that expect one backward pass for each call",
        """
open_calls = []


def called(module, inputs, output):
    if module.training:
        assert not open_calls, "the module was called twice before backward"
        open_calls.append(inputs[0])


def went_back(module, grad_input, grad_output):
    open_calls.pop()


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model[0].register_forward_hook(called)
model[0].register_full_backward_hook(went_back)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
assert not open_calls
""",
        models={"model": 12},
        reasons={"GS602": "called"},
        says=["train.py:30: UserWarning: Full backward hook is firing"],
        never_says=["moments.py"],
    ),
]

LOSS_BY_HAND = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.mix = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, x):
        return self.head(self.mix(self.embed(x){mask}))


model = Model()
mask = nn.Transformer.generate_square_subsequent_mask(11)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    tokens = torch.randint(20, (16, 12))
    wanted = tokens[:, 1:].reshape(-1)
    scores = model(tokens[:, :-1]).flatten(0, 1)
    wanted = {table}
    loss = -(wanted * F.log_softmax(scores, dim=1)).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SMOOTHED = "torch.full_like(scores, 0.1 / 19).scatter(1, wanted.view(-1, 1), 0.9)"
BY_HAND = [
    Situation(
        "a model that sees the future, and labels that are smoothed by hand",
        LOSS_BY_HAND.format(mask="", table=SMOOTHED),
        exit_code=2,
        findings=["GS601"],
    ),
    Situation(
        "a causal model, and labels that are smoothed by hand",
        LOSS_BY_HAND.format(mask=", src_mask=mask, is_causal=True", table=SMOOTHED),
        not_skipped=["GS601", "GS604"],
    ),
    Situation(
        "a loss by hand whose targets are not known",
        LOSS_BY_HAND.format(mask="", table="F.one_hot(wanted, 20)"),
        reasons={"GS601": "does not know the target", "GS604": "does not know the target"},
    ),
]

SITUATIONS = [*LEAKS, *MASKS, *TARGETS, *TIME_BEFORE_ROWS, *HOOKS, *BY_HAND]
