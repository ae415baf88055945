"""Fix code that more than one check offers.

A fix is put together from sections. Each begins with a comment that says where to paste it: before
the loop, in the model, at a place in the loop, or instead of some lines. A section uses only the
names of `GIVEN` and those that an earlier section of the same fix defines.
"""

GIVEN = {
    "torch": "the package",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "model": "the model that is trained",
    "optimizer": "its optimizer",
    "loader": "the data loader, whose batches are (inputs, targets)",
    "inputs": "of the batch",
    "targets": "of the batch",
    "loss_fn": "the loss of the model's output and the targets",
    "loss": "the loss of the batch, before backward()",
    "scaler": "the GradScaler, where there is one",
}
"""The names that every fix may use, and what they stand for."""

DROP_SAMPLES = """
# in the loop, before the forward pass: leave out non-finite samples
# (skip the batch if none is left: the mean over no samples is NaN)
finite = torch.isfinite(inputs).reshape(len(inputs), -1).all(dim=1)
finite &= torch.isfinite(targets).reshape(len(targets), -1).all(dim=1)
inputs, targets = inputs[finite], targets[finite]
"""

STABLE_CLASSES = """
# in the loop, instead of the forward pass: a stable classification loss
# (if your loss takes the logarithm of a softmax; for a sigmoid, use
# F.binary_cross_entropy_with_logits; the model must return logits;
# label_smoothing is optional and changes the loss a little)
loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
"""

SAFE_LOG = """
# in a loss of your own: a logarithm that is finite at 0 and below
def safe_log(x, eps=1e-8):
    return torch.log(x.clamp_min(eps))
"""

SAFE_EXP = """
# in the model or the loss: an exponential that stays finite
def safe_exp(x):
    return torch.exp(x.clamp(max=50))
"""

OWN_PART_OF_DATA = """
# before the loop: a random part of the data for each rank
# (keep your other DataLoader arguments, but drop shuffle: the sampler
# shuffles; call sampler.set_epoch(epoch) at the start of each epoch)
sampler = torch.utils.data.DistributedSampler(loader.dataset)
loader = torch.utils.data.DataLoader(
    loader.dataset, loader.batch_size, sampler=sampler
)
"""

LIST_FROZEN = """
# before the loop: list frozen parameters
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")
"""

KEEP_THE_SIZE = """
# before the loop: initialise weights so that the signal keeps its size
# (only if you train from scratch: this overwrites the weights)
def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)

model.apply(init_weights)
"""

NEW_LAST_LAYER = """
# before the loop: start with logits near zero
# (only if the last layer is new: this overwrites its weights)
layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
for last in layers[-1:]:
    nn.init.normal_(last.weight, std=0.02)
"""

NO_SATURATION = """
# before the loop: replace activations that saturate
# (except the last of a Sequential: it may be a gate or the output)
for parent in model.modules():
    if isinstance(parent, nn.Sequential):
        for place, child in list(enumerate(parent))[:-1]:
            if isinstance(child, (nn.Sigmoid, nn.Tanh)):
                parent[place] = nn.GELU()
"""

CLIP = """
# in the loop, after loss.backward(): limit the norm of the gradient
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
# or limit each entry:
# torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)
"""

LOWER_LIMIT = """
# in the loop, instead of the line that clips: a lower limit
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
"""

LOWER_RATE = """
# before the loop, and before a scheduler is made: a tenth of the rate
for group in optimizer.param_groups:
    group["lr"] *= 0.1
"""

WARM_UP = """
# before the loop: reach it within 100 steps
schedulers = torch.optim.lr_scheduler
warm_up = schedulers.LinearLR(optimizer, 0.01, total_iters=100)

# in the loop, after optimizer.step(): the next learning rate
warm_up.step()
"""

HIGHER_RATE = """
# before the loop, and before a scheduler is made: an ordinary rate
for group in optimizer.param_groups:
    group["lr"] = 1e-3
"""

WEAKER_DECAY = """
# before the loop: weaker decay
for group in optimizer.param_groups:
    group["weight_decay"] = min(group["weight_decay"], 0.01)
"""

LIVING_UNITS = """
# before the loop: replace ReLU, whose units can die
for parent in list(model.modules()):
    for name, child in parent.named_children():
        if isinstance(child, nn.ReLU):
            setattr(parent, name, nn.LeakyReLU(0.01))
# where your model calls F.relu(x), call F.leaky_relu(x) instead
"""

PRINT_DEAD_UNITS = """
# in the loop, after loss.backward(): count rows without a gradient
for name, parameter in model.named_parameters():
    if parameter.grad is not None and parameter.dim() > 1:
        dead = (parameter.grad.flatten(1) == 0).all(dim=1)
        print(name, f"{int(dead.sum())} of {len(dead)} rows")
"""

ADD_MISSING = """
# before the loop, and before a scheduler is made: add what is missing
groups = optimizer.param_groups
held = {id(each) for group in groups for each in group["params"]}
learning = [each for each in model.parameters() if each.requires_grad]
missing = [each for each in learning if id(each) not in held]
optimizer.add_param_group({"params": missing})
"""

START_ADAPTERS = """
# before the loop: initialise one factor of each LoRA adapter
for name, parameter in model.named_parameters():
    if "lora_A" in name and not parameter.any():
        nn.init.kaiming_uniform_(parameter, a=5**0.5)
"""

LIST_ADAPTERS = """
# before the loop: list adapters that are frozen or zero
for name, parameter in model.named_parameters():
    if "lora_" in name:
        state = "trained" if parameter.requires_grad else "frozen"
        print(name, state, "" if parameter.any() else "all zeros")
"""

NO_ZERO_WEIGHTS = """
# before the loop: initialise linear layers that contain only zeros
# (except those that start at zero on purpose, as half of an adapter does)
for name, module in model.named_modules():
    if isinstance(module, nn.Linear) and "lora" not in name.lower():
        if not module.weight.any():
            module.reset_parameters()
"""

BFLOAT16 = """
# before the loop: keep the weights in float32
model.float()

# in the loop, instead of the forward pass: use bfloat16
# (it has the range of float32)
with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
    loss = loss_fn(model(inputs), targets)
"""

NEW_BATCHES = """
# instead of the loop: take the next batch each time
# (next(iter(loader)) is always the first batch)
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
"""

BALANCED_ROUTING = """
# before the loop: add noise to the logits of the routers
# (so that every expert is tried)
routed = {}
def add_noise(module, args, logits):
    if not isinstance(logits, torch.Tensor):
        return None
    if module.training:
        logits = logits + logits.detach().std() * torch.randn_like(logits)
    routed[module] = logits
    return logits

# transformers has a load-balancing loss
if hasattr(model, "router_aux_loss_coef"):
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.01
else:
    for name, module in model.named_modules():
        if name.endswith(("router", "gate")):
            module.register_forward_hook(add_noise)

# in the loop, before loss.backward(): a load-balancing loss
for logits in routed.values():
    probabilities = logits.softmax(-1).flatten(0, -2)
    experts = probabilities.shape[-1]
    load = F.one_hot(probabilities.argmax(-1), experts).float().mean(0)
    loss = loss + 0.01 * experts * (load * probabilities.mean(0)).sum()
"""

FROM_SCRATCH = (KEEP_THE_SIZE, NEW_LAST_LAYER)
"""Sections that overwrite weights, and so would destroy a pretrained model."""

_WIDTH = 74


def folded(call: str) -> str:
    """Return a call as one line of code, or wrapped over three lines if it is too wide."""
    if len(call) <= _WIDTH:
        return call
    return call.replace("(", "(\n    ", 1).removesuffix(")") + "\n)"
