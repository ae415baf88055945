"""Training scripts, each with one planted fault, and the places where a fix can be pasted.

A script is text, as a user has it. A comment that names a place ("# after loss.backward()") marks
where a section of a fix for that place goes. A line that ends with a comment such as "# the forward
pass" is replaced by a section that goes instead of it. A line that ends with "# fault" has to be
removed by hand.
"""

from dataclasses import dataclass

SETUP = """
torch.manual_seed(0)
data = torch.randn(16 * {steps}, 6)
dataset = torch.utils.data.TensorDataset(data, data[:, :3].argmax(1))
loader = torch.utils.data.DataLoader(dataset, batch_size=16)
inputs, targets = next(iter(loader))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
"""What every script begins with."""

LOOP = """
for inputs, targets in loader:
    # before the forward pass
    loss = loss_fn(model(inputs), targets)  # the forward pass
    # before loss.backward()
    loss.backward()  # loss.backward() and optimizer.step()
    # after loss.backward()
    optimizer.step()  # loss.backward() and optimizer.step()
    # after optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A script with a planted fault."""

    code: str
    """The check that has to find it."""
    what: str
    """What was planted."""
    setup: str = ""
    """Code after `SETUP`."""
    loop: str = LOOP
    steps: int = 60
    printed: str = ""
    """What the fix prints, in part."""

    def __str__(self) -> str:
        return f"{self.code} {self.what}"


# Other loops.


def forward(loss: str) -> str:
    """Return the loop with another loss."""
    return LOOP.replace("loss_fn(model(inputs), targets)", loss)


def forward_in_float16(factor: float = 1.0) -> str:
    """Return the loop with a forward pass in float16, and a factor of the loss."""
    plain = "    loss = loss_fn(model(inputs), targets)"
    opened = '    with torch.autocast("cpu", dtype=torch.float16):  # the forward pass\n'
    return LOOP.replace(plain, f"{opened}    {plain} * {factor}")


def clipping(max_norm: float) -> str:
    """Return the loop with a line that clips."""
    place = "    # after loss.backward()\n"
    line = f"torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm={max_norm})"
    return LOOP.replace(place, f"{place}    {line}  # the line that clips\n")


ONE_BATCH = LOOP.replace(
    "for inputs, targets in loader:\n",
    "for _ in range(60):\n    inputs, targets = next(iter(loader))\n",
)
UNSHIFTED = LOOP.replace(
    "for inputs, targets in loader:\n", "for inputs, _ in loader:\n    targets = inputs\n"
)
OWN_TARGETS = LOOP.replace(
    "    # before the forward pass\n",
    "    # before the forward pass\n    targets = model(inputs).detach()  # fault\n",
)
DECODED = """
for inputs, targets in loader:
    decoder_inputs = targets
    # before the forward pass
    loss = loss_fn(model(inputs, decoder_inputs), targets)
    # before loss.backward()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TWO_OPTIMIZERS = LOOP.replace(
    "    optimizer.step()  #",
    "    for each in optimizer if isinstance(optimizer, list) else [optimizer]:\n"
    "        each.step()  #",
).replace("optimizer.zero_grad()", "model.zero_grad()")
SCALED = """
for inputs, targets in loader:
    with torch.autocast("cpu", dtype=torch.float16):  # the forward pass
        loss = loss_fn(model(inputs), targets)  # the forward pass
    scaler.scale(loss).backward()  # the lines that use the scaler
    scaler.step(optimizer)  # the lines that use the scaler
    scaler.update()  # the lines that use the scaler
    optimizer.zero_grad()
"""
CLIPPED_WHILE_SCALED = LOOP.replace(
    "loss.backward()  #", "scaler.scale(loss).backward()  #"
).replace(
    "    optimizer.step()  #",
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the line that clips\n"
    "    scaler.step(optimizer)\n    scaler.update()  #",
)
MICRO_BATCHES = """
for inputs, targets in loader:
    for _ in range(4):
        loss = loss_fn(model(inputs + 0.1 * torch.randn_like(inputs)), targets)
        # before loss.backward()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLEARED_IN_EVERY_ROUND = """
