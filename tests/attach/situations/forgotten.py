"""Networks that are in no optimizer, and what must be done about each."""

from attach.situations import Situation

ACTOR_CRITIC = """
actor = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
critic = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
{made}
for step in range(60):
    state, action = torch.randn(64, 4), torch.rand(64, 1) * 2 - 1
    wanted = -(action - state[:, :1].tanh()) ** 2
    critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), wanted)
    {first}.zero_grad()
    critic_loss.backward()
    {first}.step()
    actor_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
    {second}.zero_grad()
    actor_loss.backward()
    {second}.step()
"""
NAMED = {"first": "critic_optimizer", "second": "actor_optimizer"}
TWO = """
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
actor_optimizer = torch.optim.Adam({given}.parameters(), lr=3e-4, betas=(0.5, 0.99))
"""
IN_A_LIST = """
both = [torch.optim.Adam(critic.parameters(), lr=rate) for rate in (1e-3, 3e-4)]
"""

WRONG_NETWORK = [
    Situation(
        "an actor whose optimizer was given the critic",
        ACTOR_CRITIC.format(made=TWO.format(given="critic"), **NAMED),
        exit_code=1,
        findings=["GS306"],
        models={"critic": 60},
        says=[
            "it is in no optimizer, while two optimizers hold critic: critic_optimizer (train.py:13) and "
            "actor_optimizer (train.py:14)",
            "do: Create actor_optimizer (train.py:14) with the parameters of actor",
            "actor_optimizer = torch.optim.Adam( actor.parameters(), lr=0.0003, betas=(0.5, 0.99) "
            ")",
        ],
        never_says=["add_param_group", "no optimizer was given"],
    ),
    Situation(
        "an actor whose optimizer has it",
        ACTOR_CRITIC.format(made=TWO.format(given="actor"), **NAMED),
        models={"critic": 60, "actor": 60},
    ),
    Situation(
        "an actor whose optimizer was given the critic, in a list",
        ACTOR_CRITIC.format(made=IN_A_LIST, first="both[0]", second="both[1]"),
        exit_code=1,
        findings=["GS306"],
        says=["Create both[1] (train.py:13) with the parameters of actor"],
    ),
    Situation(
        "an actor that is in no optimizer, beside its critic",
        ACTOR_CRITIC.format(
            made="critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3, alpha=0.9)",
            first="critic_optimizer",
            second="critic_optimizer",
        ).replace("actor_loss.backward()\n    critic_optimizer.step()", "actor_loss.backward()"),
        exit_code=1,
        findings=["GS306"],
        says=[
            "Create an optimizer for actor",
            "actor_optimizer = torch.optim.RMSprop( actor.parameters(), lr=0.001, alpha=0.9 )",
            "actor_optimizer.step()",
        ],
        never_says=["add_param_group"],
    ),
    Situation(
        "a critic that is in no optimizer, beside its actor",
        ACTOR_CRITIC.format(
            made="actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)",
            first="actor_optimizer",
            second="actor_optimizer",
        ).replace("critic_loss.backward()\n    actor_optimizer.step()", "critic_loss.backward()"),
        exit_code=1,
        findings=["GS306"],
        says=["critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.001)"],
        never_says=["add_param_group"],
    ),
]

UNDECIDED = [
    Situation(
        "a network whose optimizer was given another one, in one step with it",
        """
a = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
b = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
first = torch.optim.Adam(b.parameters(), lr=1e-3)
second = torch.optim.Adam(b.parameters(), lr=1e-4)
for step in range(60):
    x = torch.randn(64, 4)
    loss = F.mse_loss(a(x) + b(x), x[:, :1])
    first.zero_grad()
    loss.backward()
    first.step()
    second.step()
""",
        exit_code=1,
        findings=["GS303", "GS306"],
        first="GS306",
        caused_by={"GS303": "GS306"},
        says=[
            "Create one of first (train.py:12) and second (train.py:13) with the parameters of a."
        ],
        never_says=["add_param_group"],
    ),
    Situation(
        "a network that is forgotten by optimizers that are made again and again",
        """
a = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
b = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
optimizers = []
for epoch in range(20):
    optimizers.append(torch.optim.SGD(b.parameters(), lr=1e-3, momentum=0.9))
    for step in range(3):
        x = torch.randn(64, 4)
        loss = F.mse_loss(a(x) + b(x), x[:, :1])
        optimizers[-1].zero_grad()
        loss.backward()
        optimizers[-1].step()
""",
        exit_code=1,
        findings=["GS306"],
        says=["a_optimizer = torch.optim.SGD(a.parameters(), lr=0.001, momentum=0.9)"],
        never_says=["two optimizers hold"],
    ),
]

GAN = """
netG = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
{made}
for step in range(60):
    real = torch.randn(32, 2) * 0.5 + 1
    netD.zero_grad()
    F.binary_cross_entropy_with_logits(netD(real), torch.ones(32, 1)).backward()
    fake = netG(torch.randn(32, 4))
    F.binary_cross_entropy_with_logits(netD(fake.detach()), torch.zeros(32, 1)).backward()
    optimizerD.step()
    netG.zero_grad()
    F.binary_cross_entropy_with_logits(netD(fake), torch.ones(32, 1)).backward()
    {step}
"""

