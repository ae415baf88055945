"""What the scores of the ghost engine cost: training steps with and without them, in turn, in the
same process.

The reference is plain training on the same tokens: the training rows and the validation rows in one
batch. Every arm takes its turn in each round. A step is timed in parts (forward and backward of
each block, the engine's own parts), which are added up twice: the best time of each, for what the
step costs where nobody else uses the machine, and the median of each, for what it costs on this
one. The A/A ratio (plain training against itself) says how far to trust the rest. Memory is the
exact peak of live tensor bytes above what was there before the step.

    python benchmarks/ghost.py [--rounds 12] [--threads 2] [--width 384] [--clock cpu]
                               [--only scores] [--quick]
"""

import argparse
import ctypes
import random
import time
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gradsight import GhostEngine
from gradsight.ghost.pass_choice import is_bargain
from gradsight.ghost.routes import choose

Step = Callable[[], object]
Parts = list[float]
Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A language model with learned positions; the head is tied unless that is in a comparison's
    way.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int, blocks: int, tied: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.embed(ids) + self.positions(positions))))


def token_loss(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def class_loss(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class PeakBytes(TorchDispatchMode):
    """The peak of the bytes of all storages that operations make while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, identity: int, size: int) -> None:
        self._seen.discard(identity)
        self.now -= size


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter
marks: Parts = []


def mark() -> None:
    """A part of a step ends here."""
    marks.append(clock())


def mark_blocks(model: nn.Module) -> None:
    """End a part after each block, forward and backward."""

    def after(block: nn.Module, args: Any, out: Tensor) -> None:
        mark()
        if out.requires_grad:
            out.register_hook(lambda grad: mark())

    for block in model.blocks:
        block.register_forward_hook(after)


class Times(NamedTuple):
    best: float
    median: float


def race(arms: dict[str, Step], rounds: int) -> dict[str, Times]:
    """The time of every arm, all taking turns: the sums over its parts of each one's best and
    median.
    """
    steps: dict[str, list[Parts]] = {name: [] for name in arms}
    for step in arms.values():
        step()
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(arms), len(arms)):
            marks.clear()
            mark()
            arms[name]()
            mark()
            steps[name].append([end - start for start, end in pairwise(marks)])
    parts = {name: list(zip(*steps[name], strict=True)) for name in arms}
    return {
        name: Times(sum(map(min, each)), sum(map(median, each))) for name, each in parts.items()
    }


def best_times(arms: dict[str, Step], rounds: int) -> dict[str, float]:
    return {name: times.best for name, times in race(arms, rounds).items()}


def keep_memory() -> None:
    """Let the C library keep what is freed: else arms in turn would fault in each other's pages,
    which no training does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(option, 1 << 30)


def peak(make: Callable[[], Step]) -> int:
    """The most bytes that are held at once in the first two steps, gradients and everything the
    engine keeps included.
    """
    with PeakBytes() as counter:
        step = make()
        step()
        step()
    return counter.peak


def plain(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Pair) -> Step:
    def step() -> None:
        model.zero_grad()
        loss = loss_fn(model, batch)
        mark()
        loss.backward()

    return step


def observed(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Pair, val: Pair, **options: Any
) -> Step:
    engine = GhostEngine(model, loss_fn, val, self_check=False, mode="two_pass", **options)

    def step() -> None:
        model.zero_grad()
        with engine.observe():
            mark()
            loss = loss_fn(model, batch)
            mark()
            loss.backward()
            mark()

    return step


def in_one_pass(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Pair, val: Pair, **options: Any
) -> Step:
    """A step of engine.loss(); by default in one pass."""
    engine = GhostEngine(model, loss_fn, val, self_check=False, **{"mode": "concat", **options})

    def step() -> None:
        model.zero_grad()
        loss = engine.loss(batch)
        mark()
        loss.backward()
        mark()

    step()  # what one pass tries before its first step is no part of the others
    return step


def by_vmap(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Pair) -> Step:
    """Every sample's whole gradient, by torch.func."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def call(ids: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (ids,))

        return loss_fn(call, (x[None], y[None]))

    return lambda: torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, *batch)


def by_opacus(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Pair) -> Step:
    """Every sample's whole gradient, by Opacus."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model)

    def step() -> None:
        for parameter in wrapped.parameters():
            parameter.grad = parameter.grad_sample = None
        loss_fn(wrapped, batch).backward()

    return step


def tokens(rows: int, length: int, vocabulary: int) -> Pair:
    both = torch.randint(0, vocabulary, (2, rows, length))
    return both[0], both[1]


def split(batch: Pair, rows: int) -> tuple[Pair, Pair]:
    return (batch[0][:rows], batch[1][:rows]), (batch[0][rows:], batch[1][rows:])


def report(times: dict[str, Times], reference: str) -> None:
    """Times, and their ratios to the reference's."""
    base = times[reference]
    print(f"  {'':36s} {'best':>12s}  {'ratio':>7s}  {'of medians':>10s}")
    for name, each in times.items():
        best, usual = each.best / base.best, each.median / base.median
        print(f"  {name:36s} {each.best * 1e3:9.1f} ms  {best:6.3f}x  {usual:9.3f}x")


BOTH, ALONE = "plain, training and validation rows", "plain, training rows alone"


def headline(rounds: int, size: dict[str, int]) -> tuple[nn.Module, Pair, Pair, Pair]:
    """The step with scores against plain training on the same tokens; returns the model and its
    rows.
    """
    torch.manual_seed(0)
    model = GPT(size["vocabulary"], size["length"], size["width"], size["blocks"])
    everything = tokens(size["rows"] + size["validation"], size["length"], size["vocabulary"])
    batch, val = split(everything, size["rows"])
    mark_blocks(model)
    count = sum(p.numel() for p in model.parameters())
    print(f"GPT, {count / 1e6:.1f}M parameters, " + ", ".join(f"{k} {v}" for k, v in size.items()))
    arms = {
        BOTH: plain(model, token_loss, everything),
        "plain again (A/A)": plain(model, token_loss, everything),
        "scores": observed(model, token_loss, batch, val),
    }
    report(race(arms, 3 * rounds), BOTH)
    return model, everything, batch, val


def language_model(rounds: int, size: dict[str, int]) -> None:
    model, everything, batch, val = headline(rounds, size)
    others = {
        BOTH: plain(model, token_loss, everything),
        "scores, exact_grad=True": observed(model, token_loss, batch, val, exact_grad=True),
        "scores, two targets": observed(
            model, token_loss, batch, None, targets={"a": val, "b": val}
        ),
    }
    report(race(others, rounds), BOTH)
    reuse = {
        ALONE: plain(model, token_loss, batch),
        "scores": observed(model, token_loss, batch, val),
        "scores, direction reused": observed(model, token_loss, batch, val, refresh_every=10**9),
    }
    times = race(reuse, 2 * rounds)
    fresh, kept = times["scores"], times["scores, direction reused"]
    times["scores, refresh_every=8"] = Times(
        *((a + 7 * b) / 8 for a, b in zip(fresh, kept, strict=True))
    )
    report(times, ALONE)
    gradient = sum(p.numel() * p.element_size() for p in model.parameters())
    model.zero_grad()
    held = {
        ALONE: peak(lambda: plain(model, token_loss, batch)),
        "scores": peak(lambda: observed(model, token_loss, batch, val)),
        "scores, exact_grad=True": peak(
            lambda: observed(model, token_loss, batch, val, exact_grad=True)
        ),
    }
    for name, size_ in held.items():
        extra = f"  (+{(size_ - held[ALONE]) / gradient:5.2f} gradients)" if name != ALONE else ""
        print(f"  memory: {name:28s} {size_ / 1e6:9.1f} MB{extra}")


ROWS = [
    ("GPT", {}),
    ("GPT, T = 512", {"length": 512}),
    ("GPT, width 768", {"width": 768, "blocks": 2}),
    ("GPT, B = 16 + 8, T = 128", {"rows": 16, "validation": 8, "length": 128}),
]
"""What one pass is measured on, as changes of the usual size."""


def one_pass(rounds: int, size: dict[str, int]) -> None:
    """One pass and two against plain training on the same tokens."""
    print("\none pass and two, against plain training on the same rows")
    for name, changes in ROWS:
        sizes = size | {"validation": 1} | changes
        torch.manual_seed(0)
        model = GPT(sizes["vocabulary"], sizes["length"], sizes["width"], sizes["blocks"])
        mark_blocks(model)
        rows = tokens(sizes["rows"] + sizes["validation"], sizes["length"], sizes["vocabulary"])
        compare_modes(name, model, token_loss, rows, sizes["rows"], rounds)
    hugging_face(rounds, size)


def compare_modes(
    name: str,
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    everything: Pair,
    train: int,
    rounds: int,
) -> None:
    batch, val = split(everything, train)
    arms = {
        BOTH: plain(model, loss_fn, everything),
        "plain again (A/A)": plain(model, loss_fn, everything),
        "scores in one pass": in_one_pass(model, loss_fn, batch, val),
        "scores in two": in_one_pass(model, loss_fn, batch, val, mode="two_pass"),
    }
    print(f" {name}, B = {train} + {len(val[0])}")
    report(race(arms, max(9, rounds)), BOTH)


def hugging_face(rounds: int, size: dict[str, int]) -> None:
    """Stock GPT-2 with its dropout, head tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width = size["width"]
    config = GPT2Config(
        vocab_size=size["vocabulary"], n_positions=size["length"], n_embd=width,
        n_layer=size["blocks"], n_head=max(1, width // 64), bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()

    def own_loss(net: nn.Module, batch: Pair) -> Tensor:
        logits = net(input_ids=batch[0]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    rows = tokens(size["rows"] + 1, size["length"], size["vocabulary"])
    compare_modes("Hugging Face GPT-2, dropout on", model, own_loss, rows, size["rows"], rounds)


def choice(rounds: int, size: dict[str, int]) -> None:
    """Which mode a step is cheaper in, and what the rule of mode="auto" says."""
    print("\nthe rule of mode='auto': a step of n micro-batches of B rows, V validation rows")
    length = size["length"] // 2
    torch.manual_seed(0)
    model = GPT(size["vocabulary"], length, size["width"], max(1, size["blocks"] // 2))
    for rows, validation, micro in ((8, 1, 1), (8, 8, 1), (8, 1, 4), (8, 4, 4), (2, 8, 2)):
        batch = tokens(rows, length, size["vocabulary"])
        val = tokens(validation, length, size["vocabulary"])
        arms = {
            mode: accumulated(model, batch, val, mode, micro) for mode in ("concat", "two_pass")
        }
        times = race(arms, max(9, rounds))
        ratio = times["two_pass"].median / times["concat"].median
        rule = "one pass" if is_bargain(rows, validation, micro) else "two passes"
        print(
            f"  B = {rows}, V = {validation}, n = {micro}: two passes take {ratio:5.2f}x of one; "
            f"the rule: {rule}"
        )


def accumulated(model: nn.Module, batch: Pair, val: Pair, mode: str, micro: int) -> Step:
    """A step of several micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    engine = GhostEngine(model, token_loss, val, mode=mode, optimizer=optimizer, self_check=False)

    def step() -> None:
        for _ in range(micro):
            (engine.loss(batch) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def peers(rounds: int, size: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = GPT(size["vocabulary"], size["length"], size["width"], size["blocks"], tied=False)
    batch, val = split(
        tokens(size["rows"] + size["validation"], size["length"], size["vocabulary"]), size["rows"]
    )
    print(
        "\nper-sample gradients instead of scores, the same training rows "
        "(head not tied, for Opacus)"
    )
    own = GPT(size["vocabulary"], size["length"], size["width"], size["blocks"], tied=False)
    by_hooks = by_opacus(own, token_loss, batch)
    makers: dict[str, Callable[[], Step]] = {
        "plain": lambda: plain(model, token_loss, batch),
        "scores, direction reused": lambda: observed(
            model, token_loss, batch, val, refresh_every=10**9
        ),
        "vmap(grad)": lambda: by_vmap(model, token_loss, batch),
        "Opacus": lambda: by_hooks,
    }
    best = best_times({name: make() for name, make in makers.items()}, max(2, rounds // 3))
    for name, seconds in best.items():
        model.zero_grad()
        memory = peak(makers[name]) / 1e6
        print(
            f"  {name:36s} {seconds * 1e3:9.1f} ms  {seconds / best['plain']:6.3f}x"
            f"  {memory:9.1f} MB"
        )


def routes(rounds: int, quick: bool) -> None:
    print(
        "\nroutes: the step without the target's pass, against plain training on the training rows"
    )
    width = 128 if quick else 512
    for length in (1, 16, 64, 256):
        torch.manual_seed(0)
        rows, val_rows = (64, 4) if length == 1 else (8, 1)
        if length == 1:
            model: nn.Module = nn.Sequential(
                *[m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())]
            )
            everything = (
                torch.randn(rows + val_rows, width),
                torch.randint(0, width, (rows + val_rows,)),
            )
            loss_fn: Callable[..., Tensor] = class_loss
        else:
            model, loss_fn = GPT(256, length, width, 2, tied=False), token_loss
            everything = tokens(rows + val_rows, length, 256)
        batch, val = split(everything, rows)
        options: list[str | None] = ["materialise", "project", None]
        arms = {
            f"{r}": observed(model, loss_fn, batch, val, refresh_every=10**9, _route=r)
            for r in options
        }
        best = best_times({"plain": plain(model, loss_fn, batch), **arms}, rounds)
        pick = choose(length, width, width, 1)
        names = ("materialise", "project")
        times = "  ".join(f"{r} {best[r] / best['plain']:.2f}x" for r in names)
        fastest = min(names, key=lambda r: best[r])
        print(
            f"  T={length:3d}  {times}  | the rule: {best['None'] / best['plain']:.2f}x, {pick}; "
            f"fastest: {fastest}"
        )


ONLY = ["scores", "one_pass", "choice", "peers", "routes"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--width", type=int, default=384, help="of the language model")
    parser.add_argument("--blocks", type=int, default=4, help="of the language model")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small model and few rounds: shows that everything runs",
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that others use as well"
    )
    parser.add_argument("--only", choices=ONLY)
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(options.threads)
    keep_memory()
    warnings.simplefilter("ignore")
    size = {
        "rows": 8,
        "validation": 2,
        "length": 256,
        "width": options.width,
        "blocks": options.blocks,
        "vocabulary": 1024,
    }
    if options.quick:
        size = {
            "rows": 4,
            "validation": 1,
            "length": 64,
            "width": 64,
            "blocks": 2,
            "vocabulary": 256,
        }
    rounds = 2 if options.quick else options.rounds
    if options.only in {None, "scores"}:
        language_model(rounds, size)
        headline(rounds, size | {"length": 2 * size["length"]})
    if options.only in {None, "one_pass"}:
        one_pass(rounds, size | {"validation": 1})
    if options.only in {None, "choice"}:
        choice(rounds, size)
    if options.only in {None, "peers"}:
        peers(rounds, size)
    if options.only in {None, "routes"}:
        routes(rounds, options.quick)


if __name__ == "__main__":
    main()
