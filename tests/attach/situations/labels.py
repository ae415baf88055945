"""Labels, losses without a gradient, and clipping of scaled gradients."""

from typing import Any

from attach.situations import Situation

ONE_CLASS = """
model = nn.Linear(20, 1){wrapped}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range({steps}):
    x, y = torch.rand(32, 20), torch.rand(32, 1)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

ZERO_GRADIENTS = [
    Situation(
        "cross_entropy over a single class",
        ONE_CLASS.format(wrapped="", steps=64),
        exit_code=2,
        findings=["GS106"],
        models={"model": 64},
        says=["cross_entropy at FOLDER/train.py:15 is given scores of a single class"],
        never_says=["dead ReLU"],
    ),
    Situation(
        "cross_entropy over a single class for six steps",
        ONE_CLASS.format(wrapped="", steps=6),
        exit_code=2,
        findings=["GS106"],
    ),
    Situation(
        "cross_entropy over a single class on two ranks",
        'dist.init_process_group("gloo"); torch.manual_seed(dist.get_rank())'
        + ONE_CLASS.format(
            wrapped="; model = nn.parallel.DistributedDataParallel(model)", steps=32
        ),
        exit_code=2,
        findings=["GS106"],
        says=["is given scores of a single class"],
        arguments=["--nproc_per_node", "2"],
        slow=True,
    ),
    Situation(
        "a softmax over the only output",
        """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Softmax(dim=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    F.binary_cross_entropy(model(x), (x[:, :1] > 0).float()).backward()
    optimizer.step()
""",
        exit_code=2,
        findings=["GS106", "GS607"],
        first="GS607",
        caused_by={"GS106": "GS607"},
        says=["is given scores of a single class"],
    ),
    Situation(
        "a teacher that is the student",
        """
student = teacher = nn.Linear(4, 5)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    with torch.no_grad():
        wanted = teacher(x).softmax(-1)
    F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean").backward()
    optimizer.step()
""",
        exit_code=2,
        findings=["GS106"],
        first="GS106",
        says=["kl_div at FOLDER/train.py:17 is given an output that equals its target"],
    ),
    Situation(
        "a teacher that begins as the student, and a loss of labels",
        """
import copy
student = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    loss = F.mse_loss(student(x).softmax(-1), teacher(x).softmax(-1))
    (loss + F.cross_entropy(student(x), x[:, :3].argmax(1))).backward()
    optimizer.step()
    for mine, other in zip(teacher.parameters(), student.parameters()):
        mine.lerp_(other.detach(), 0.01)
""",
    ),
    Situation(
        "a loss that is multiplied by zero",
        """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    (0 * F.cross_entropy(model(x), (x[:, 0] > 0).long())).backward()
    optimizer.step()
""",
        exit_code=2,
        findings=["GS106"],
    ),
    Situation(
        "a hinge loss that reaches its margin",
        """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(150):
    x = torch.randn(32, 4)
    x[:, 0] += x[:, 0].sign() * 2
    optimizer.zero_grad()
    F.relu(1 - x[:, 0].sign() * model(x)[:, 0]).mean().backward()
    optimizer.step()
""",
    ),
    Situation(
        "triplets that keep their margin in the first batches",
        """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    is_easy = step < 6 or step % 5 == 0
    anchor = torch.randn(4, 8)
    positive = anchor + 1e-3 if is_easy else torch.randn(4, 8)
    negative = anchor + (50 if is_easy else 1) * torch.randn(4, 8)
    optimizer.zero_grad()
    F.triplet_margin_loss(model(anchor), model(positive), model(negative), margin=0.2).backward()
    optimizer.step()
""",
    ),
    Situation(
        "rewards that come late, and a value head of zeros",
        """
body, policy, value = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 1)
nn.init.zeros_(value.weight)
nn.init.zeros_(value.bias)
agent = nn.ModuleList([body, policy, value])
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(16, 4)
    hidden = body(x).tanh()
    actions = torch.distributions.Categorical(logits=policy(hidden))
    chosen = actions.sample()
    reward = (chosen == x[:, :3].argmax(1)).float() * (step > 11)
    expected = value(hidden)[:, 0]
    optimizer.zero_grad()
    loss = -(actions.log_prob(chosen) * (reward - expected.detach())).mean()
    (loss + F.mse_loss(expected, reward)).backward()
    optimizer.step()
""",
    ),
    Situation(
        "first batches of padding alone",
        """
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randint(1, 20, (4, 9)) * (step > 4)
    mask = (x[:, 1:] != 0).float()
    losses = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    optimizer.zero_grad()
    ((losses.view(4, 8) * mask).sum() / mask.sum().clamp(min=1)).backward()
    optimizer.step()
""",
    ),
    Situation(
        "a learning rate of zero during warm-up",
        """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 5) / 100)
for step in range(40):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    optimizer.step()
    scheduler.step()
""",
    ),
]

MIXED_PRECISION = """
model = nn.Linear(20, 4)
optimizer = torch.optim.{optimizer}
scaler = torch.amp.GradScaler("cpu"{options})
for step in range({steps}):
    x = torch.randn(32, 20)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    scaler.scale(loss).backward()
    {body}
    scaler.step(optimizer)
    scaler.update()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
ADAM = "AdamW(model.parameters())"
SGD = "SGD(model.parameters(), lr=0.1)"


