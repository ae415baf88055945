"""How often and in which ways a model is called in a step, and what it is called with."""

from attach.situations import Situation

NEVER = ["GradsightWarning", "was not called in this step", "outside the model"]

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
    h, loss, x, y = torch.zeros(4, 16), 0, torch.randn(4, 10, 8), torch.randint(4, (4, 10))
    BREAK
    optimizer.zero_grad()
    for time in range(10):
        out, h = model(x[:, time], h)
        loss = loss + F.cross_entropy(out, y[:, time])
    loss.backward()
    optimizer.step()
"""

ACCUMULATED_CELL = """
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
    for micro_batch in range(3):
        h, loss, x, y = torch.zeros(4, 16), 0, torch.randn(4, 5, 8), torch.randint(4, (4, 5))
        if step == 20 and micro_batch == 1:
            BREAK
        for time in range(5):
            out, h = model(x[:, time], h)
            loss = loss + F.cross_entropy(out, y[:, time]) / 15
        loss.backward()
    optimizer.step()
"""

SEVERAL_CALLS = [
    Situation(
        "a cell that is called once per time step", CELL.replace("BREAK", ""), models={"model": 30}
    ),
    Situation(
        "NaN in the input of one time step",
        CELL.replace("BREAK", "if step == 20: x[2, 5] = float('nan')"),
        exit_code=2,
        findings=["GS103"],
        never_says=NEVER,
    ),
    Situation(
        "NaN in the input of one time step of one micro-batch",
        ACCUMULATED_CELL.replace("BREAK", "x[2, 3] = float('nan')"),
        exit_code=2,
        findings=["GS103"],
        never_says=NEVER,
    ),
    Situation(
        "infinite loss of one time step",
        CELL.replace("BREAK", "").replace(
            "F.cross_entropy(out, y[:, time])",
            "(F.cross_entropy(out, y[:, time]) if (step, time) != (20, 7) else (out - out.detach()).square().sum(1).sqrt().mean())",
        ),
        exit_code=2,
        findings=["GS103"],
    ),
    Situation(
        "a policy that is called 200 times before one backward pass",
        """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(20):
    state, log_probs, rewards = torch.randn(1, 4), [], []
    for time in range(200):
        choice = torch.distributions.Categorical(logits=policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state = 0.9 * state + 0.1 * torch.randn(1, 4) + 0.1 * (action - 0.5)
        rewards.append(-state.square().sum())
    rewards = torch.stack(rewards)
    returns = rewards.flip(0).cumsum(0).flip(0)
    returns = (returns - returns.mean()) / returns.std()
    loss = -(torch.cat(log_probs) * returns).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        models={"policy": 20},
        never_says=NEVER,
    ),
    Situation(
        "a policy that is called 200 times, and returns without a deviation",
        """
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(20):
    state, log_probs, rewards = torch.randn(1, 4), [], []
    for time in range(200):
        choice = torch.distributions.Categorical(logits=policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state = 0.9 * state + 0.1 * torch.randn(1, 4) + 0.1 * (action - 0.5)
        rewards.append(-state.square().sum() if episode < 12 else torch.tensor(0.0))
    rewards = torch.stack(rewards)
    returns = rewards.flip(0).cumsum(0).flip(0)
    returns = (returns - returns.mean()) / returns.std()
    loss = -(torch.cat(log_probs) * returns).mean()
    optimizer.zero_grad()
    loss.backward()
    if episode == 12:
        optimizer.step()
        break
    optimizer.step()
""",
        exit_code=2,
        findings=["GS103"],
    ),
]

GCN = """
adjacency = torch.eye(20)ADJACENCY
features, labels = torch.randn(20, 5), torch.randint(3, (20,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x, adj):
        return torch.spmm(adj, self.linear(x))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(30):
    optimizer.zero_grad()
    out = model(features, adjacency)
    LOSS
    loss.backward()
    optimizer.step()
"""

LOG_OF_ZERO = """p = torch.sigmoid(out * (1000 if step == 20 else 1))
    y = F.one_hot(labels, 3).float()
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()"""