GENERATORS = [
    Situation(
        "a generator whose optimizer was given the discriminator",
        GAN.format(
            made="optimizerG = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))",
            step="optimizerG.step()",
        ),
        exit_code=1,
        findings=["GS306"],
        says=["Create optimizerG (train.py:13) with the parameters of netG"],
        never_says=["add_param_group"],
    ),
    Situation(
        "a generator that is in no optimizer",
        GAN.format(made="", step=""),
        exit_code=1,
        findings=["GS306"],
        says=[
            "netG_optimizer = torch.optim.Adam( netG.parameters(), lr=0.002, betas=(0.5, 0.999) )"
        ],
        never_says=["add_param_group"],
    ),
    Situation(
        "a generator with an optimizer",
        GAN.format(
            made="optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))",
            step="optimizerG.step()",
        ),
        models={"netD": 60, "netG": 60},
    ),
]

CYCLE = """
def net(out):
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, out))


G_AB, G_BA, D_A, D_B = net(2), net(2), net(1), net(1)
optimizer_G = torch.optim.Adam([*G_AB.parameters(){more}], lr=1e-3)
optimizer_D_A = torch.optim.Adam(D_A.parameters(), lr=1e-3)
optimizer_D_B = torch.optim.Adam({given}.parameters(), lr=1e-3)
one, zero = torch.ones(16, 1), torch.zeros(16, 1)
for step in range(60):
    a, b = torch.randn(16, 2) * 0.5 + 1, torch.randn(16, 2) * 0.5 - 1
    optimizer_G.zero_grad()
    fake_b, fake_a = G_AB(a), G_BA(b)
    loss = F.mse_loss(D_B(fake_b), one) + F.mse_loss(D_A(fake_a), one)
    loss = loss + (G_BA(fake_b) - a).abs().mean() + (G_AB(fake_a) - b).abs().mean()
    loss.backward()
    optimizer_G.step()
    optimizer_D_A.zero_grad()
    (F.mse_loss(D_A(a), one) + F.mse_loss(D_A(fake_a.detach()), zero)).backward()
    optimizer_D_A.step()
    optimizer_D_B.zero_grad()
    (F.mse_loss(D_B(b), one) + F.mse_loss(D_B(fake_b.detach()), zero)).backward()
    optimizer_D_B.step()
"""
BOTH = ", *G_BA.parameters()"

CYCLES = [
    Situation(
        "two generators and two discriminators in a cycle",
        CYCLE.format(more=BOTH, given="D_B"),
        models={"G_AB+G_BA": 60, "D_A": 60, "D_B": 60},
    ),
    Situation(
        "a discriminator of a cycle whose optimizer was given the other one",
        CYCLE.format(more=BOTH, given="D_A"),
        exit_code=1,
        findings=["GS303", "GS306"],
        first="GS306",
        caused_by={"GS303": "GS306"},
        says=["Create optimizer_D_B (train.py:17) with the parameters of D_B"],
        never_says=["add_param_group"],
    ),
    Situation(
        "a generator of a cycle that is in no optimizer",
        CYCLE.format(more="", given="D_B"),
        exit_code=1,
        findings=["GS306"],
        says=[
            "G_BA (4 parameters) gets gradients and never changes: it is in no optimizer",
            'optimizer_G.add_param_group({"params": G_BA.parameters()})',
        ],
        never_says=["optimizer_D_A.add_param_group"],
    ),
]

COMPARED = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
features = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
{more}
for step in range(80):
    x = torch.randn(32, 8)
    output = model(x)
    {loss}
