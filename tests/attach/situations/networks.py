"""Networks that no optimizer moves, optimizers around optimizers, and names of models."""

from attach.situations import Situation

TWO_NETWORKS = """
a, b = nn.Linear(8, 1), nn.Linear(8, 1)
optimizer = torch.optim.Adam(a.parameters(), lr=1e-2)
{more}
for step in range(60):
    x = torch.randn(32, 8)
    y = x.sum(1, keepdim=True)
    optimizer.zero_grad()
    (F.mse_loss(a(x), y) + F.mse_loss(b(x), y)).backward()
    optimizer.step()
"""

FORGOTTEN = [
    Situation(
        "a network that was forgotten",
        TWO_NETWORKS.format(more=""),
        exit_code=1,
        findings=["GS306"],
        models={"a": 60},
        says=[
            "b (2 parameters) gets gradients and never changes: it is in no optimizer",
            'optimizer.add_param_group({"params": b.parameters()})',
        ],
    ),
    Situation(
        "a network that was forgotten, and what the fix adds",
        TWO_NETWORKS.format(more='optimizer.add_param_group({"params": b.parameters()})'),
        models={"a+b": 60},
    ),
    Situation(
        "an optimizer that never steps",
        TWO_NETWORKS.format(more="idle = torch.optim.Adam(b.parameters(), lr=1e-2)"),
        exit_code=1,
        findings=["GS306"],
        models={"a": 60},
        says=["its Adam, made at train.py:12, never stepped", "idle.step()"],
        never_says=["watch()", "no step was recorded"],
    ),
    Situation(
        "a frozen network that gradients pass through",
        TWO_NETWORKS.format(more="b.requires_grad_(False)"),
        models={"a": 60},
    ),
]

INSIDE_MAIN = """
import copy


def main():
    q = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    {second}
    optimizer = torch.optim.Adam({trained}.parameters(), lr=1e-3)
    for step in range(100):
        x, following = torch.randn(32, 8), torch.randn(32, 8)
        wanted = x.sum(1, keepdim=True) + 0.9 * {bootstrap}
        optimizer.zero_grad()
        F.smooth_l1_loss(q(x), wanted).backward()
        optimizer.step()


main()
"""
TARGET = "target = copy.deepcopy(q)"

GONE_AT_THE_END = [
    Situation(
        "a function that trains the target in place of the network",
        INSIDE_MAIN.format(second=TARGET, trained="target", bootstrap="target(following)"),
        exit_code=1,
        findings=["GS306"],
        models={"target": 100},
        says=[
            "q (4 parameters) gets gradients and never changes: it is in no optimizer, while "
            "target, which began as its copy, is trained",
            "give the optimizer q in place of target",
        ],
    ),
    Situation(
        "a function that optimizes a target without a gradient",
        INSIDE_MAIN.format(second=TARGET, trained="target", bootstrap="target(following).detach()"),
        exit_code=2,
        findings=["GS106", "GS306"],
        first="GS306",
        caused_by={"GS106": "GS306"},
    ),
    Situation(
        "a function that trains a network with a target",
        INSIDE_MAIN.format(second=TARGET, trained="q", bootstrap="target(following).detach()"),
        models={"q": 100},
    ),
    Situation(
        "a function that forgets a network",
        INSIDE_MAIN.format(
            second="other = nn.Linear(8, 1)", trained="q", bootstrap="other(following)"
        ),
        exit_code=1,
        findings=["GS306"],
        models={"q": 100},
    ),
]

ACTOR_AND_CRITICS = """
import copy
actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2), nn.Tanh())
first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
second = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
actor_target, first_target, second_target = map(copy.deepcopy, (actor, first, second))
critic_optimizer = torch.optim.Adam({critics}, lr=1e-3)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
for step in range(160):
    state, following = torch.randn(32, 6), torch.randn(32, 6)
    action = torch.rand(32, 2) * 2 - 1
    reward = -(state[:, :2] - action).square().sum(1, keepdim=True)
    with torch.no_grad():
        chosen = torch.cat([following, actor_target(following)], 1)
        wanted = reward + 0.9 * torch.min(first_target(chosen), second_target(chosen))
    given = torch.cat([state, action], 1)
    critic_loss = F.mse_loss(first(given), wanted) + F.mse_loss(second(given), wanted)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    if step % 2 == 0:
        actor_loss = -first(torch.cat([state, actor(state)], 1)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
    with torch.no_grad():
        for mine, other in ((actor_target, actor), (first_target, first), (second_target, second)):
            for old, new in zip(mine.parameters(), other.parameters()):
                old.lerp_(new, 0.01)
"""
BOTH = "[*first.parameters(), *second.parameters()]"