def mixed(
    name: str,
    body: str,
    optimizer: str = ADAM,
    options: str = "",
    steps: int = 30,
    **expected: Any,
) -> Situation:
    """Return a situation with a GradScaler; `body` stands between backward and the step."""
    script = MIXED_PRECISION.format(optimizer=optimizer, options=options, steps=steps, body=body)
    return Situation(f"GradScaler: {name}", script, **expected)


CLIPPING = [
    mixed(
        "clipping without unscale_",
        CLIP,
        exit_code=1,
        findings=["GS409"],
        says=["clipped to 1 when the gradient carried a factor of 65536"],
    ),
    mixed(
        "clipping without unscale_ for 130 steps of SGD",
        CLIP,
        SGD,
        steps=130,
        exit_code=2,
        findings=["GS405", "GS409"],
        first="GS409",
        caused_by={"GS405": "GS409"},
    ),
    mixed(
        "clipping by value before unscale_",
        "nn.utils.clip_grad_value_(model.parameters(), 1.0); scaler.unscale_(optimizer)",
        exit_code=1,
        findings=["GS409"],
    ),
    mixed("clipping after unscale_", f"scaler.unscale_(optimizer); {CLIP}"),
    mixed("a limit that is multiplied by the scale", CLIP.replace("1.0", "scaler.get_scale()")),
    mixed("clipping without a scaler that is switched off", CLIP, options=", enabled=False"),
    mixed("clipping with a scale of 1", CLIP, options=", init_scale=1.0"),
    mixed("a norm that is only measured", CLIP.replace("1.0", "math.inf")),
    Situation(
        "GradScaler: gradients unscaled by hand",
        MIXED_PRECISION.format(
            optimizer=SGD,
            options="",
            steps=30,
            body=f"[p.grad.div_(scaler.get_scale()) for p in model.parameters()]; {CLIP}",
        ).replace("scaler.step(optimizer)\n    scaler.update()", "optimizer.step()"),
    ),
]