"""
PERCEPTUAL = """
    loss = F.mse_loss(features(output), features(x.flip(1)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ADVERSARIAL = """
    optimizer.zero_grad()
    (-judge(features(output)).mean() + F.mse_loss(features(output), features(x))).backward()
    optimizer.step()
    judging.zero_grad()
    (judge(features(output.detach())) - judge(features(x.flip(1)))).mean().backward()
    judging.step()
"""
JUDGE = """
judge = nn.Linear(16, 1)
judging = torch.optim.Adam(judge.parameters(), lr=1e-3)
"""

FIXED = [
    Situation(
        "fixed features that compare an output with data",
        COMPARED.format(more="", loss=PERCEPTUAL),
        models={"model": 80},
    ),
    Situation(
        "fixed features that a discriminator looks at",
        COMPARED.format(more=JUDGE, loss=ADVERSARIAL),
        models={"model": 80, "judge": 80},
    ),
]

PARTS = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.linear, self.bn = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.bn(self.linear(x))


encoder, head = Encoder(), nn.Linear(16, 1)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
{more}
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.mse_loss(head(encoder(x).relu()), x[:, :1]).backward()
    optimizer.step()
"""
ADDED = """optimizer.add_param_group(
    {"params": [*encoder.linear.parameters(), *encoder.bn.parameters()]}
)"""

SINGLE = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.linear = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(8)) for _ in range(2)])

    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.linear(x) * self.scale + self.shifts[1]


encoder, head = Encoder(), nn.Linear(8, 1)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
{more}
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.mse_loss(head(encoder(x).relu()), x[:, :1]).backward()
    optimizer.step()
"""
ADDED_SINGLE = """optimizer.add_param_group(
    {"params": [encoder.scale, *encoder.linear.parameters(), encoder.shifts[1]]}
)"""

WRAPPED = """
class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.network(x)


q_network, other = QNetwork(), nn.Linear(8, 1)
optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1)
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.mse_loss(other(x) + q_network(x), x[:, :1]).backward()
    optimizer.step()
"""

NAMES = [
    Situation(
        "a network of which a part gets gradients is in no optimizer",
        PARTS.format(more=""),
        exit_code=1,
        findings=["GS306"],
        says=[
            "encoder (4 of its 8 parameters) gets gradients and never changes",
            "encoder.linear and encoder.bn",
            "{ADDED}".format(ADDED=" ".join(ADDED.split())),
        ],
    ),
    Situation(
        "single parameters that get gradients are in no optimizer",
        SINGLE.format(more=""),
        exit_code=1,
        findings=["GS306"],
        says=[" ".join(ADDED_SINGLE.split())],
    ),
    Situation(
        "single parameters that get gradients are added to the optimizer",
        SINGLE.format(more=ADDED_SINGLE),
    ),
    Situation(
        "a part that gets gradients is added to the optimizer",
        PARTS.format(more=ADDED),
    ),
    Situation(
        "a network of one child is in no optimizer",
        WRAPPED,
        exit_code=1,
        findings=["GS306"],
        says=["seen: q_network (4 parameters)", '{"params": q_network.parameters()}'],
        never_says=["network.network"],
    ),
]

IN_ONE = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))


def configured(model):
    first = torch.optim.Adam(model.{given}.parameters(), lr=1e-3, betas=(0.5, 0.9))
    return first, torch.optim.Adam(model.discriminator{part}.parameters(), lr=2e-3)


model = Both()
{loss_of}
generating, judging = configured(model)
{more}
for step in range(60):
    fake = model.generator(torch.randn(32, 4))
    generating.zero_grad()
    loss_of(model.discriminator(fake), 1.0).backward()
    generating.step()
    judging.zero_grad()
    real = model.discriminator(torch.randn(32, 2) + 1)
    (loss_of(real, 1.0) + loss_of(model.discriminator(fake.detach()), 0.0)).backward()
    judging.step()
"""
SEVERAL_CRITIC_STEPS = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))


model = Both()
generating = torch.optim.Adam(model.generator.parameters(), 1e-3)
judging = torch.optim.Adam(model.{given}.parameters(), 1e-3)
for _ in range(30):
    for _ in range(4):
        judging.zero_grad()
        fake = model.generator(torch.randn(32, 4)){detached}
        (model.critic(fake).mean() - model.critic(torch.randn(32, 2) + 2).mean()).backward()
        judging.step()
    generating.zero_grad()
    (-model.critic(model.generator(torch.randn(32, 4))).mean()).backward()
    generating.step()
"""
LOSS_OF = """

def loss_of(logits, wanted):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))


"""

CHILDREN = [
    Situation(
        "a discriminator in both optimizers of a model",
        IN_ONE.format(given="discriminator", part="", more="", loss_of=LOSS_OF),
        exit_code=1,
        findings=["GS202", "GS302"],
        first="GS302",
        says=[
            "4 of 8 trainable parameters are in no optimizer, while two optimizers hold discriminator",
            "Create that one with the parameters of generator.",
            "missing = [*model.generator.parameters()]",
        ],
        never_says=["add_param_group"],
    ),
    Situation(
        "a critic in no optimizer, with several steps of its loss per step of the generator",
        SEVERAL_CRITIC_STEPS.format(given="generator", detached=""),
        exit_code=1,
        findings=["GS201", "GS302"],
        says=["Create that one with the parameters of critic."],
    ),
    Situation(
        "each of two children in its own optimizer, with several steps of the critic",
        SEVERAL_CRITIC_STEPS.format(given="critic", detached=".detach()"),
    ),
    Situation(
        "each of two children in its own optimizer",
        IN_ONE.format(given="generator", part="", more="", loss_of=LOSS_OF),
        models={"model": 60},
    ),
    Situation(
        "a layer of one of two children is in no optimizer",
        IN_ONE.format(given="generator", part="[2]", more="", loss_of=LOSS_OF),
        exit_code=1,
        findings=["GS302"],
        says=[
            'missing = [*model.get_submodule("discriminator.0").parameters()]',
            "another_optimizer = torch.optim.Adam(missing, lr=0.002)",
            "another_optimizer.step()",
        ],
        never_says=["add_param_group"],
    ),
]

SITUATIONS = [*CHILDREN, *WRONG_NETWORK, *UNDECIDED, *GENERATORS, *CYCLES, *FIXED, *NAMES]
