"""How scripts end, and the words that are printed about them."""

from attach.situations import Situation

TRAINING = """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


classifier = Classifier()
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
for step in range(20):
    x = torch.randn(32, 8)
    loss = F.cross_entropy(classifier(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LARGE_RATE = """
network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(network.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 60)
for step in range(60):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    F.mse_loss(network(x), x[:, :2]).backward()
    optimizer.step()
    scheduler.step()
"""

TWO_MODELS = """
first, second = nn.Linear(8, 4), nn.Linear(8, 4)
optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (first, second)]
for step in range(30):
    x = torch.randn(16, 8)
    for model, optimizer in zip((first, second), optimizers):
        if model is first:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        FACTOR
        loss.backward()
        optimizer.step()
"""

ACTOR_AND_CRITIC = """
actor, critic, target = nn.Linear(8, 2), nn.Linear(10, 1), nn.Linear(10, 1)
log_alpha = torch.zeros(1, requires_grad=True)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
target_optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)  # never steps
for step in range(30):
    state = torch.randn(32, 8)
    action = actor(state).tanh()
    with torch.no_grad():
        wanted = state.sum(1, keepdim=True) + 0.9 * target(torch.cat([state, action], 1))
    critic_optimizer.zero_grad()
    F.mse_loss(critic(torch.cat([state, action.detach()], 1)), wanted).backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    critic_optimizer.step()
    actor_optimizer.zero_grad()
    size = action.square().mean()
    (log_alpha.exp().detach() * size - critic(torch.cat([state, action], 1)).mean()).backward()
    actor_optimizer.step()
    alpha_optimizer.zero_grad()
    (log_alpha * (size.detach() - 0.3)).mean().backward()
    alpha_optimizer.step()
"""

WRAPPED = """
dist.init_process_group("gloo")
CLASS
wrapped = nn.parallel.DistributedDataParallel(Classifier())
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / 20))
torch.manual_seed(dist.get_rank())
for step in range(20):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), x[:, :4].argmax(1)).backward()
    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.3)
    optimizer.step()
    scheduler.step()
dist.destroy_process_group()
""".replace("CLASS", TRAINING[: TRAINING.index("classifier = ")])

OURS = ("problems.report(", "warnings.warn(", "gradsight/core", "GradsightWarning")
NOT_CHOSEN = (
    "watch(",
    "watch is closed",
    "the watch",
    "to look",
    "look after",
    "Look after",
    "looks",
)
ASKED = ("nothing to judge", "no optimizer step was seen", "torch optimizer and step it")
AGAIN = "gradsight check --no-preflight FOLDER/train.py or without Gradsight:"

SAM = """
class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base, **options):
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moved"] = 0.05 * parameter.grad
                parameter.add_(self.state[parameter]["moved"])

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter]["moved"])
        self.base.step()


network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
sam = SAM(network.parameters(), torch.optim.SGD, lr=0.05)
for step in range(60):
    x = torch.randn(32, 8)
    F.cross_entropy(network(x), x[:, :4].argmax(1)).backward()
    sam.first_step()
    F.cross_entropy(network(x), x[:, :4].argmax(1)).backward()  # adds to the first gradient
    sam.second_step()
    sam.zero_grad()
"""

DETACHED_ACTION = """
actor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
critic = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(60):
    state = torch.randn(64, 8)
    mean, size = actor(state).chunk(2, -1)
    choice = torch.distributions.Normal(mean, size.clamp(-5, 2).exp())
    action = choice.rsample()
    both = torch.cat([state, action.detach()], 1)
    critic_optimizer.zero_grad()
    F.mse_loss(critic(both), (state[:, :2] * action.detach()).sum(1, keepdim=True)).backward()
    critic_optimizer.step()
    actor_optimizer.zero_grad()
    (0.2 * choice.log_prob(action).sum(1, keepdim=True) - critic(both)).mean().backward()
    actor_optimizer.step()