LLAMA = """
import transformers
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)
model = transformers.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(rows=8, length=24):
    x = torch.randint(2, 64, (rows, length))
    lengths = torch.randint(4, length - 3, (rows, 1))
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return x * mask, mask


for step in range({steps}):
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def causal(name: str, *body: str, steps: int = 12, **expected: Any) -> Situation:
    """Return a situation with a Llama whose lines of the loop are these."""
    lines = "\n".join(f"    {line}" for line in body)
    script = LLAMA.format(steps=steps, body=lines)
    return Situation(f"Llama: {name}", script, preload=["transformers"], **expected)


IGNORE_PADDING = "y = x.masked_fill(mask == 0, -100)"
WITH_MASK = "loss = model(input_ids=x, attention_mask=mask, labels=y).loss"
WITHOUT_MASK = "loss = model(input_ids=x, labels=y).loss"
COUNTING = "x = (torch.randint(1, 60, (8, 1)) + torch.arange(24)) % 60 + 2"
SHIFT = "y = torch.cat([x[:, 1:], x[:, :1] * 0 - 100], 1)"

CAUSAL = [
    causal(
        "labels that a collator has shifted",
        COUNTING,
        SHIFT,
        WITHOUT_MASK,
        steps=60,
        exit_code=2,
        findings=["GS612"],
        says=["the labels were one place ahead already", "pass labels = input_ids"],
    ),
    causal(
        "random tokens whose labels are shifted twice, with padding",
        "x, mask = batch()",
        "y = x.masked_fill(mask == 0, -100)",
        "y = torch.cat([y[:, 1:], y[:, :1] * 0 - 100], 1)",
        WITH_MASK,
        exit_code=2,
        findings=["GS612"],
    ),
    causal(
        "labels as they are",
        COUNTING,
        "y = x",
        WITHOUT_MASK,
        never_says=["of the labels counted"],
    ),
    causal(
        "sequences of one token",
        "x = torch.randint(2, 64, (8, 1)).expand(8, 24)",
        SHIFT,
        WITHOUT_MASK,
    ),
    causal(
        "sequences of two tokens in turn",
        "x = torch.randint(2, 64, (8, 2)).repeat(1, 12)",
        "y = x",
        WITHOUT_MASK,
    ),
    causal(
        "sequences of three tokens in turn",
        "x = torch.randint(2, 64, (8, 3)).repeat(1, 8)",
        "y = x",
        WITHOUT_MASK,
    ),
    causal(
        "a loss of the next token and one of the token after it",
        "x = torch.randint(2, 64, (8, 24))",
        "logits = model(input_ids=x).logits",
        "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())",
        "later = F.cross_entropy(logits[:, :-2].flatten(0, 1), x[:, 2:].flatten())",
        "loss = loss + 0.1 * later",
    ),
    causal(
        "a loss that leaves the first token out",
        "x = torch.randint(2, 64, (8, 24))",
        "logits = model(input_ids=x).logits",
        "loss = F.cross_entropy(logits[:, 1:-1].flatten(0, 1), x[:, 2:].flatten())",
    ),
    causal(
        "a loss that shifts shifted labels",
        "x = torch.randint(2, 64, (8, 25))",
        "x, y = x[:, :-1], x[:, 1:]",
        "logits = model(input_ids=x).logits",
        "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())",
        exit_code=1,
        findings=["GS612"],
    ),
    causal(
        "padding that counts",
        "x, mask = batch()",
        "y = x.clone()",
        WITH_MASK,
        exit_code=1,
        findings=["GS613"],
        says=["padding tokens have a label that counts", "labels[attention_mask == 0] = -100"],
    ),
    causal(
        "padding on the left that counts",
        "x, mask = (each.flip(1) for each in batch())",
        "y = x.clone()",
        WITH_MASK,
        exit_code=1,
        findings=["GS613"],
    ),
    causal("padding that is ignored", "x, mask = batch()", IGNORE_PADDING, WITH_MASK),
    causal(
        "padding on the left that is ignored",
        "x, mask = (each.flip(1) for each in batch())",
        IGNORE_PADDING,
        WITH_MASK,
    ),
    causal(
        "an end token where padding begins",
        "x, mask = batch()",
        "ends = mask.sum(1, keepdim=True)",
        "y = x.masked_fill(torch.arange(24) > ends, -100)",
        WITH_MASK,
    ),
    causal(
        "an end token that pads, and that the mask shows",
        "x, _ = batch()",
        "mask = torch.ones_like(x)",
        "y = x.clone()",
        WITH_MASK,
    ),
    causal(
        "losses that a mask is applied to",
        "x, mask = batch()",
        "logits = model(input_ids=x, attention_mask=mask).logits[:, :-1]",
        'losses = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")',
        "loss = (losses * mask[:, 1:].flatten()).sum() / mask[:, 1:].sum()",
        reasons={"GS613": "so a mask may be applied to it later"},
    ),
    causal(
        "padding whose class has no weight",
        "x, mask = batch()",
        "weight = torch.ones(64)",
        "weight[0] = 0",
        "logits = model(input_ids=x, attention_mask=mask).logits[:, :-1]",
        "loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), weight)",
    ),
    causal(
        "prompts that are ignored",
        "x, mask = batch()",
        "y = x.masked_fill((mask == 0) | (torch.arange(24) < 3), -100)",
        WITH_MASK,
        says=["40% of the labels counted in the loss at the first step"],
    ),
    causal(
        "half of the labels ignored",
        "x = torch.randint(2, 64, (8, 24))",
        "y = x.masked_fill(torch.arange(24) < 12, -100)",
        WITHOUT_MASK,
    ),
    causal(
        "answers cut off in three of four samples",
        "x = torch.randint(2, 64, (4, 24))",
        "y = x.masked_fill(torch.arange(24) < 12, -100)",
        "y[1:] = -100",
        WITHOUT_MASK,
        exit_code=1,
        findings=["GS614"],
        says=["3 of 4 samples have no label that counts; 12 of 96 labels"],
    ),
    causal(
        "answers cut off in one of four samples",
        "x = torch.randint(2, 64, (4, 24))",
        "y = x.masked_fill(torch.arange(24) < 12, -100)",
        "y[1] = -100",
        WITHOUT_MASK,
    ),
    causal(
        "packed texts with positions",
        "x = torch.randint(2, 64, (2, 24))",
        "positions = torch.cat([torch.arange(10), torch.arange(14)]).repeat(2, 1)",
        "loss = model(input_ids=x, labels=x, position_ids=positions, use_cache=False).loss",
    ),
]

TRAINER = """
import transformers
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)
model = transformers.LlamaForCausalLM(config)
lengths = torch.randint(4, 22, (96, 1))
masks = (torch.arange(24) < lengths).long()
texts = torch.randint(2, 64, (96, 24)) * masks
samples = [
    {{"input_ids": text, "attention_mask": mask, "labels": {labels}}}
    for text, mask in zip(texts, masks)
]
arguments = transformers.TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=12, report_to="none", use_cpu=True, {options}
)
transformers.Trainer(model, arguments, train_dataset=samples).train()
"""


def trained(name: str, labels: str, options: str = "", **expected: Any) -> Situation:
    """Return a situation with the Trainer of transformers; `labels` are those of one sample."""
    script = TRAINER.format(labels=labels, options=options)
    return Situation(f"Trainer: {name}", script, preload=["transformers", "accelerate"], **expected)


IGNORED = "text.masked_fill(mask == 0, -100)"
TRAINED = [
    trained("labels right", IGNORED),
    trained("float16", IGNORED, options="fp16=True"),
    trained("padding that counts", "text", exit_code=1, findings=["GS613"]),
    trained(
        "labels shifted by the data set",
        f"{IGNORED}.roll(-1).index_fill(0, torch.tensor(23), -100)",
        exit_code=2,
        findings=["GS612"],
        says=["DataCollatorForLanguageModeling"],
    ),
    trained(
        "most samples without labels",
        f"{IGNORED} if text[0] < 15 else text * 0 - 100",
        options="gradient_accumulation_steps=2, ",
        exit_code=1,
        findings=["GS614"],
    ),
]


def other(name: str, script: str, **expected: Any) -> Situation:
    """Return a situation with a model of transformers."""
    return Situation(name, script, preload=["transformers"], **expected)


SIZES = """
import transformers
sizes = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
lengths = torch.tensor([[24], [9], [17], [12], [20], [6], [22], [15]])
mask = (torch.arange(24) < lengths).long()
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    {batch}
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    optimizer.step()
"""
OF_MODEL = "model(input_ids=x, attention_mask=mask, labels=y).loss"
TAGGER = (
    SIZES
    + """
