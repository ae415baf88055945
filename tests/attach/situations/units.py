"""Dead units, steps that are too large, and adapters: findings whose cause is easily mistaken."""

from attach.situations import Situation

DEAD = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
with torch.no_grad():
    model[0].bias.fill_({bias})
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
"""

FACTORS = """
import peft
import transformers
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
base = transformers.LlamaForCausalLM(config)
{made_early}
lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", {options})
model = peft.get_peft_model(base, lora)
{changed}
{made_late}
for step in range(60):
    x = torch.randint(64, (8, 24))
    optimizer.zero_grad()
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
"""
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
ZERO = """
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.zero_()
"""
FREEZE = """
for name, parameter in model.named_parameters():
    parameter.requires_grad_("modules_to_save" in name)
"""


def adapters(
    name: str,
    late: str = OPTIMIZER,
    early: str = "",
    options: str = "",
    changed: str = "",
    **expected: object,
) -> Situation:
    """Return a situation that trains a small Llama with adapters."""
    script = FACTORS.format(made_early=early, made_late=late, options=options, changed=changed)
    return Situation(name, script, preload=["transformers", "peft"], slow=True, **expected)


ADAPTERS = [
    adapters("adapters of a language model"),
    adapters(
        "adapters that were made after the optimizer",
        late="",
        early=OPTIMIZER.replace("model.", "base."),
        options='modules_to_save=["lm_head"]',
        exit_code=2,
        findings=["GS205", "GS302"],
        first="GS302",
        caused_by={"GS205": "GS302"},
        says=["so nothing is trained"],
        never_says=["init_weights"],
    ),
    adapters(
        "adapters whose factors are both zero",
        changed=ZERO,
        exit_code=2,
        findings=["GS106"],
        says=["Both factors of each adapter (LoRA) are zero"],
    ),
    adapters(
        "adapters that were frozen with the rest",
        options='modules_to_save=["lm_head"]',
        changed=FREEZE,
        exit_code=1,
        findings=["GS307"],
        says=["is_trainable=True"],
    ),
    Situation(
        "adapters that were loaded for use, not for training",
        FACTORS.format(
            made_early="",
            made_late=OPTIMIZER,
            options="",
            changed="model.save_pretrained('saved'); "
            "model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), 'saved')",
        ),
        exit_code=3,
        says=["is_trainable=True"],
        never_says=["Does the script make a torch optimizer"],
        preload=["transformers", "peft"],
        slow=True,
    ),
]

UNITS = [
    Situation(
        "a dead layer of ReLU",
        DEAD.format(bias=-50.0),
        exit_code=2,
        first="GS205",
        findings=["GS107", "GS205", "GS301", "GS607"],
        caused_by={"GS107": "GS205", "GS301": "GS205", "GS607": "GS205"},
        says=["ReLU"],
        never_says=["detach()"],
    ),
    Situation("a live layer of ReLU", DEAD.format(bias=0.0), models={"model": 60}),
    Situation(
        "a learning rate that is far too large for Adam",
        """
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
for step in range(40):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
""",
        exit_code=1,
        first="GS401",
        findings=["GS401"],
        says=["torch.optim.Adam(model.parameters(), lr=0.1)"],
        never_says=["AdamW"],
    ),
    Situation(
        "a learning rate that is too large and decays to zero",
        """
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.8)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=40)
for step in range(40):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
    scheduler.step()
""",
        exit_code=1,
        findings=["GS401"],
        says=["Adam has a learning rate of 0.78 at this step: use 0.078", "lr up to 0.8"],
        never_says=["lr 0,"],
    ),
    Situation(
        "a bidirectional network of which only the last step is read",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    x = torch.randn(32, 6, 4)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, -1, :3].argmax(1)).backward()
    optimizer.step()
""",
        models={"model": 60},
    ),
    Situation(
        "a bidirectional network of which all steps are read",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    x = torch.randn(32, 6, 4)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, -1, :3].argmax(1)).backward()
    optimizer.step()
""",
        models={"model": 60},
    ),
]

TRANSFORMER = """
body = nn.Transformer(64, 4, 4, 4, 128, dropout=0.0, batch_first=True)
network = nn.ModuleDict({{"embed": nn.Embedding(7, 64), "body": body, "head": nn.Linear(64, 7)}})
optimizer = torch.optim.Adam(network.parameters(), lr={lr})
source = torch.tensor([[1, 2, 3, 4, 0]])
given = torch.tensor([[5, 1, 2, 3, 4]])
wanted = torch.tensor([1, 2, 3, 4, 6])
mask = nn.Transformer.generate_square_subsequent_mask(5)
for step in range(30):
    embed, head = network["embed"], network["head"]
    optimizer.zero_grad()
    scores = head(body(embed(source), embed(given), tgt_mask=mask))
    F.cross_entropy(scores.view(-1, 7), wanted).backward()
    optimizer.step()
"""

RATES = [
    Situation(
        "a transformer without warm-up whose learning rate is too large",
        TRANSFORMER.format(lr=1e-2),
        exit_code=1,
        findings=["GS204"],
        says=["differed only by a factor of", "learning rate is probably too large", "use 0.001"],
    ),
    Situation("a transformer with a lower learning rate", TRANSFORMER.format(lr=1e-3)),
]

SITUATIONS = [*UNITS, *ADAPTERS, *RATES]
