"""Code that more than one check offers.

What a check shows is put together from these and from its own. A fix takes a few names of the
user's script as given, and no others: it can be pasted, and run.
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
}
"""The names that every fix may use, and what they stand for."""

LIST_FROZEN = """
# is something frozen?
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")
"""

KEEP_THE_SIZE = """
# an initialisation that keeps the signal's size
def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)

model.apply(init_weights)
"""

CLIP = """
# after loss.backward(), before optimizer.step()
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)

# or, entry by entry
torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)
"""

LOWER_LIMIT = """
# where gradients are clipped: a lower limit
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
"""

LOWER_RATE = """
# a tenth of the learning rate
for group in optimizer.param_groups:
    group["lr"] *= 0.1
"""

KEEP_SUSPICIOUS_BATCHES = """
# which batches? before the loop:
norms = []

# after loss.backward(): keep those whose gradient is far above the usual
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
if norms and norm > 10 * sorted(norms)[len(norms) // 2]:
    torch.save((inputs, targets), f"suspicious-{len(norms)}.pt")
norms.append(norm)
"""

LIVING_UNITS = """
# units that cannot die
nn.LeakyReLU(0.01)    # instead of nn.ReLU()
"""

FOR_RELU = """
def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")

model.apply(init_weights)
"""

BALANCED_ROUTING = """
# the load-balancing loss of a router: 1 where every expert gets the same load, else more
def load_balancing(logits, chosen):
    experts = logits.shape[-1]
    load = F.one_hot(chosen.reshape(-1), experts).float().mean(0)
    wanted = logits.softmax(-1).reshape(-1, experts).mean(0)
    return experts * (load * wanted).sum()

# with what the router gave out for the batch, before loss.backward():
# loss = loss + 0.01 * load_balancing(logits, chosen)

# models of transformers add it by themselves
if hasattr(model, "config"):
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = 0.01
"""