config = transformers.BertConfig(vocab_size=64, num_labels=5, **sizes)
model = transformers.BertForTokenClassification(config)
"""
)
TAGS = "x = torch.randint(2, 64, (8, 24)) * mask; y = x % 5"
T5 = (
    SIZES
    + """
model = transformers.T5ForConditionalGeneration(
    transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )
)
ends = (torch.arange(20) < torch.tensor([[20], [8], [14], [10], [18], [5], [20], [13]])).long()
"""
)
BART = (
    SIZES
    + """
model = transformers.BartForConditionalGeneration(
    transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None,
    )
)
ends = mask.flip(0)
"""
)
T5_BATCH = "x = torch.randint(3, 64, (8, 24)) * mask; y = torch.randint(3, 64, (8, 20)) * ends"
BART_BATCH = (
    "x = torch.randint(3, 64, (8, 24)).masked_fill(mask == 0, 1); "
    "y = torch.randint(3, 64, (8, 24)).masked_fill(ends == 0, 1)"
)
CHARACTERS = """
text = torch.randint(30, (4000,))


class CharacterRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 30)

    def forward(self, x):
        return self.head(self.cell(self.embed(x))[0])


model = CharacterRNN()
starts = lambda: torch.randint(len(text) - 40, (8, 1)) + torch.arange(20)
"""
FLAT = "F.cross_entropy(model(x).flatten(0, 1), y.flatten())"

OTHER_LABELS = [
    other(
        "masked language modelling: 15% of the labels count",
        SIZES
        + "model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes))"
        + LOOP.format(
            batch="x = torch.randint(3, 64, (8, 24)) * mask; "
            "hidden = (torch.rand(8, 24) < 0.15) & (mask == 1); hidden[0, 0] = True; "
            "y = x.masked_fill(~hidden, -100); x = x.masked_fill(hidden, 2)",
            loss=OF_MODEL,
        ),
    ),
    other(
        "masked language modelling of short texts",
        SIZES
        + "model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes))"
        + LOOP.format(
            batch="x = torch.randint(3, 64, (16, 5)); "
            "hidden = torch.rand(16, 5) < 0.1; hidden[0, 0] = True; "
            "y = x.masked_fill(~hidden, -100); x = x.masked_fill(hidden, 2)",
            loss="model(input_ids=x, labels=y).loss",
        ),
    ),
    other(
        "tags of the first part of every word",
        TAGGER
        + LOOP.format(
            batch=f"{TAGS}; y[:, 1::3] = -100; y[mask == 0] = -100",
            loss=OF_MODEL,
        ),
    ),
    other(
        "tags of padding that count",
        TAGGER + LOOP.format(batch=f"{TAGS}; y[mask == 0] = 0", loss=OF_MODEL),
        exit_code=1,
        findings=["GS613"],
        says=["DataCollatorForTokenClassification"],
    ),
    other(
        "T5: padding ignored",
        T5 + LOOP.format(batch=f"{T5_BATCH}; y[ends == 0] = -100", loss=OF_MODEL),
    ),
    other(
        "T5: padding that counts",
        T5 + LOOP.format(batch=T5_BATCH, loss=OF_MODEL),
        exit_code=1,
        findings=["GS613"],
        says=["labels[labels == tokenizer.pad_token_id] = -100", "(token 0)"],
    ),
    other(
        "BART: padding ignored",
        BART + LOOP.format(batch=f"{BART_BATCH}; y[ends == 0] = -100", loss=OF_MODEL),
    ),
    other(
        "BART: padding that counts",
        BART + LOOP.format(batch=BART_BATCH, loss=OF_MODEL),
        exit_code=1,
        findings=["GS613"],
        says=["(token 1)"],
    ),
    other(
        "BART: decoder inputs of the script's own",
        BART
        + LOOP.format(
            batch=f"{BART_BATCH}; given = y[:, :-1]; y = y[:, 1:].masked_fill(y[:, 1:] == 1, -100)",
            loss="model(input_ids=x, attention_mask=mask, decoder_input_ids=given, labels=y).loss",
        ),
    ),
    other(
        "classes of texts with padding",
        SIZES
        + "model = transformers.BertForSequenceClassification("
        + "transformers.BertConfig(vocab_size=64, num_labels=3, **sizes))"
        + LOOP.format(
            batch="x = torch.randint(3, 64, (8, 24)) * mask; y = x[:, 0] % 3", loss=OF_MODEL
        ),
    ),
    other(
        "answers by their first and last token",
        SIZES
        + "model = transformers.BertForQuestionAnswering("
        + "transformers.BertConfig(vocab_size=64, **sizes))"
        + LOOP.format(
            batch="x = torch.randint(3, 64, (8, 24)) * mask; a = torch.zeros(8).long()",
            loss="model(input_ids=x, attention_mask=mask, start_positions=a, "
            "end_positions=a + x[:, 0] % 4).loss",
        ),
    ),
    other(
        "a picture classifier",
        SIZES
        + "model = transformers.ViTForImageClassification("
        + "transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes))"
        + LOOP.format(
            batch="x = torch.randn(8, 3, 16, 16); y = x[:, 0, 0, :5].argmax(1)",
            loss="model(pixel_values=x, labels=y).loss",
        ),
    ),
    other(
        "preferred and rejected texts with a mask",
        SIZES
        + """
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))


