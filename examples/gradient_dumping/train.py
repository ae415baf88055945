"""A small language model on several ranks that dumps its gradients every two steps.

torchrun --nproc-per-node 2 examples/gradient_dumping/train.py --run_dir
/tmp/gradient_dumping_example
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradsight import GradientDumper

VOCABULARY, WIDTH, LENGTH = 256, 64, 32


class Model(nn.Module):
    """Embedding, two transformer blocks, a head: enough to have gradients of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position, all sequences one after the other."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))


def train(options: argparse.Namespace, device: torch.device) -> None:
    """A training loop like any other; the two lines about the dumper are the example."""
    torch.manual_seed(0)
    model: nn.Module = Model().to(device)
    if options.parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(
        VOCABULARY, (64, LENGTH + 1), device=device
    )  # each rank would read its own part of real data
    with GradientDumper(
        options.run_dir, step_interval=2, save_first_n=options.save_first_n
    ) as dumper:
        for step in range(options.steps):
            batch = text[torch.randint(len(text), (8,), device=device)]
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
            loss.backward()
            dumper.dump(model, step)  # after backward, before clipping, on every rank
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    """Read the arguments and join the other ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("/tmp/gradient_dumping_example"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--save_first_n", type=int, default=None, help="dump this many first rows of each gradient"
    )
    parser.add_argument("--parallel", choices=["fsdp", "ddp"], default="fsdp")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
