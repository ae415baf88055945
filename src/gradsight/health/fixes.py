"""Code that more than one check offers.

What a check shows is put together from these and from its own.
"""

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