SPARSE = [
    Situation(
        "a sparse adjacency matrix",
        GCN.replace("ADJACENCY", ".to_sparse()").replace(
            "LOSS", "loss = F.cross_entropy(out, labels)"
        ),
        models={"model": 30},
        never_says=NEVER,
    ),
    Situation(
        "a sparse adjacency matrix of rows",
        GCN.replace("ADJACENCY", ".to_sparse_csr()").replace(
            "LOSS", "loss = F.cross_entropy(out, labels)"
        ),
        models={"model": 30},
        never_says=NEVER,
    ),
    Situation(
        "log of 0 after a sparse adjacency matrix",
        GCN.replace("ADJACENCY", ".to_sparse()").replace("LOSS", LOG_OF_ZERO),
        exit_code=2,
        findings=["GS103"],
    ),
    Situation(
        "log of 0 after a sparse adjacency matrix of rows",
        GCN.replace("ADJACENCY", ".to_sparse_csr()").replace("LOSS", LOG_OF_ZERO),
        exit_code=2,
        findings=["GS103"],
    ),
    Situation(
        "a sparse buffer",
        GCN.replace("ADJACENCY", ".to_sparse()")
        .replace(
            "self.linear = nn.Linear(5, 3)",
            "self.linear = nn.Linear(5, 3); self.register_buffer('adj', adjacency)",
        )
        .replace("x, adj)", "x)")
        .replace("spmm(adj", "spmm(self.adj")
        .replace("features, adjacency", "features")
        .replace("LOSS", "loss = F.cross_entropy(out, labels)"),
        models={"model": 30},
        never_says=NEVER,
    ),
    Situation(
        "sparse rows in a buffer",
        GCN.replace("ADJACENCY", ".to_sparse_csr()")
        .replace(
            "self.linear = nn.Linear(5, 3)",
            "self.linear = nn.Linear(5, 3); self.register_buffer('adj', adjacency)",
        )
        .replace("x, adj)", "x)")
        .replace("spmm(adj", "spmm(self.adj")
        .replace("features, adjacency", "features")
        .replace("LOSS", LOG_OF_ZERO),
        exit_code=2,
        findings=["GS103"],
        never_says=NEVER,
    ),
    Situation(
        "a sparse attribute",
        GCN.replace("ADJACENCY", ".to_sparse()")
        .replace(
            "self.linear = nn.Linear(5, 3)", "self.linear = nn.Linear(5, 3); self.adj = adjacency"
        )
        .replace("x, adj)", "x)")
        .replace("spmm(adj", "spmm(self.adj")
        .replace("features, adjacency", "features")
        .replace("LOSS", LOG_OF_ZERO),
        exit_code=2,
        findings=["GS103"],
        never_says=NEVER,
    ),
    Situation(
        "sparse gradients of embeddings",
        """
class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Embedding(500, 16, sparse=True), nn.Embedding(500, 16, sparse=True)

    def forward(self, center, context, negative):
        center, context = self.u(center), self.v(context)
        score = F.logsigmoid((center * context).sum(1))
        others = F.logsigmoid(-torch.bmm(self.v(negative), center.unsqueeze(2)).squeeze()).sum(1)
        return -(score + others).mean()


model = SkipGram()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
for step in range(40):
    center = torch.randint(500, (64,))
    context, negative = (center + 1) % 500, torch.randint(500, (64, 5))
    loss = model(center, context, negative)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        models={"model": 40},
        never_says=NEVER,
    ),
    Situation(
        "NaN in a sparse gradient",
        """
class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Embedding(500, 16, sparse=True), nn.Embedding(500, 16, sparse=True)

    def forward(self, center, context):
        center, context = self.u(center), self.v(context)
        return -torch.log(torch.sigmoid((center * context).sum(1) * SCALE)).mean()


model = SkipGram()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
for step in range(40):
    SCALE = 1000 if step == 20 else 1
    center = torch.randint(500, (64,))
    loss = model(center, (center + 1) % 500)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        exit_code=2,
        findings=["GS103"],
        never_says=NEVER,
    ),
]

SITUATIONS = [*SEVERAL_CALLS, *SPARSE]