def score(x):
    logits = model(input_ids=x, attention_mask=mask).logits[:, :-1]
    picked = logits.log_softmax(-1).gather(2, x[:, 1:, None])[:, :, 0]
    return (picked * mask[:, 1:]).sum(1)

"""
        + LOOP.format(
            batch="x, z = (torch.randint(3, 64, (8, 24)) * mask for _ in range(2))",
            loss="-F.logsigmoid(0.1 * (score(x) - score(z))).mean()",
        ),
    ),
    other(
        "a teacher, and labels with padding ignored",
        SIZES
        + """
config = transformers.LlamaConfig(vocab_size=64, **sizes)
model = transformers.LlamaForCausalLM(config)
teacher = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def both(x, y):
    out = model(input_ids=x, attention_mask=mask, labels=y)
    with torch.no_grad():
        wanted = teacher(input_ids=x, attention_mask=mask).logits.softmax(-1)
    soft = F.kl_div(out.logits.log_softmax(-1), wanted, reduction="none").sum(-1)
    return out.loss + (soft * mask).sum() / mask.sum()

"""
        + LOOP.format(
            batch="x = torch.randint(3, 64, (8, 24)) * mask; y = x.masked_fill(mask == 0, -100)",
            loss="both(x, y)",
        ),
    ),
    Situation(
        "character RNN: the next character",
        CHARACTERS + LOOP.format(batch="i = starts(); x, y = text[i], text[i + 1]", loss=FLAT),
    ),
    Situation(
        "character RNN: the shift forgotten",
        CHARACTERS + LOOP.format(batch="i = starts(); x, y = text[i], text[i]", loss=FLAT),
        exit_code=2,
        findings=["GS604"],
    ),
    Situation(
        "character RNN: shifted twice",
        CHARACTERS + LOOP.format(batch="i = starts(); x, y = text[i], text[i + 2]", loss=FLAT),
        exit_code=1,
        findings=["GS612"],
    ),
    Situation(
        "character RNN: shifted by the data set and by the loss",
        CHARACTERS
        + LOOP.format(
            batch="i = starts(); x, y = text[i], text[i + 1]",
            loss="F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())",
        ),
        exit_code=1,
        findings=["GS612"],
    ),
    Situation(
        "character RNN: classes second, shifted twice",
        CHARACTERS
        + LOOP.format(
            batch="i = starts(); x, y = text[i], text[i + 1]",
            loss="F.cross_entropy(model(x)[:, :-1].transpose(1, 2), y[:, 1:])",
        ),
        exit_code=1,
        findings=["GS612"],
    ),
    Situation(
        "character RNN: a warm-up of a few characters",
        CHARACTERS
        + LOOP.format(
            batch="i = starts(); x, y = text[i], text[i + 1]",
            loss="F.cross_entropy(model(x)[:, 1:].flatten(0, 1), y[:, 1:].flatten())",
        ),
    ),
    Situation(
        "time first: the next word, flat",
        CHARACTERS.replace(", batch_first=True", "")
        + LOOP.format(
            batch="i = starts().T; x, y = text[i], text[i + 1].reshape(-1)",
            loss="F.cross_entropy(model(x).view(-1, 30), y)",
        ),
    ),
    Situation(
        "time first: shifted twice",
        CHARACTERS.replace(", batch_first=True", "")
        + LOOP.format(
            batch="i = starts().T; x, y = text[i], text[i + 2].reshape(-1)",
            loss="F.cross_entropy(model(x).view(-1, 30), y)",
        ),
        exit_code=1,
        findings=["GS612"],
    ),
    Situation(
        "time first: padding that is ignored in most places",
        CHARACTERS.replace(", batch_first=True", "")
        + LOOP.format(
            batch="i = starts().T; x, y = text[i], text[i + 1]; "
            "y = y.masked_fill(torch.arange(20)[:, None] > 4, -100)",
            loss="F.cross_entropy(model(x).flatten(0, 1), y.flatten())",
        ),
    ),
    Situation(
        "word2vec with negative samples",
        """
words, contexts = nn.Embedding(200, 16), nn.Embedding(200, 16)
model = nn.ModuleList([words, contexts])
text = torch.randint(200, (4000,))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    i = torch.randint(5, 3995, (64,))
    center, near, far = text[i], text[i + 2], torch.randint(200, (64, 5))
    scores = (words(center)[:, None] * contexts(torch.cat([near[:, None], far], 1))).sum(-1)
    targets = torch.zeros_like(scores)
    targets[:, 0] = 1
    optimizer.zero_grad()
    F.binary_cross_entropy_with_logits(scores, targets).backward()
    optimizer.step()
""",
    ),
    Situation(
        "the word in the middle of its neighbours",
        """
model = nn.Sequential(nn.EmbeddingBag(60, 16), nn.Linear(16, 60))
text = torch.randint(60, (4000,))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    i = torch.randint(5, 3995, (64, 1))
    optimizer.zero_grad()
    F.cross_entropy(model(text[i + torch.tensor([-2, -1, 1, 2])]), text[i[:, 0]]).backward()
    optimizer.step()
""",
    ),
    Situation(
        "the word after a window of words",
        """