"""

SITUATIONS = [
    # Two faults that docs/health.md lists as undecidable. A check that finds one changes that list.
    Situation("undecidable: gradients not cleared between the passes of SAM", SAM),
    Situation(
        "undecidable: an action detached before the critic",
        DETACHED_ACTION,
        models={"actor": 60, "critic": 60},
    ),
    Situation(
        "a script that dies at an import",
        "import a_package_that_is_not_installed\n",
        exit_code=3,
        models={},
        says=[
            "failed with exit code 1 before its first optimizer step: ModuleNotFoundError: No "
            "module named 'a_package_that_is_not_installed'",
            AGAIN,
        ],
        never_says=[*ASKED, "healthy", "went to the script"],
    ),
    Situation(
        "a script that dies in the loop",
        TRAINING.replace(
            "optimizer.step()",
            "if step == 9: raise ValueError('no more rows')\n    optimizer.step()",
        ),
        exit_code=3,
        models={"classifier": 9},
        says=["failed with exit code 1 after 9 optimizer steps: ValueError: no more rows", AGAIN],
        never_says=[*ASKED, "healthy"],
    ),
    Situation(
        "a script whose own arguments are wrong",
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--steps', required=True)\nparser.parse_args()\n" + TRAINING,
        exit_code=3,
        models={},
        says=["failed with exit code 2 before its first optimizer step", AGAIN],
        never_says=[*ASKED, "went to the script"],
    ),
    Situation(
        "a script that ends with sys.exit(0)",
        TRAINING + "import sys\nsys.exit(0)\n",
        models={"classifier": 20},
        says=["healthy: no finding in 20 steps"],
        never_says=["failed", "To see whether"],
    ),
    Situation(
        "a script that raises SystemExit(3)",
        TRAINING + "raise SystemExit(3)\n",
        exit_code=3,
        models={"classifier": 20},
        says=["The script failed with exit code 3 after 20 optimizer steps", AGAIN],
        never_says=["healthy"],
    ),
    Situation(
        "a script that is interrupted",
        TRAINING.replace(
            "optimizer.step()", "optimizer.step()\n    if step == 11: raise KeyboardInterrupt"
        ),
        exit_code=3,
        models={"classifier": 12},
        says=["The script was interrupted after 12 optimizer steps"],
        never_says=["healthy", "To see whether"],
    ),
    Situation(
        "a script that ends with os._exit(0)",
        TRAINING + "import os\nos._exit(0)\n",
        models={"classifier": 20},
        says=["healthy: no finding in 20 steps"],
    ),
    Situation(
        "a script with an excepthook of its own",
        "import sys\nsys.excepthook = lambda kind, error, trace: print('my own hook')\n"
        + TRAINING
        + "raise ValueError('too late')\n",
        exit_code=3,
        models={"classifier": 20},
        says=["my own hook", "after 20 optimizer steps: ValueError: too late"],
    ),
    Situation(
        "a script that turns warnings into errors",
        "import warnings\nwarnings.simplefilter('error')\n"
        + TRAINING.replace("    loss.backward()", "    if step % 5: loss.backward()"),
        models={"classifier": 20},
        says=["no finding in 20 steps"],
    ),
    Situation(
        "a rate that is too large and decays to zero",
        LARGE_RATE,
        exit_code=1,
        findings=["GS401"],
        says=[
            "at a learning rate of 0.492 (Adam)",
            "torch.optim.Adam(model.parameters(), lr=0.0492)",
            "Adam of network: made at train.py:11, steps at train.py:17, lr up to 0.5 with a scheduler.",
            "To silence GS401, put GS401 = false at the top of health.toml and run: gradsight check "
            "--health health.toml FOLDER/train.py",
        ],
        never_says=["lr 0,", *OURS, *NOT_CHOSEN],
    ),
    Situation(
        "the model with the critical finding comes first",
        TWO_MODELS.replace("FACTOR", "pass"),
        exit_code=2,
        findings=["GS305"],
        first="GS305",
        says=["GS305", "second: ❌ critical", "first: ✅ healthy"],
        never_says=[*OURS, *NOT_CHOSEN],
    ),
    Situation(
        "an actor and a critic of which one is clipped",
        ACTOR_AND_CRITIC,
        models={"actor": 30, "critic": 30, "log_alpha": 30},
        says=[
            "Clipping: critic in 30 of 30 steps.",
            "Adam of target: made at train.py:15, never stepped, no scheduler.",
        ],
        never_says=[*OURS, *NOT_CHOSEN, "of 90 steps"],
    ),
    Situation(
        "steps without a gradient in between",
        TRAINING.replace("    loss.backward()", "    if step % 5: loss.backward()"),
        models={"classifier": 20},
        never_says=["problems.report(", "warnings.warn(", "gradsight/core", *NOT_CHOSEN],
    ),
    Situation(
        "two ranks of a wrapped model, clipped, with a scheduler",
        WRAPPED,
        arguments=["--nproc_per_node", "2"],
        models={"wrapped": 20},
        says=[
            "AdamW of wrapped: made at",
            "lr up to 0.01 with a scheduler",
            "of 20 steps. Loss scaling",
        ],
        never_says=[
            "DistributedDataParallel:",
            "of DistributedDataParallel",
            "of 40 steps",
            *NOT_CHOSEN,
        ],
        slow=True,
    ),
    Situation(
        "a rank that dies",
        WRAPPED.replace("for step in", "raise FileNotFoundError('data/train.bin')\nfor step in"),
        arguments=["--nproc_per_node", "2"],
        exit_code=3,
        models={},
        says=[
            "FileNotFoundError: data/train.bin",
            "gradsight check --nproc_per_node 2 --no-preflight",
        ],
        never_says=["went to the script", *ASKED],
        slow=True,
    ),
]
