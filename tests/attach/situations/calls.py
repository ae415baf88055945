"""How often and in which ways a model is called in a step, and what it is called with."""

from typing import Any

from attach.situations import Situation

NEVER = ("GradsightWarning", "was not called in this step")


def healthy(name: str, script: str, **models: int) -> Situation:
    """A script without a fault."""
    return Situation(name, script, models=models or None, never_says=["GradsightWarning"])


def nan(name: str, script: str, *says: str, never: tuple[str, ...] = (), **more: Any) -> Situation:
    """A script with a NaN in its gradient."""
    expected = {"exit_code": 2, "findings": ["GS103"], "first": "GS103", **more}
    return Situation(name, script, says=says, never_says=[*NEVER, *never], **expected)


CELL = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 4)

    def forward(self, x, h):
        h = self.cell(x, h)
        return self.head(h), h


model = Cell()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(30):
    optimizer.zero_grad()
    for micro_batch in range(MICRO_BATCHES):
        h, loss, x, y = torch.zeros(4, 16), 0, torch.randn(4, 10, 8), torch.randint(4, (4, 10))
        bad = step == 20 and micro_batch == MICRO_BATCHES // 2
        BREAK
        for time in range(10):
            out, h = model(x[:, time], h)
            term = F.cross_entropy(out, y[:, time])
            LOSS
            loss = loss + term / MICRO_BATCHES
        loss.backward()
    optimizer.step()
"""


def cell(micro_batches: int, broken: str = "pass", loss: str = "pass") -> str:
    """A recurrent cell that the script calls once per time step."""
    script = CELL.replace("MICRO_BATCHES", str(micro_batches))
    return script.replace("BREAK", broken).replace("LOSS", loss)


NAN_AT_STEP_5 = "if bad: x[2, 5] = float('nan')"
SQRT_AT_STEP_7 = "if bad and time == 7: term = (out - out.detach()).square().sum(1).sqrt().mean()"

SIAMESE = """
encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
for step in range(30):
    anchor = torch.randn(16, 8)
    near, far = anchor + 0.1 * torch.randn(16, 8), torch.randn(16, 8)
    BREAK
    optimizer.zero_grad()
    a, n, f = encoder(anchor), encoder(near), encoder(far)
    LOSS
    loss.backward()
    optimizer.step()