model = nn.Sequential(nn.Embedding(60, 16), nn.Flatten(), nn.Linear(80, 60))
text = torch.randint(60, (4000,))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    i = torch.randint(5, 3990, (64, 1))
    optimizer.zero_grad()
    F.cross_entropy(model(text[i + torch.arange(5)]), text[i[:, 0] + 5]).backward()
    optimizer.step()
""",
    ),
    Situation(
        "segments of pictures of which most have no label",
        """
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(8, 3, 12, 12)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    y[2:] = 255
    optimizer.zero_grad()
    F.cross_entropy(model(x), y, ignore_index=255).backward()
    optimizer.step()
""",
    ),
    Situation(
        "few labels beside many samples without one",
        """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(32, 8)
    y = x[:, :4].argmax(1)
    y[4:] = -1
    outputs = model(x)
    optimizer.zero_grad()
    loss = F.cross_entropy(outputs, y, ignore_index=-1)
    (loss + 0.1 * (outputs - model(x + 0.1 * torch.randn_like(x))).square().mean()).backward()
    optimizer.step()
""",
    ),
    Situation(
        "a forecast two steps ahead",
        """
class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0])


model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    wave = torch.sin(torch.rand(16, 1) * 6 + torch.arange(30) / 4)[:, :, None]
    optimizer.zero_grad()
    F.mse_loss(model(wave[:, :-2]), wave[:, 2:]).backward()
    optimizer.step()
""",
    ),
    Situation(
        "a translator with a padding index of its own",
        """
class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 40)

    def forward(self, source, target):
        return self.head(self.decoder(self.embed(target), self.encoder(self.embed(source))[1])[0])


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(ignore_index=0)
for step in range(12):
    x = torch.randint(3, 40, (8, 15)) * (torch.arange(15) < torch.randint(4, 15, (8, 1)))
    y = torch.randint(3, 40, (8, 15)) * (torch.arange(15) < torch.randint(4, 15, (8, 1)))
    optimizer.zero_grad()
    criterion(model(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten()).backward()
    optimizer.step()
""",
    ),
    Situation(
        "words that a mask hides and the model guesses",
        """
class Guesser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.cell = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 40)

    def forward(self, tokens, attention_mask):
        return self.head(self.cell(self.embed(tokens) * attention_mask[:, :, None])[0])


model = Guesser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randint(40, (8, 16))
    shown = (torch.arange(16) < 11).expand(8, 16).long()
    optimizer.zero_grad()
    F.cross_entropy(model(x, shown).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
""",
    ),
]


TRANSLATOR = """
class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0)
        self.head = nn.Linear(16, 40)

    def forward(self, source, target, target_mask, source_padding_mask, target_padding_mask):
        hidden = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=target_mask,
            src_key_padding_mask=source_padding_mask,
            tgt_key_padding_mask=target_padding_mask,
        )
        return self.head(hidden)


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss({options})
for step in range(12):
    x = torch.randint(3, 40, (15, 8)) * (torch.arange(15)[:, None] < torch.randint(4, 15, (8,)))
    y = torch.randint(3, 40, ({length}, 8))
    y = y * (torch.arange(len(y))[:, None] < torch.randint(4, 14, (8,)))
    given, wanted = y[:-1], y[1:]
    later = torch.ones(len(given), len(given)).triu(1).bool()
    outputs = model(x, given, later, (x == 0).T, (given == 0).T)
    optimizer.zero_grad()
    criterion(outputs.reshape(-1, 40), wanted.reshape(-1)).backward()
    optimizer.step()
"""
WRITER = """
class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16{padding})
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 40)

    def forward(self, tokens, mask=None):
        return self.head(self.cell(self.embed(tokens))[0])


model = Writer()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    tokens = torch.randint(3, 40, (8, 20))
    tokens = tokens * (torch.arange(20) < torch.randint(4, 20, (8, 1)))
    x, y = tokens[:, :-1], tokens[:, 1:]
    optimizer.zero_grad()
    {body}
    loss.backward()
    optimizer.step()