for number, (inputs, targets) in enumerate(loader):
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets) / 2
    loss.backward()
    if (number + 1) % 2 == 0:
        optimizer.step()
"""

# Other data, models and optimizers.


def made_of(inputs: str, targets: str = "dataset.tensors[1]") -> str:
    """Return code that makes other data of the same number of samples."""
    return f"""
data = {inputs}
dataset = torch.utils.data.TensorDataset(data, {targets})
loader = torch.utils.data.DataLoader(dataset, batch_size=16)
inputs, targets = next(iter(loader))
"""


def rate(lr: float) -> str:
    """Return code that sets the learning rate."""
    return f"optimizer.param_groups[0]['lr'] = {lr}\n"


NOISE = "torch.randint(3, (len(data),))"
OVERSHOOTING = """
# Beyond 2 / curvature every step overshoots by more than the step before.
model = nn.Linear(1, 1, bias=False)
loss_fn = lambda outputs, targets: 0.5 * outputs.square().mean()
optimizer = torch.optim.SGD(model.parameters(), lr=2.05)
""" + made_of("data[:, :1].sign() + 0.1 * data[:, 1:2]")
THREE_LAYERS = """
layers = [nn.Linear(6, 16), nn.{activation}(), nn.Linear(16, 16), nn.{activation}()]
model = nn.Sequential(*layers, nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
"""
DEEP = """
wide = [nn.Linear(16, 16, bias={bias}) for _ in range(11)]
linear = [nn.Linear(6, 16, bias={bias}), *wide]
layers = [layer for each in linear for layer in (each, nn.{activation}())]
model = nn.Sequential(*layers, nn.Linear(16, 3, bias={bias}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
SMALL_WEIGHTS = """
for each in model.parameters():
    each.data *= 0.3
"""
SIGMOIDS = DEEP.format(activation="Sigmoid", bias=True)
SMALL_TANH = DEEP.format(activation="Tanh", bias=True) + SMALL_WEIGHTS
SMALL_WITHOUT_BIAS = DEEP.format(activation="Tanh", bias=False) + SMALL_WEIGHTS
DEAD_UNITS = """
model[0].bias.data.fill_(-100.0)
"""
TWO_DEAD_LAYERS = """
model = nn.Sequential(model[0], nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), model[2])
for each in (model[0], model[2]):
    each.bias.data.fill_(-10.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
DEAD_OUTPUTS = """
model.append(nn.ReLU())
for each in (model[0], model[2]):
    each.bias.data.fill_(-10.0)
"""
ZERO_WEIGHTS = """
for each in model.parameters():
    each.data.zero_()
"""
ONE_CLASS = """
model[2] = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""" + made_of("data", "(data[:, :1] > 0).float()")
NAN_LABEL = """
dataset.tensors[1][333, 1] = float("nan")
"""
LOG_OF_NEGATIVE = """
for inputs, targets in loader:
    outputs = model(inputs)
    loss = loss_fn(outputs, targets) - 1e-3 * safe_log(outputs.mean() - 100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
A_COPY = """
import copy
other = model
other = copy.deepcopy(model)  # fault
"""
SMALL_EPS = """
model.half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
"""
POISSON = """
data[333], dataset.tensors[1][333] = 1000.0, 0
safe_exp = torch.exp
model[2].weight.data.abs_()

def loss_fn(outputs, targets):
    return (safe_exp(outputs[:, 0]) - targets * outputs[:, 0]).mean()
"""
ALL_POSITIVE = """
data.abs_()
for parameter in model.parameters():
    parameter.data.abs_()
"""
HUGE_GRADIENT = """
loss_fn = lambda outputs, targets: F.softplus(1e7 * (1e-7 * outputs).float()).mean()
"""
HUGE_OUTPUTS = """
loss_fn = lambda outputs, targets: F.cross_entropy(1e-6 * (1e6 * outputs).float(), targets)
scaler = torch.amp.GradScaler("cpu")
"""
CORRUPT_BATCH = """
data[800:816] *= 300
"""
UNUSED_BRANCH = """
class Branched(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.branch = nn.Linear(3, 3)

    def forward(self, x):
        return self[2](self[1](self[0](x)))

model = Branched(*model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TWO_GROUPS = """
groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.1)
optimizer.param_groups[1]["lr"] = 0.0  # fault
"""
HELD_TWICE = """
optimizer = [optimizer, torch.optim.SGD(model[2].parameters(), lr=0.1)]  # fault
"""
LORA = """
class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 16).requires_grad_(False)
        self.lora_A = nn.Linear(6, 4, bias=False)
        self.lora_B = nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))