"""
TRIPLET = "loss = F.triplet_margin_loss(a, n, f)"
DISTANCES = """near, far = (a - n).square().sum(1).sqrt(), (a - f).square().sum(1).sqrt()
    loss = (near - far + 1).clamp(min=0).mean()"""

POLICY = """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(20):
    state, log_probs, rewards = torch.randn(1, 4), [], []
    for time in range(200):
        choice = torch.distributions.Categorical(logits=policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state = 0.9 * state + 0.1 * torch.randn(1, 4) + 0.1 * (action - 0.5)
        rewards.append(-state.square().sum() REWARD)
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    returns = (returns - returns.mean()) / returns.std()
    optimizer.zero_grad()
    loss = -(torch.cat(log_probs) * returns).mean()
    loss.backward()
    optimizer.step()
    if loss.isnan(): break
"""

RECYCLING = """
class Fold(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x, before=None):
        h = torch.tanh(self.a(x) + (0 if before is None else self.b(before)))
        return self.head(h), h


model = Fold()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x, before = torch.randn(16, 8), None
    with torch.no_grad():
        for recycled in range(3):
            _, before = model(x, before)
    BREAK
    optimizer.zero_grad()
    F.mse_loss(model(x, before)[0], x.sum(1, keepdim=True)).backward()
    optimizer.step()
"""

SEVERAL_CALLS = [
    healthy("a cell that is called once per time step", cell(1), model=30),
    healthy("a cell that is called once per time step of micro-batches", cell(3), model=30),
    nan(
        "NaN in the input of one time step",
        cell(1, NAN_AT_STEP_5),
        "NaN in the model's input: argument x, row 2, call 5 of 10 (counted from 0)",
        never=("micro-batch", "outside the model"),
    ),
    nan(
        "NaN in the input of one time step of one micro-batch",
        cell(3, NAN_AT_STEP_5),
        "NaN in the model's input: argument x, row 2, micro-batch 1, call 5 of 10",
        "sample 2 of micro-batch 1: gradient not finite",
        never=("outside the model",),
    ),
    nan(
        "sqrt at 0 in the loss of one time step",
        cell(1, loss=SQRT_AT_STEP_7),
        "sqrt in the loss, outside the model",
        "call 7 of 10 (counted from 0)",
        never=("micro-batch",),
    ),
    healthy(
        "a siamese network",
        SIAMESE.replace("BREAK", "").replace("LOSS", TRIPLET),
        encoder=30,
    ),
    nan(
        "NaN in the third call of a siamese network",
        SIAMESE.replace("BREAK", "if step == 20: far[3] = float('nan')").replace("LOSS", TRIPLET),
        "NaN in the model's input: argument input, row 3, call 2 of 3 (counted from 0)",
        never=("micro-batch",),
    ),
    nan(
        "equal pictures in a siamese network",
        SIAMESE.replace("BREAK", "if step == 20: near = anchor").replace("LOSS", DISTANCES),
        "sqrt in the loss, outside the model: train.py:18",
        never=("micro-batch",),
    ),
    healthy(
        "a policy that is called 200 times before one backward pass",
        POLICY.replace("REWARD", ""),
        policy=20,
    ),
    nan(
        "a policy that is called 200 times, and rewards without a deviation",
        POLICY.replace("REWARD", "* (episode < 12)"),
        "mul in the loss, outside the model: train.py:23",
        "an operand of mul that needs no gradient is not finite",
        never=("micro-batch",),
    ),
    healthy("recycling", RECYCLING.replace("BREAK", ""), model=30),
    nan(
        "NaN in the recycled output",
        RECYCLING.replace("BREAK", "if step == 20: before[3] = float('nan')"),
        "NaN in the model's input: argument before, row 3; called in train.py:29",
        never=("micro-batch",),
    ),
]

GAN = """
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_g, of_d = torch.optim.Adam(G.parameters(), lr=2e-4), torch.optim.Adam(D.parameters(), lr=2e-4)
loss = nn.BCEWithLogitsLoss()
for step in range(40):
    real, fake = torch.randn(32, 2) * 0.5 + 1, G(torch.randn(32, 4))
    BREAK
    of_d.zero_grad()
    BACKWARD
    of_d.step()
    of_g.zero_grad()
    loss(D(fake), torch.ones(32, 1)).backward()
    of_g.step()
"""
ONE_PASS = (
    "(loss(D(real), torch.ones(32, 1)) + loss(D(fake.detach()), torch.zeros(32, 1))).backward()"
)
TWO_PASSES = """loss(D(real), torch.ones(32, 1)).backward()
    loss(D(fake.detach()), torch.zeros(32, 1)).backward()"""
NAN_IN_PICTURE = "if step == 20: real[5] = float('nan')"

TWIN_CRITICS = """
q1, q2, old1, old2 = [
    nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(4)
]
old1.load_state_dict(q1.state_dict()); old2.load_state_dict(q2.state_dict())
actor = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
of_q = torch.optim.Adam(list(q1.parameters()) + list(q2.parameters()), lr=1e-3)
of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
for step in range(60):
    s, a, r, after = torch.randn(64, 3), torch.rand(64, 1), torch.randn(64, 1), torch.randn(64, 3)
    with torch.no_grad():
        following = torch.cat([after, actor(after)], 1)
        y = r + 0.99 * torch.min(old1(following), old2(following))
    BREAK
    given = torch.cat([s, a], 1)
    loss = F.mse_loss(q1(given), y) + F.mse_loss(q2(given), y)
    of_q.zero_grad(); loss.backward(); of_q.step()
    if step % 2 == 0:
        of_actor.zero_grad()
        (-q1(torch.cat([s, actor(s)], 1)).mean()).backward()
        of_actor.step()
        with torch.no_grad():
            for new, old in ((q1, old1), (q2, old2)):
                for mine, its in zip(new.parameters(), old.parameters()):
                    its.lerp_(mine, 0.005)
"""

TEACHER_FORCING = """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(20, 8), nn.GRUCell(8, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, token, h):
        h = self.cell(self.embed(token), h)
        return self.head(h), h


encoder, decoder = nn.GRU(8, 16, batch_first=True), Decoder()
of_encoder = torch.optim.Adam(encoder.parameters(), lr=1e-3)
of_decoder = torch.optim.Adam(decoder.parameters(), lr=1e-3)
for step in range(30):
    x, y = torch.randn(4, 6, 8), torch.randint(20, (4, 5))
    BREAK
    of_encoder.zero_grad(); of_decoder.zero_grad()
    h, token, loss = encoder(x)[1][0], torch.zeros(4, dtype=torch.long), 0
    for time in range(5):
        logits, h = decoder(token, h)
        loss = loss + F.cross_entropy(logits, y[:, time])
        token = y[:, time] if step % 2 else logits.argmax(1)
    loss.backward()
    of_encoder.step(); of_decoder.step()
"""

SEVERAL_NETWORKS = [
    healthy(
        "a GAN that calls its critic twice",
        GAN.replace("BREAK", "").replace("BACKWARD", ONE_PASS),
        G=40,
        D=40,
    ),
    healthy(
        "a GAN with two backward passes of its critic",
        GAN.replace("BREAK", "").replace("BACKWARD", TWO_PASSES),
        G=40,
        D=40,
    ),
    nan(
        "NaN in the real pictures of a GAN",
        GAN.replace("BREAK", NAN_IN_PICTURE).replace("BACKWARD", ONE_PASS),
        "NaN in the model's input: argument input, row 5, call 0 of 2 (counted from 0)",
        "it goes through another model, whose weights are not finite",
        never=("micro-batch",),
        findings=["GS103", "GS103"],
    ),
    nan(
        "NaN in the real pictures of a GAN with two backward passes of its critic",
        GAN.replace("BREAK", NAN_IN_PICTURE).replace("BACKWARD", TWO_PASSES),
        "NaN in the model's input: argument input, row 5; called in train.py:18",
        findings=["GS103", "GS103"],
    ),
    healthy("twin critics", TWIN_CRITICS.replace("BREAK", "")),
    nan(
        "NaN in the TD targets of twin critics",
        TWIN_CRITICS.replace("BREAK", "if step == 31: y[4] = float('nan')"),
        "mse_loss in the loss, outside the model: train.py:24",
        "an operand of mse_loss that needs no gradient is not finite",
        "sample 4: gradient not finite",
        "it goes through another model, whose weights are not finite",
        never=("micro-batch",),
        findings=["GS103", "GS103"],
    ),
    healthy("teacher forcing", TEACHER_FORCING.replace("BREAK", ""), encoder=30, decoder=30),
    nan(
        "NaN in the encoder of teacher forcing",
        TEACHER_FORCING.replace("BREAK", "if step == 20: x[1, 3] = float('nan')"),
        "NaN in the model's input: argument input, row 1; called in train.py:28",
        never=("micro-batch", "outside the model"),
        findings=["GS103", "GS103"],
    ),
]

CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x, scale):
        for block in self.blocks:
            x = x + checkpoint(self.run, block, x, scale, use_reentrant=False)
        return self.head(x)

    def run(self, block, x, scale):
        return block(x) + torch.sqrt(x.square().mean(1, keepdim=True) * scale)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    F.mse_loss(model(x, float(step != BREAK)), x.sum(1, keepdim=True)).backward()
    optimizer.step()
"""

FUNCTIONAL = """
from torch.func import functional_call, grad, vmap
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def loss_of(parameters, x, y):
    return F.mse_loss(functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))


for step in range(40):
    x = torch.randn(16, 8)
    BREAK
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    found = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, x.sum(1, keepdim=True))
    for name, each in model.named_parameters():
        each.grad = found[name].mean(0)
    optimizer.step()
"""

MAML = """
from torch.func import functional_call
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    optimizer.zero_grad()
    for task in range(4):
        phase, x, x2 = torch.rand(1) * 3, torch.randn(10, 1), torch.randn(10, 1)
        slow = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, slow, (x,)), torch.sin(x + phase))
        slopes = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
        fast = {name: each - 0.1 * g for (name, each), g in zip(slow.items(), slopes)}
        (F.mse_loss(functional_call(model, fast, (x2,)), torch.sin(x2 + phase)) / 4).backward()
    optimizer.step()
"""

CLOSURES = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
for step in range(20):
    x = torch.randn(64, 8)
    BREAK

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        return loss

    optimizer.step(closure)
"""

PPO = """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def act(self, x, action=None):
        choice = torch.distributions.Categorical(logits=self.actor(x))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(x).flatten()


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
for update in range(8):
    seen = torch.randn(128, 4)
    with torch.no_grad():
        actions, old, _, values = map(torch.cat, zip(*[agent.act(each[None]) for each in seen]))
    returns = seen.sum(1) * (1 - 2 * actions.float())
    for epoch in range(4):
        for rows in torch.randperm(128).split(32):
            _, new, entropy, value = agent.act(seen[rows], actions[rows])
            ratio, advantage = (new - old[rows]).exp(), (returns - values)[rows]
            BREAK
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = F.mse_loss(value, returns[rows]) - gain - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            if loss.isnan(): raise SystemExit
"""

PENALTY = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(16, 8, requires_grad=True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = F.mse_loss(out, x.detach().sum(1, keepdim=True)) + (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

EVALUATION = """
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    F.mse_loss(model.train()(x), x.sum(1, keepdim=True)).backward()
    with torch.no_grad():
        model.eval()(torch.full((4, 8), float("nan")))
    optimizer.step()
"""

UNUSUAL_CALLS = [
    healthy("gradient checkpointing", CHECKPOINTED.replace("BREAK", "-1"), model=30),
    nan(
        "sqrt at 0 inside gradient checkpointing",
        CHECKPOINTED.replace("BREAK", "20"),
        "sqrt in train.py:25",
        "the model itself, backward",
        never=("outside the model",),
    ),
    healthy("gradients of vmap and grad", FUNCTIONAL.replace("BREAK", "")),
    Situation(
        "NaN in gradients of vmap and grad",
        FUNCTIONAL.replace("BREAK", "if step == 20: x[2] = float('nan')"),
        exit_code=2,
        findings=["GS103"],
        says=["because it called no module with these parameters, as model(x) would"],
        never_says=["diagnosed in"],
    ),
    healthy("MAML", MAML, model=40),
    healthy("closures of LBFGS", CLOSURES.replace("BREAK", ""), model=20),
    nan(
        "NaN in a closure of LBFGS",
        CLOSURES.replace("BREAK", "if step == 12: x[2] = float('nan')"),
        "NaN in the model's input: argument input, row 2; called in train.py:18",
        never=("micro-batch",),
    ),
    healthy("PPO", PPO.replace("BREAK", ""), agent=128),
    nan(
        "NaN in the advantages of PPO",
        PPO.replace("BREAK", "if update == 4: advantage = advantage * float('nan')"),
        "mul in the loss, outside the model: train.py:35",
        "an operand of mul that needs no gradient is not finite",
        never=("micro-batch",),
    ),
    healthy("the penalty of a gradient", PENALTY, model=30),
    healthy("an evaluation of NaN between backward and the step", EVALUATION, model=30),
]

GRAPH = """
adjacency = torch.eye(20)LAYOUT
features, labels = torch.randn(20, 5), torch.randint(3, (20,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        INIT

    def forward(self, xARGUMENT):
        return torch.spmm(SELFadj, self.linear(x))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(30):
    optimizer.zero_grad()
    out = model(featuresGIVEN)
    LOSS
    loss.backward()
    optimizer.step()
"""
CROSS_ENTROPY = "loss = F.cross_entropy(out, labels)"
LOG_OF_0 = """p = torch.sigmoid(out * (1000 if step == 20 else 1))
    y = F.one_hot(labels, 3).float()
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()"""


def graph(layout: str, loss: str, held: str | None = None) -> str:
    """A network of a graph whose adjacency matrix is sparse: an argument, or held by the model."""
    script = GRAPH.replace("LAYOUT", layout).replace("LOSS", loss).replace("INIT", held or "pass")
    is_given = held is None
    script = script.replace("xARGUMENT", "x, adj" if is_given else "x")
    script = script.replace("SELFadj", "adj" if is_given else "self.adj")
    return script.replace("featuresGIVEN", "features, adjacency" if is_given else "features")


BUFFER = 'self.register_buffer("adj", adjacency)'

SKIP_GRAM = """
class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Embedding(500, 16, sparse=True), nn.Embedding(500, 16, sparse=True)

    def forward(self, word, near, far, scale):
        word, near, far = self.u(word), self.v(near), self.v(far)
        score = torch.log(torch.sigmoid((word * near).sum(1) * scale))
        return -(score + F.logsigmoid(-torch.bmm(far, word.unsqueeze(2)).squeeze()).sum(1)).mean()


model = SkipGram()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
for step in range(40):
    word, far = torch.randint(500, (64,)), torch.randint(500, (64, 5))
    loss = model(word, (word + 1) % 500, far, 1000 if step == BREAK else 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LAYOUTS = {"": ".to_sparse()", " of compressed rows": ".to_sparse_csr()"}

SPARSE = [
    *(
        Situation(
            f"a sparse adjacency matrix{kind}",
            graph(layout, CROSS_ENTROPY),
            models={"model": 30},
            never_says=["GradsightWarning"],
            not_skipped=["GS601", "GS603", "GS607"],
        )
        for kind, layout in LAYOUTS.items()
    ),
    *(
        nan(
            f"log of 0 after a sparse adjacency matrix{kind}",
            graph(layout, LOG_OF_0),
            "log in the loss, outside the model: train.py:31",
            "from which Gradsight cannot take one sample",
        )
        for kind, layout in LAYOUTS.items()
    ),
    *(
        healthy(f"a sparse buffer{kind}", graph(layout, CROSS_ENTROPY, held=BUFFER), model=30)
        for kind, layout in LAYOUTS.items()
    ),
    nan(
        "log of 0 after a sparse buffer",
        graph(".to_sparse()", LOG_OF_0, held=BUFFER),
        "log in the loss, outside the model: train.py:31",
        "to find its samples: one sample alone raised RuntimeError",
    ),
    nan(
        "log of 0 after a sparse attribute",
        graph(".to_sparse()", LOG_OF_0, held="self.adj = adjacency"),
        "log in the loss, outside the model: train.py:31",
    ),
    nan(
        "NaN in a sparse adjacency matrix",
        graph(".to_sparse()", "loss = F.cross_entropy(out, labels)").replace(
            "    out =", "    if step == 20: adjacency = adjacency * float('nan')\n    out ="
        ),
        "NaN in the model's input: argument adj",
        never=("outside the model",),
    ),
    Situation(
        "sparse gradients of embeddings",
        SKIP_GRAM.replace("BREAK", "-1"),
        models={"model": 40},
        never_says=["GradsightWarning"],
        reasons={
            "GS305": "no watched optimizer held a dense gradient",
            "GS603": "the model returns only single numbers, such as its loss",
        },
    ),
    nan(
        "NaN in sparse gradients of embeddings",
        SKIP_GRAM.replace("BREAK", "20"),
        "log in train.py:17",
        "the model itself, forward",
        never=("outside the model",),
    ),
]

SITUATIONS = [*SEVERAL_CALLS, *SEVERAL_NETWORKS, *UNUSUAL_CALLS, *SPARSE]