ACTORS = [
    Situation(
        "a target that steps in place of a critic with an idle optimizer, in a function",
        """
import copy


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

    def forward(self, x, action):
        return self.layers(torch.cat([x, action], 1))

    def train_net(self, x, action, wanted):
        self.optimizer.zero_grad()
        F.smooth_l1_loss(self(x, action), wanted).mean().backward()
        self.optimizer.step()


def main():
    critic, target = Critic(), Critic()
    target.load_state_dict(critic.state_dict())
    actor = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    for step in range(100):
        x, action = torch.randn(32, 4), torch.randn(32, 2)
        with torch.no_grad():
            wanted = x[:, :1] + 0.9 * target(x, actor(x))
        target.train_net(x, action, wanted)
        optimizer.zero_grad()
        (-critic(x, actor(x))).mean().backward()
        optimizer.step()


main()
""",
        exit_code=1,
        findings=["GS306"],
        says=["critic", "never stepped"],
    ),
    Situation(
        "a target that is in an optimizer of its own in place of its critic",
        """
import copy
actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
target = copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(16, 4)
    critic_optimizer.zero_grad()
    given = torch.cat([x, actor(x).detach()], 1)
    F.mse_loss(critic(given), x[:, :1] + 0.9 * target(given).detach()).backward()
    critic_optimizer.step()
    actor_optimizer.zero_grad()
    (-critic(torch.cat([x, actor(x)], 1))).mean().backward()
    actor_optimizer.step()
""",
        exit_code=2,
        findings=["GS106", "GS306"],
        first="GS306",
        caused_by={"GS106": "GS306"},
        models={"target": 60, "actor": 60},
    ),
    Situation(
        "an actor, two critics and their targets",
        ACTOR_AND_CRITICS.format(critics=BOTH),
        models={"first+second": 160, "actor": 80},
    ),
    Situation(
        "a critic that is in no optimizer",
        ACTOR_AND_CRITICS.format(critics="first.parameters()"),
        exit_code=1,
        findings=["GS306"],
        models={"first": 160, "actor": 80},
        says=["second (4 parameters) gets gradients and never changes: it is in no optimizer"],
    ),
    Situation(
        "a target that is in the optimizer in place of its critic",
        ACTOR_AND_CRITICS.format(critics="[*first.parameters(), *second_target.parameters()]"),
        exit_code=1,
        findings=["GS301", "GS306"],
        first="GS306",
        says=["second (4 parameters) gets gradients and never changes", "in place of"],
    ),
    Situation(
        "idle optimizers of target networks",
        """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)

    def forward(self, x):
        return self.layer(x)


critic, target = Critic(), Critic()
target.load_state_dict(critic.state_dict())
for step in range(60):
    x, following = torch.randn(16, 4), torch.randn(16, 4)
    wanted = x.sum(1, keepdim=True) + 0.9 * target(following)
    loss = F.smooth_l1_loss(critic(x), wanted.detach())
    critic.optimizer.zero_grad()
    loss.backward()
    critic.optimizer.step()
    for mine, other in zip(target.parameters(), critic.parameters()):
        mine.data.mul_(0.99).add_(0.01 * other.data)
""",
        models={"critic": 60},
        never_says=["no step was recorded", "gets gradients and never changes"],
    ),
    Situation(
        "a logarithm of a temperature beside two networks",
        """
actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
log_alpha = torch.zeros(1, requires_grad=True)


def made(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


optimizers = [made(actor.parameters()), made(critic.parameters()), made([log_alpha])]
for step in range(30):
    x = torch.randn(16, 4)
    entropy = actor(x).softmax(-1).log().mean()
    losses = [F.mse_loss(critic(x), x[:, :1]), log_alpha.exp().detach() * entropy]
    losses.append(-(log_alpha * (entropy.detach() + 1)).sum())
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(losses).backward()
    for optimizer in optimizers:
        optimizer.step()
""",
        models={"actor": 30, "critic": 30, "log_alpha": 30},
        says=["made at train.py:15"],
        never_says=["made at train.py:18"],
    ),
]