model = nn.Sequential(LoRA(), nn.Tanh(), nn.Linear(16, 3))
"""
ZERO_ADAPTERS = (
    LORA
    + """
nn.init.zeros_(model[0].lora_A.weight)
model[2].requires_grad_(False)
optimizer = torch.optim.SGD([*model[0].lora_A.parameters(), *model[0].lora_B.parameters()], lr=0.1)
"""
)
FROZEN_ADAPTERS = (
    LORA
    + """
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
HALF_OF_AN_ADAPTER = (
    LORA
    + """
model[0].lora_B.requires_grad_(False)  # fault
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
CUT_ROWS = """
class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(16, 6))

    def forward(self, x):
        x = x @ self.mix.T
        x = x * (torch.arange(16) < 3)  # fault
        return x

model = nn.Sequential(Cut(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
WRONG_GROUP = (
    DEEP.format(activation="ReLU", bias=True)
    + """
wrong = list(model[8].parameters())
right = [each for each in model.parameters() if not any(each is other for other in wrong)]
optimizer = torch.optim.Adam([{"params": wrong, "lr": 1e-5}, {"params": right}], lr=1e-3)
"""
)
PER_EPOCH = """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # fault
"""
TIME_FIRST = """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(6, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])

model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""" + made_of("torch.randn(len(data), 5, 6) + data[:, None]")
IGNORED = """
class Ignored(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        x = 0.0 * x  # fault
        return self[2](self[1](self[1](x)))

model = Ignored(*model)
"""
BY_RANK = """
# The samples are sorted by their size, and each rank takes a half of them.
scaled = data * torch.linspace(0.2, 12, len(data))[:, None]
dataset = torch.utils.data.TensorDataset(scaled, data[:, :3].argmax(1))
rank = torch.distributed.get_rank()
half = range(rank * len(data) // 2, (rank + 1) * len(data) // 2)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=half)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
"""
TOKENS = """
tokens = torch.randint(20, (16 * 20, 9))
dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
loader = torch.utils.data.DataLoader(dataset, batch_size=16)
inputs, targets = next(iter(loader))

def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 48)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        h = self.tokens(x)
        heads = self.mix(h).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.head(h + self.attend(heads, x).transpose(1, 2).flatten(2))

    def attend(self, heads, x):
        return attend(*heads)

def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value{causal})

model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

MULTI_HEAD = (
    TOKENS.format(causal="")
    + """
class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        h = self.tokens(x)
        return self.head(h + self.mix(h, h, h, attn_mask=causal_mask(x.shape[1]))[0])

def causal_mask(length):
    return torch.ones(length, length){mask}

model = MultiHead()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
BOTH_WAYS = (
    TOKENS.format(causal="")
    + """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.mix = nn.GRU(16, 8, batch_first=True, bidirectional=True)  # fault
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        return self.head(self.mix(self.tokens(x))[0])

model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
CONVOLUTION = BOTH_WAYS.replace(
    "self.mix = nn.GRU(16, 8, batch_first=True, bidirectional=True)  # fault",
    "self.side = nn.Conv1d(16, 16, 3, padding=1)",
).replace(
    "        return self.head(",
    "        h = self.tokens(x)\n"
    "        return self.head(h + self.side(h.transpose(1, 2)).transpose(1, 2))  # fault\n"
    "        return self.head(",
)
CENTRED = BOTH_WAYS.replace(
    "self.mix = nn.GRU(16, 8, batch_first=True, bidirectional=True)", ""
).replace(
    "        return self.head(",
    "        h = self.tokens(x)\n"
    "        return self.head(h - h.mean(1, True))  # fault\n"
    "        return self.head(",
)
FED_ITS_TARGET = (
    TOKENS.format(causal="")
    + """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x, y):
        state = self.encoder(self.tokens(x))[1]
        return self.head(self.decoder(self.tokens(y), state)[0])

model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)

PACKED = """
class Packed(Attention):
    def forward(self, x, documents):
        self.documents = documents
        return super().forward(x)

    def attend(self, heads, x):
        return attend(*heads, self.documents)

def attend(query, key, value, documents):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)

model = Packed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]).expand(16, -1)
"""

MIXTURE = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        probabilities, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out[mine] = expert(x[mine]) * probabilities[mine, None]
        return out

model = nn.Sequential(nn.Linear(6, 6), Mixture(), nn.Linear(6, 3))
with torch.no_grad():  # the last expert wins only where the noise is larger than the others' lead
    weight = model[1].router.weight
    weight[3] = weight[:3].mean(0) + {noise} * torch.randn(6)
optimizer = torch.optim.Adam(model.parameters(), lr={lr})
"""
CAUSAL = TOKENS.format(causal=", is_causal=True")
SHIFTING = (
    CAUSAL
    + """
class Shifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Attention()

    def forward(self, x, labels):
        logits = self.body(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

model = Shifting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
SHIFTED_BY_HAND = forward(
    "F.cross_entropy(model(inputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())"
)
PADDED = (
    CAUSAL
    + """
class Padded(Attention):
    def forward(self, x, attention_mask):
        return super().forward(x)

model = Padded()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens.clamp_(min=1)
tokens[torch.arange(9) >= torch.randint(3, 9, (len(tokens), 1))] = 0
"""
)
ANSWERS_CUT_OFF = (
    CAUSAL
    + """
dataset.tensors = (tokens[:, :-1], tokens[:, 1:].clone())
dataset.tensors[1][torch.arange(len(tokens)) % 4 > 0] = -100  # fault
"""
)
KL = "loss_fn = nn.KLDivLoss(reduction='batchmean')\n"
WITH_SOFTMAX = "model.append(nn.Softmax(dim=1))\n"

FAULTS = [
    Fault("GS101", "large inputs", made_of("300 * data", NOISE) + rate(1e-2)),
    Fault("GS101", "a high limit", made_of("3000 * data", NOISE) + rate(1e-3), clipping(500.0)),
    Fault("GS102", "huge inputs", made_of("30000 * data") + rate(1e-9)),
    Fault("GS102", "a huge limit", made_of("30000 * data") + rate(1e-9), clipping(5000.0)),
    Fault("GS103", "NaN in the data", "data[333, 2] = float('nan')"),
    Fault("GS103", "an infinite logit", "data[333, 2] = float('inf')"),
    Fault("GS103", "NaN in the labels", made_of("data", "data[:, :3].softmax(1)") + NAN_LABEL),
    Fault("GS103", "a batch of NaN", "data[320:336] = float('nan')"),
    Fault(
        "GS103",
        "log(softmax) by hand",
        loop=forward("F.nll_loss(torch.log(torch.softmax(model(inputs) * 1e4, 1)), targets)"),
    ),
    Fault(
        "GS103",
        "an operation that is seldom to blame",
        "",
        forward("loss_fn(torch.lgamma(0 * model(inputs)), targets)"),
    ),
    Fault(
        "GS103",
        "an eps that float16 rounds to 0",
        SMALL_EPS,
        forward("loss_fn(model(inputs.half()).float(), targets) * 1e-3"),
    ),
    Fault("GS104", "exp() overflows", POISSON),
    Fault("GS104", "a factor overflows", ALL_POSITIVE, forward("1e60 * model(inputs).mean()")),
    Fault("GS104", "float16 overflows", HUGE_GRADIENT, forward_in_float16()),
    Fault("GS105", "tiny weights", SMALL_WITHOUT_BIAS),
    Fault("GS106", "dead units", DEAD_OUTPUTS),
    Fault(
        "GS106",
        "the loss of a copy",
        A_COPY,
        forward("loss_fn(other(inputs), targets)"),
        printed="Cut off from the loss: 0.weight\n",
    ),
    Fault("GS106", "a softmax over one class", ONE_CLASS),
    Fault(
        "GS106",
        "targets made by the model",
        "loss_fn = nn.MSELoss()" + made_of("data", "data[:, :3]"),
        OWN_TARGETS,
        printed="The targets are the model's own outputs\n",
    ),
    Fault("GS106", "both factors of an adapter are zero", ZERO_ADAPTERS),
    Fault("GS107", "dead units", TWO_DEAD_LAYERS),
    Fault("GS107", "zero weights", ZERO_WEIGHTS),
    Fault("GS108", "a large last layer", "model[2].weight.data *= 100\n" + rate(1e-5)),
    Fault("GS108", "large inputs", made_of("300 * data + 100") + rate(1e-5)),
    Fault("GS109", "the logarithm of a negative number", "safe_log = torch.log", LOG_OF_NEGATIVE),
    Fault("GS201", "a corrupt batch", CORRUPT_BATCH),
    Fault("GS201", "a corrupt batch, clipped", CORRUPT_BATCH, clipping(0.3)),
    Fault("GS202", "steps too long", OVERSHOOTING, steps=120),
    Fault("GS202", "steps too long, clipped", OVERSHOOTING, clipping(15.0), steps=120),
    Fault("GS203", "units saturate", THREE_LAYERS.format(activation="Tanh", lr=20), steps=160),
    Fault("GS204", "saturating units", SIGMOIDS),
    Fault("GS204", "small weights", SMALL_TANH),
    Fault("GS205", "dead units", DEAD_UNITS),
    Fault(
        "GS205",
        "a factor of an adapter is frozen at zero",
        HALF_OF_AN_ADAPTER,
        printed="0.lora_B.weight frozen all zeros\n",
    ),
    Fault("GS205", "rows that are masked", CUT_ROWS, printed="0.mix 13 of 16 rows\n"),
    Fault(
        "GS206",
        "steps too long",
        THREE_LAYERS.format(activation="Sigmoid", lr=3) + made_of("data + 3"),
        steps=180,
    ),
    Fault("GS207", "a router that avoids an expert", MIXTURE.format(noise=0.0, lr=1e-2), steps=140),
    Fault(
        "GS208",
        "a router that seldom takes an expert",
        MIXTURE.format(noise=0.05, lr=1e-4),
        steps=260,
    ),
    Fault(
        "GS301",
        "a branch without a use",
        UNUSED_BRANCH,
        printed="Cut off from the loss: branch.weight\n",
    ),
    Fault("GS302", "a layer replaced later", "model[2] = nn.Linear(16, 3)"),
    Fault(
        "GS303",
        "two optimizers",
        HELD_TWICE,
        TWO_OPTIMIZERS,
        printed="Held more than once: 2.weight\n",
    ),
    Fault(
        "GS304",
        "updates lost in bfloat16",
        "model.bfloat16()\n" + rate(1e-6),
        forward("loss_fn(model(inputs.bfloat16()), targets)"),
    ),
    Fault("GS304", "a group without a learning rate", TWO_GROUPS, printed="1 0.0 51\n"),
    Fault("GS304", "weights drawn anew", "", LOOP + "    model[0].reset_parameters()  # fault\n"),
    Fault("GS307", "frozen adapters", FROZEN_ADAPTERS),
    Fault("GS305", "no zero_grad", loop=LOOP.replace("    optimizer.zero_grad()\n", "")),
    Fault(
        "GS401",
        "a rate that is too high",
        "optimizer = torch.optim.Adam(model.parameters(), lr=1.0)",
    ),
    Fault("GS402", "a rate that is too low", rate(1e-7)),
    Fault("GS403", "a small loss in float16", "", forward_in_float16(1e-5)),
    Fault("GS404", "an overflow at every step", HUGE_OUTPUTS, SCALED),
    Fault("GS405", "a limit that is too low", "", clipping(0.001), steps=140),
    Fault(
        "GS406",
        "strong decay",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=30.0)",
    ),
    Fault(
        "GS407",
        "a scheduler of epochs stepped per batch",
        PER_EPOCH,
        LOOP + "    scheduler.step()  # fault\n",
    ),
    Fault("GS408", "a matrix in the wrong group", WRONG_GROUP, printed="0 1e-05 ['8.weight']\n"),
    Fault("GS501", "one batch, and no learning rate", rate(0.0), ONE_BATCH),
    Fault("GS502", "the first batch again and again", "", ONE_BATCH),
    Fault(
        "GS409",
        "unscale_ forgotten",
        'scaler = torch.amp.GradScaler("cpu")\n',
        CLIPPED_WHILE_SCALED,
    ),
    Fault("GS601", "no mask", TOKENS.format(causal="")),
    Fault("GS601", "a mask that is added", MULTI_HEAD.format(mask=".tril()")),
    Fault("GS601", "a mask the wrong way round", MULTI_HEAD.format(mask=".tril(-1).bool()")),
    Fault("GS601", "both ways", BOTH_WAYS, printed="mix sees later positions\n"),
    Fault("GS601", "a padded convolution", CONVOLUTION, printed="the model sees later positions\n"),
    Fault("GS601", "centred over time", CENTRED, printed="the model sees later positions\n"),
    Fault("GS602", "an LSTM that expects time first", TIME_FIRST),
    Fault(
        "GS603",
        "no mask between documents",
        CAUSAL + PACKED,
        forward("loss_fn(model(inputs, documents), targets)"),
    ),
    Fault("GS604", "targets are the inputs", CAUSAL, UNSHIFTED),
    Fault("GS604", "a decoder that gets its targets", FED_ITS_TARGET, DECODED),
    Fault("GS605", "probabilities to cross_entropy", WITH_SOFTMAX),
    Fault("GS605", "sigmoids to cross_entropy", "model.append(nn.Sigmoid())"),
    Fault(
        "GS605", "a softmax in the loop", loop=forward("loss_fn(model(inputs).softmax(1), targets)")
    ),
    Fault("GS605", "probabilities to nll_loss", WITH_SOFTMAX + "loss_fn = F.nll_loss"),
    Fault("GS605", "logits to nll_loss", "loss_fn = F.nll_loss"),
    Fault(
        "GS605",
        "probabilities to a loss of two classes",
        "model.append(nn.Sigmoid())\nloss_fn = F.binary_cross_entropy_with_logits"
        + made_of("data", "F.one_hot(dataset.tensors[1], 3).float()"),
    ),
    Fault("GS605", "logits to kl_div", KL + made_of("data", "data[:, :3].softmax(1)")),
    Fault(
        "GS605",
        "probabilities to kl_div",
        WITH_SOFTMAX + KL + made_of("data", "data[:, :3].softmax(1)"),
    ),
    Fault(
        "GS605",
        "logarithms as targets of kl_div",
        "model.append(nn.LogSoftmax(dim=1))\n" + KL + made_of("data", "data[:, :3].log_softmax(1)"),
    ),
    Fault("GS606", "a batch without labels", "dataset.tensors[1][:16] = -100"),
    Fault("GS607", "a factor of zero", IGNORED, printed="Does not depend on the input: 1\n"),
    Fault("GS607", "dead units", DEAD_UNITS),
    Fault("GS608", "a validation before training", "model.insert(1, nn.Dropout())\nmodel.eval()"),
    Fault("GS609", "four micro-batches", "", MICRO_BATCHES),
    Fault("GS610", "a sum", "loss_fn = nn.CrossEntropyLoss(reduction='sum')"),
    Fault("GS611", "cleared in every round", "", CLEARED_IN_EVERY_ROUND),
    Fault("GS612", "a model that shifts", SHIFTING, forward("model(inputs, targets)")),
    Fault("GS612", "a loss that shifts", CAUSAL, SHIFTED_BY_HAND),
    Fault("GS613", "a mask", PADDED, forward("loss_fn(model(inputs, inputs != 0), targets)")),
    Fault(
        "GS614",
        "answers cut off",
        ANSWERS_CUT_OFF,
        printed="Labels that count: [8, 0, 0, 0, 8,",
    ),
]

ON_RANKS = Fault("GS503", "sorted samples", BY_RANK, steps=80)
"""Needs two processes."""
