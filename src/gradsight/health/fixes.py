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

LIST_FROZEN = """
# before the loop: list frozen parameters
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")
"""

KEEP_THE_SIZE = """
# before the loop: initialise weights so that the signal keeps its size
def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)

model.apply(init_weights)
"""

NO_SATURATION = """
# before the loop: replace activations that saturate
# (except one at the output)
last = list(model.modules())[-1]
for parent in list(model.modules()):
    for name, child in parent.named_children():
        if isinstance(child, (nn.Sigmoid, nn.Tanh)) and child is not last:
            setattr(parent, name, nn.GELU())
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

LIVING_UNITS = """
# before the loop: replace ReLU, whose units can die
for parent in list(model.modules()):
    for name, child in parent.named_children():
        if isinstance(child, nn.ReLU):
            setattr(parent, name, nn.LeakyReLU(0.01))
"""

FOR_RELU = """
# before the loop: initialise the weights for ReLU, and biases at zero
for module in model.modules():
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
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