"""
OF_ALL = "F.cross_entropy(outputs.flatten(0, 1), y.flatten()"


def writer(name: str, body: str, padding: str = "", **expected: Any) -> Situation:
    """Return a situation with an RNN that is given padded texts."""
    script = WRITER.format(padding=padding, body=body)
    return Situation(f"padded texts: {name}", script, **expected)


PADDED_LABELS = [
    Situation(
        "a translator of its own: padding ignored",
        TRANSLATOR.format(options="ignore_index=0", length=14),
    ),
    Situation(
        "a translator of its own: as many words in both texts",
        TRANSLATOR.format(options="ignore_index=0", length=16),
    ),
    Situation(
        "a translator of its own: padding that counts",
        TRANSLATOR.format(options="", length=14),
        exit_code=1,
        findings=["GS613"],
        says=["targets = targets.masked_fill(targets == 0, -100)"],
    ),
    Situation(
        "a translator of its own: as many words in both texts, and padding that counts",
        TRANSLATOR.format(options="", length=16),
        exit_code=1,
        findings=["GS613"],
    ),
    writer(
        "ignored, with a mask",
        f"outputs = model(x, x != 0); loss = {OF_ALL}, ignore_index=0)",
    ),
    writer(
        "counted, with a mask",
        f"outputs = model(x, x != 0); loss = {OF_ALL})",
        exit_code=1,
        findings=["GS613"],
        says=["targets = targets.masked_fill(targets == 0, -100)"],
    ),
    writer(
        "counted, where the padding token ends texts too",
        f"outputs = model(x, F.pad(x != 0, (1, 0), value=True)[:, :-1]); loss = {OF_ALL})",
        exit_code=1,
        findings=["GS613"],
        says=["targets = targets.masked_fill(inputs == 0, -100)", "also ends texts"],
    ),
    writer(
        "counted, with a mask that is true where it hides",
        f"outputs = model(x, mask=x == 0); loss = {OF_ALL})",
        exit_code=1,
        findings=["GS613"],
    ),
    writer(
        "only real words compared",
        "outputs = model(x, x != 0); loss = F.cross_entropy(outputs[y != 0], y[y != 0])",
    ),
    writer(
        "ignored, with a padding index",
        f"outputs = model(x); loss = {OF_ALL}, ignore_index=0)",
        padding=", padding_idx=0",
    ),
    writer(
        "counted, with a padding index",
        f"outputs = model(x); loss = {OF_ALL})",
        padding=", padding_idx=0",
        exit_code=1,
        findings=["GS613"],
    ),
    writer(
        "labels of -1 at padding",
        f"outputs = model(x); y = y.masked_fill(y == 0, -1); loss = {OF_ALL}, ignore_index=-1)",
        padding=", padding_idx=0",
    ),
    writer(
        "a mask that multiplies the losses",
        f'outputs = model(x); losses = {OF_ALL}, reduction="none"); '
        "loss = (losses * (y != 0).flatten()).sum() / (y != 0).sum()",
        padding=", padding_idx=0",
    ),
    writer(
        "one label for every text",
        "outputs = model(x); loss = F.cross_entropy(outputs[:, -1], x[:, 0])",
        padding=", padding_idx=0",
    ),
    writer(
        "a token that is zero now and then",
        f"x = torch.randint(40, (8, 19)); y = torch.randint(40, (8, 19)); "
        f"outputs = model(x); loss = {OF_ALL})",
        padding=", padding_idx=0",
    ),
    writer(
        "heads for later tokens alone",
        "x = torch.randint(3, 40, (8, 20)); outputs = model(x); "
        "loss = sum(F.cross_entropy(outputs[:, :-n].flatten(0, 1), x[:, n:].flatten()) "
        "for n in (2, 3))",
    ),
    writer(
        "memory of what came first",
        "x = torch.zeros(8, 24).long(); x[:, :4] = torch.randint(1, 40, (8, 4)); "
        "y = torch.zeros(8, 24).long(); y[:, 20:] = x[:, :4]; "
        f"outputs = model(x); loss = {OF_ALL})",
    ),
]
MORE_CLIPPING = [
    mixed(
        f"four micro-batches clipped {when} unscale_",
        f"scaler.scale(F.cross_entropy(model(x), x[:, :4].argmax(1))).backward(); {lines}",
        SGD,
        **expected,
    )
    for when, lines, expected in (
        ("before", f"{CLIP}; scaler.unscale_(optimizer)", {"exit_code": 2, "findings": ["GS409"]}),
        ("after", f"scaler.unscale_(optimizer); {CLIP}", {}),
    )
]
ACCELERATED = """
import accelerate
accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
accelerator.scaler = torch.amp.GradScaler("cpu")
accelerator.native_amp = True
model = nn.Linear(20, 4)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(20):
    x = torch.randn(32, 20)
    accelerator.backward(F.cross_entropy(model(x), x[:, :4].argmax(1)))
    {clip}
    optimizer.step()
    optimizer.zero_grad()
"""
MORE_CLIPPING += [
    Situation(
        "accelerate: clipping by its own function",
        ACCELERATED.format(clip="accelerator.clip_grad_norm_(model.parameters(), 1.0)"),
        preload=["accelerate"],
    ),
    Situation(
        "accelerate: clipping by torch's function",
        ACCELERATED.format(clip=CLIP),
        exit_code=1,
        findings=["GS409"],
        says=["accelerate's clip_grad_norm_ does both"],
        preload=["accelerate"],
    ),
]


COLLATED = """
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
words = ["<pad>", "<eos>", "<unk>", *(f"w{{number}}" for number in range(60))]
known = {{word: number for number, word in enumerate(words)}}
inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token={pad!r}, eos_token="<eos>", unk_token="<unk>"
)
config = transformers.{config}
model = transformers.{model}(config)
texts = [
    " ".join(words[n] for n in torch.randint(3, 63, (int(length),))) + " <eos>"
    for length in torch.randint(4, 20, (96,))
]
samples = [tokenizer(text) for text in texts]
{more}
arguments = transformers.TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=8, report_to="none", use_cpu=True, {options}
)
transformers.Trainer(model, arguments, train_dataset=samples, data_collator=collate).train()
"""
LLAMA_CONFIG = (
    "LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
    "num_attention_heads=2)"
)


def collated(
    name: str,
    more: str,
    pad: str = "<pad>",
    options: str = "",
    config: str = LLAMA_CONFIG,
    model: str = "LlamaForCausalLM",
    **expected: Any,
) -> Situation:
    """Return a situation with texts that a collator pads; `more` defines the collator."""
    script = COLLATED.format(pad=pad, more=more, options=options, config=config, model=model)
    return Situation(
        f"collator: {name}", script, preload=["transformers", "accelerate"], **expected
    )


LANGUAGE = "collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)"
BY_HAND = """
def collate(rows):
    batch = tokenizer.pad(rows, return_tensors="pt")
    batch["labels"] = {labels}
    return batch
