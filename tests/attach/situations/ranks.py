"""Several ranks."""

from attach.situations import Situation

UNUSED_PARAMETERS = """
dist.init_process_group("gloo")
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, y):
        scores = self.network(x)
        return scores, F.cross_entropy(scores, y)


model = nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for step in range(12):
    for part in range(4):
        x = torch.randn(8, 4)
        scores, loss = model(x, x[:, :3].argmax(1))
        (loss / DIVISOR).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

LANGUAGE_MODEL = """
import transformers
dist.init_process_group("gloo")
rank = dist.get_rank()
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = nn.parallel.DistributedDataParallel(transformers.LlamaForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(40):
    x = (torch.randint(60, (8, 1)) + torch.arange(24)) % 60
    optimizer.zero_grad()
    loss = model(input_ids=x, labels=x).loss
    (loss * FACTOR).backward()
    optimizer.step()
dist.destroy_process_group()
"""

OWN_AVERAGES = """
dist.init_process_group("gloo")


class DistAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        super().step()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.clone()
                dist.all_reduce(gradient)
                u, _, v = torch.linalg.svd(gradient, full_matrices=False)
                p.add_(u @ v, alpha=-group["lr"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, x):
        return self.head(self.down(self.up(self.embed(x)).relu()))

    def optimizers(self):
        rest = [*self.embed.parameters(), *self.head.parameters()]
        return [DistAdamW(rest, lr=1e-3), Muon([self.up.weight, self.down.weight], lr=0.02)]


model = Model()
optimizers = model.optimizers()
torch.manual_seed(dist.get_rank())
for step in range(30):
    for part in range(2):
        x = torch.randint(50, (8, 17))
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        (loss / 2).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
dist.destroy_process_group()
"""

SHARDED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
{inner}
fully_shard(model{options})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(20):
    x = torch.randn(32, 8)
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

WRAPPED = """
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
rule = torch.randn(20, 10)
ddp = nn.parallel.DistributedDataParallel(net)
{optimizer}
torch.manual_seed(1 + dist.get_rank())
for step in range(30):
    x = torch.randn(16, 20)
    optimizer.zero_grad()
    {backward}
    optimizer.step()
    {after}
dist.destroy_process_group()
"""
BACKWARD = "F.cross_entropy({}(x), (x @ rule).argmax(1)).backward()"
ADAM = "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)"
DIVIDED = """
class Divided(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for place, p in enumerate(self.param_groups[0]["params"]):
            update = torch.zeros_like(p)
            if place // 2 == dist.get_rank():
                update = p.grad.sign()
            {send}
            p.add_(update, alpha=-1e-3)


optimizer = Divided(net.parameters(), {{}})
"""
AVERAGED = """if step % 10 == 9:
        for p in net.parameters():
            dist.all_reduce(p.data)
            p.data /= 2"""

FREED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
for each in (model[0], model[2], model):
    fully_shard(each)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(20):
    x = torch.randn(32, 8)
    if step == 12:
        x[0, 0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for step in range(30):
    torch.manual_seed(step)
    x = torch.rand(20, 10)
    (model(x) - x[:, :5]).square().mean().backward()
    optimizer.step()
    CLEAR
dist.destroy_process_group()
"""

NO_GROUP = """
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    x = torch.randn(16, 20)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    optimizer.step()
"""

REDUNDANCY_OPTIMIZER = """
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo")
inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model = nn.parallel.DistributedDataParallel(inner)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(30):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
dist.destroy_process_group()
"""

SITUATIONS = [
    Situation(
        "two ranks whose optimizer divides its work",
        REDUNDANCY_OPTIMIZER,
        arguments=["--nproc_per_node", "2"],
        models={"model": 30},
        slow=True,
    ),
    Situation(
        "two processes that were launched together and make no group",
        NO_GROUP,
        arguments=["--nproc_per_node", "2"],
        models={"model": 30, "model-rank1": 30},
        says=["2 processes were launched together, but the script created no process group"],
        slow=True,
    ),
    Situation(
        "two ranks that share layers by tensor parallelism",
        TENSOR_PARALLEL.replace("CLEAR", "optimizer.zero_grad(set_to_none=False)"),
        arguments=["--nproc_per_node", "2"],
        reasons={"GS601": "(tensor parallelism)"},
        slow=True,
    ),
    Situation(
        "two ranks that share layers by tensor parallelism and never clear gradients",
        TENSOR_PARALLEL.replace("CLEAR", ""),
        arguments=["--nproc_per_node", "2"],
        exit_code=2,
        findings=["GS305"],
        slow=True,
    ),
    Situation(
        "two ranks whose loss is NaN when FSDP2 has freed the weights that autograd saved",
        FREED,
        arguments=["--nproc_per_node", "2"],
        exit_code=2,
        findings=["GS103"],
        models={"model": 20},
        slow=True,
    ),
    Situation(
        "two ranks whose loop calls the module inside of DistributedDataParallel",
        WRAPPED.format(optimizer=ADAM, backward=BACKWARD.format("net"), after=""),
        arguments=["--nproc_per_node", "2"],
        exit_code=2,
        findings=["GS504"],
        says=["it was never called: the loop calls the module inside it"],
        slow=True,
    ),
    Situation(
        "two ranks whose loop calls DistributedDataParallel",
        WRAPPED.format(optimizer=ADAM, backward=BACKWARD.format("ddp"), after=""),
        arguments=["--nproc_per_node", "2"],
        slow=True,
    ),
    Situation(
        "two ranks that average their weights at times, and not their gradients",
        WRAPPED.format(
            optimizer=ADAM,
            backward=f"with ddp.no_sync(): {BACKWARD.format('ddp')}",
            after=AVERAGED,
        ),
        arguments=["--nproc_per_node", "2"],
        slow=True,
    ),
    Situation(
        "two ranks that divide the optimizer's work and send each other the updates",
        WRAPPED.format(
            optimizer=DIVIDED.format(send="dist.all_reduce(update)"),
            backward=BACKWARD.format("ddp"),
            after="",
        ),
        arguments=["--nproc_per_node", "2"],
        slow=True,
    ),
    Situation(
        "two ranks that divide the optimizer's work and keep the updates to themselves",
        WRAPPED.format(
            optimizer=DIVIDED.format(send=""), backward=BACKWARD.format("ddp"), after=""
        ),
        arguments=["--nproc_per_node", "2"],
        exit_code=1,
        findings=["GS304", "GS504"],
        says=["although all ranks used the same gradient"],
        slow=True,
    ),
    Situation(
        "two ranks that share a model block by block",
        SHARDED.format(inner="fully_shard(model[0])", options=""),
        arguments=["--nproc_per_node", "2"],
        models={"model": 20},
        says=["Adam of model: made at"],
        slow=True,
    ),
    Situation(
        "two ranks that keep shared parameters whole for the backward pass",
        SHARDED.format(inner="", options=", reshard_after_forward=False"),
        arguments=["--nproc_per_node", "2"],
        models={"model": 20},
        says=["Adam of model: made at"],
        slow=True,
    ),
    Situation(
        "two optimizers that average over ranks themselves",
        OWN_AVERAGES,
        arguments=["--nproc_per_node", "2"],
        models={"model": 30},
        says=["DistAdamW of model", "Muon of model", "Clipping: 0 of 30 steps"],
        slow=True,
    ),
    Situation(
        "a rank whose loss is multiplied by zero",
        LANGUAGE_MODEL.replace("FACTOR", "(0.0 if rank == 1 else 1.0)"),
        arguments=["--nproc_per_node", "2"],
        exit_code=1,
        findings=["GS503"],
        says=["rank 1 has almost no gradient"],
        never_says=["rank 0 has"],
        slow=True,
    ),
    Situation(
        "two ranks that train a language model",
        LANGUAGE_MODEL.replace("FACTOR", "1.0"),
        arguments=["--nproc_per_node", "2"],
        slow=True,
    ),
    Situation(
        "ranks accumulate with a divisor, and look for unused parameters",
        UNUSED_PARAMETERS.replace("DIVISOR", "4"),
        arguments=["--nproc_per_node", "2"],
        models={"model": 12},
        slow=True,
    ),
    Situation(
        "ranks accumulate without a divisor, and look for unused parameters",
        UNUSED_PARAMETERS.replace("DIVISOR", "1"),
        arguments=["--nproc_per_node", "2"],
        exit_code=1,
        findings=["GS609"],
        slow=True,
    ),
]