OUTER = """
class Outer(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moved"] = group["rho"] * p.grad / (p.grad.norm() + 1e-12)
                p.add_(self.state[p]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["moved"])
        self.base_optimizer.step()
        self.zero_grad()


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = Outer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
for step in range(20):
    x = torch.randn(32, 8)
    y = x[:, :4].argmax(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.first_step()
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step()
"""

LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.state, self.defaults = optimizer.state, optimizer.defaults
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for p, q in zip(group["params"], slow):
                    q.lerp_(p.detach(), self.alpha)
                    p.data.copy_(q)
        return loss

    def zero_grad(self):
        self.optimizer.zero_grad()


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(23):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
"""

LARS = """
class LARS:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    @torch.no_grad()
    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm() / (p.grad.norm() + 1e-6) * 0.02)
        self.optimizer.step()


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = LARS(torch.optim.SGD(model.parameters(), lr=1.0))
for step in range(30):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
"""

WRAPPED = [
    Situation("sharpness-aware steps around SGD", OUTER, models={"model": 20}),
    Situation("Lookahead around SGD", LOOKAHEAD, models={"model": 23}),
    Situation("LARS around SGD", LARS, models={"model": 30}),
]

AGAIN = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
for epoch in range(3):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 / (epoch + 1))
    for step in range(10):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
"""

MADE_AGAIN = [
    Situation("an optimizer that is made again in every epoch", AGAIN, models={"model": 30}),
    Situation(
        "an optimizer for the head, then one for the whole model",
        """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model[0].requires_grad_(False)


def stage(parameters, steps):
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(steps):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()


stage(model[2].parameters(), 12)
model.requires_grad_(True)
stage(model.parameters(), 15)
""",
        models={"model": 27},
    ),
    Situation(
        "a model that is made again for every fold",
        """
for fold in range(2):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(12):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
""",
        models={"model": 12, "model2": 12},
    ),
]

NAMES = [
    Situation(
        "a model that a class of a library wraps",
        """
import pathlib
import sys

folder = pathlib.Path("site-packages")
folder.mkdir()
(folder / "solvers.py").write_text(
    "import torch\\n"
    "class Perturbed(torch.nn.Module):\\n"
    "    def __init__(self, base):\\n"
    "        super().__init__()\\n"
    "        self.base = base\\n"
    "    def forward(self, x):\\n"
    "        return self.base(x)\\n"
    "def solve(base, x):\\n"
    "    solver = Perturbed(base)\\n"
    "    for _ in range(3):\\n"
    "        x = x + 0.1 * solver(x)\\n"
    "    return x\\n"
)
sys.path.append(str(folder))
from solvers import solve


class Derivative(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


func = Derivative()
optimizer = torch.optim.Adam(func.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    F.mse_loss(solve(func, x), x.flip(1)).backward()
    optimizer.step()
""",
        models={"func": 12},
        never_says=["Perturbed"],
    ),
    Situation(
        "a model that is the attribute of a trainer",
        """
class Encoder(nn.Sequential):
    pass


class Trainer:
    def __init__(self):
        self.net = Encoder(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def fit(self):
        for step in range(12):
            x = torch.randn(32, 8)
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(x), x[:, :4].argmax(1)).backward()
            self.optimizer.step()


Trainer().fit()
""",
        models={"net": 12},
        says=["made at train.py:17"],
    ),
    Situation(
        "a model on two ranks is not named after its wrapper",
        """
dist.init_process_group("gloo")


def train(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.cross_entropy(net(x), x[:, :4].argmax(1)).backward()
        optimizer.step()


class Classifier(nn.Sequential):
    pass


train(nn.parallel.DistributedDataParallel(Classifier(nn.Linear(8, 16), nn.Linear(16, 4))))
""",
        arguments=["--nproc_per_node", "2"],
        models={"net": 12},
        never_says=["of DistributedDataParallel"],
        slow=True,
    ),
]

SITUATIONS = [*FORGOTTEN, *GONE_AT_THE_END, *ACTORS, *WRAPPED, *MADE_AGAIN, *NAMES]