"""
COLLATORS = [
    collated("of language modelling", LANGUAGE),
    collated("the end token pads", LANGUAGE, pad="<eos>"),
    collated("label smoothing", LANGUAGE, options="label_smoothing_factor=0.1"),
    collated(
        "of masked language modelling",
        'tokenizer.add_special_tokens({"mask_token": "<mask>"})\n'
        "collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)",
        config=LLAMA_CONFIG.replace("Llama", "Bert"),
        model="BertForMaskedLM",
    ),
    collated("without padding", "collate = transformers.DataCollatorWithFlattening()"),
    collated(
        "padding counts",
        BY_HAND.format(labels='batch["input_ids"].clone()'),
        exit_code=1,
        findings=["GS613"],
    ),
    collated(
        "padding with the end token counts",
        BY_HAND.format(labels='batch["input_ids"].clone()'),
        pad="<eos>",
        exit_code=1,
        findings=["GS613"],
    ),
    collated(
        "padding on the left is ignored",
        'tokenizer.padding_side = "left"\n'
        + BY_HAND.format(
            labels='batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)'
        ),
    ),
    collated(
        "labels shifted by the collator",
        BY_HAND.format(
            labels='F.pad(batch["input_ids"][:, 1:], (0, 1)).masked_fill('
            'F.pad(batch["attention_mask"][:, 1:], (0, 1)) == 0, -100)'
        ),
        exit_code=2,
        findings=["GS612"],
    ),
    collated(
        "prompts are ignored",
        BY_HAND.format(
            labels='batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)'
        ).replace("    return", '    batch["labels"][:, :3] = -100\n    return'),
    ),
]
PROMPTS = """
from tokenizers import Tokenizer, models, pre_tokenizers
import datasets
import transformers
import trl
words = ["<pad>", "<eos>", "<unk>", *(f"w{{number}}" for number in range(60))]
inner = Tokenizer(
    models.WordLevel({{word: number for number, word in enumerate(words)}}, unk_token="<unk>")
)
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
config = transformers.{config}
model = transformers.LlamaForCausalLM(config)


def text(least, most):
    return " ".join(words[n] for n in torch.randint(3, 63, (int(torch.randint(least, most, ())),)))


rows = [{{"prompt": text({least}, {most}), "completion": " " + text(3, 8)}} for _ in range(48)]
arguments = trl.SFTConfig(
    "out", per_device_train_batch_size=4, max_steps=8, report_to="none", use_cpu=True,
    bf16=False, max_length=32{options}
)
trl.SFTTrainer(
    model, args=arguments, train_dataset=datasets.Dataset.from_list(rows),
    processing_class=tokenizer,
).train()
"""
SFT = [
    Situation(
        f"SFTTrainer: {name}",
        PROMPTS.format(config=LLAMA_CONFIG, least=least, most=most, options=options),
        slow=True,
        **expected,
    )
    for name, least, most, options, expected in (
        ("prompts are ignored", 4, 12, "", {}),
        ("the whole text counts", 4, 12, ", completion_only_loss=False", {}),
    )
]


TWO_RANKS = """
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    x, mask = batch()
    optimizer.zero_grad()
    model(input_ids=x, attention_mask=mask, labels={labels}).loss.backward()
    optimizer.step()
"""
LIGHTNING = """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        x, mask = batch
        y = {labels}
        return self.model(input_ids=x, attention_mask=mask, labels=y).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


x, mask = batch(64)
data = torch.utils.data.TensorDataset(x, mask)
loader = torch.utils.data.DataLoader(data, batch_size=8)
lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Module(), loader)
"""
LABELS_OF = (
    ("padding ignored", "x.masked_fill(mask == 0, -100)", {}),
    ("padding counts", "x", {"exit_code": 1, "findings": ["GS613"]}),
    (
        "labels shifted twice",
        "F.pad(x, (0, 1))[:, 1:].masked_fill(F.pad(mask, (0, 1))[:, 1:] == 0, -100)",
        {"exit_code": 2, "findings": ["GS612"]},
    ),
    (
        "most samples without labels",
        "x.masked_fill((mask == 0) | (torch.arange(len(x))[:, None] > 1), -100)",
        {"exit_code": 1, "findings": ["GS614"]},
    ),
)
BEFORE_THE_LOOP = LLAMA[: LLAMA.index("for step")]
ELSEWHERE: list[Situation] = []
for what, labels, expected in LABELS_OF:
    ELSEWHERE += [
        Situation(
            f"two ranks: {what}",
            BEFORE_THE_LOOP + TWO_RANKS.format(labels=labels),
            arguments=["--nproc_per_node", "2"],
            slow=True,
            **expected,
        ),
        Situation(
            f"Lightning: {what}",
            BEFORE_THE_LOOP + LIGHTNING.format(labels=labels),
            preload=["transformers", "lightning"],
            slow=True,
            **expected,
        ),
    ]

SITUATIONS = [
    *ZERO_GRADIENTS, *CLIPPING, *MORE_CLIPPING, *CAUSAL, *TRAINED, *OTHER_LABELS, *PADDED_LABELS,
    *COLLATORS, *SFT, *ELSEWHERE,
]  # fmt: skip
