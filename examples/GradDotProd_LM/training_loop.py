"""The loop by hand, in six steps around an ordinary forward and backward pass. Run it, or copy it.

Every training sample gets its score: the dot product of its own gradient with that of the
validation loss. With mode="concat" both come out of one forward pass over both batches.
"""

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import config_file
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import gradsight

HERE = Path(__file__).resolve().parent


@dataclass
class Output:
    """What the model gives, as models of Hugging Face's do."""

    loss: Tensor
    logits: Tensor


class LanguageModel(nn.Module):
    """GPT-2, called with tokens X and the tokens Y that follow each of them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, X: Tensor, Y: Tensor) -> Output:
        logits = self.gpt2(input_ids=X).logits
        return Output(F.cross_entropy(logits.flatten(0, 1), Y.flatten()), logits)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of a batch, as the engine wants it."""
    X, Y = batch
    return model(X, Y).loss


def read_tokens() -> np.ndarray:
    """The tokens in PILE_DATA_DIR; without it the bytes of a part of Python's standard library."""
    if config_file.PILE_DATA_DIR:
        folder = HERE / Path(config_file.PILE_DATA_DIR).expanduser()
        files = sorted(folder.rglob("*.bin"))
        if not files:
            raise SystemExit(f"PILE_DATA_DIR: there is no .bin file of uint16 tokens in {folder}")
        return np.memmap(files[0], dtype="<u2", mode="r")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"], "asyncio").glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in sources), dtype=np.uint8)


def rows(tokens: np.ndarray, starts: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets that begin at these places."""
    cut = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    block = torch.from_numpy(cut)
    return block[:, :-1], block[:, 1:]


def train(options: argparse.Namespace) -> Path:
    """Train a small GPT-2 and save every sample's score; returns the run directory."""
    torch.manual_seed(0)
    tokens = read_tokens()
    held_out = len(tokens) * 9 // 10  # the last tenth validates
    vocabulary = 256
    if config_file.PILE_DATA_DIR:
        vocabulary = 50257
    config = GPT2Config(
        vocab_size=vocabulary,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        n_positions=options.block_size,
        n_layer=options.n_layer,
        n_head=4,
        n_embd=options.n_embd,
        # In one pass over both batches the validation rows would be dropped out too.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = LanguageModel(config).to(getattr(torch, config_file.model_dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    generator = np.random.default_rng(0)
    places = generator.integers(held_out, len(tokens) - options.block_size, options.val_batch_size)
    run_dir = HERE / config_file.RESULTS_DIR / "training_loop"
    ghost_engine = gradsight.GhostEngine(
        model,
        loss_fn,
        rows(tokens, places.tolist(), options.block_size),
        optimizer=optimizer,
        mode="concat",
        run_dir=run_dir,
        save_interval=options.dot_prod_save_interval,
        per_parameter=config_file.per_parameter,
        start_step=0,
    )
    for iteration in range(options.max_steps):
        batch_idx = generator.integers(0, held_out - options.block_size, options.batch_size)
        X_train, Y_train = rows(tokens, batch_idx.tolist(), options.block_size)

        # 1. Which samples these are: their ids, or the number of the batch.
        ghost_engine.attach_train_batch(X_train, Y_train, iteration, batch_idx.tolist())
        # 2. The training rows, followed by the validation rows.
        X_forward, Y_forward = ghost_engine.prepare_forward_input(X_train, Y_train)
        # 3. One forward and one backward pass; the loss is that of the training rows.
        with torch.autocast("cpu", torch.bfloat16, enabled=config_file.train_dtype == "bfloat16"):
            loss = model(X_forward, Y_forward).loss
        loss.backward()
        # 4. The scores are known, and .grad is the training gradient alone.
        ghost_engine.prepare_gradients()
        # 5. As in any loop.
        optimizer.step()
        optimizer.zero_grad()
        # 6. The scores are kept, and saved every so many iterations.
        ghost_engine.aggregate_and_log()

        if iteration % 10 == 0 or iteration == options.max_steps - 1:
            best = ghost_engine.scores.total.argmax()
            print(
                f"iteration {iteration}  loss {loss.item():.3f}  "
                f"helps most: sample {ghost_engine.scores.sample_ids[best]}"
            )
    ghost_engine.close()
    return run_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--val_batch_size", type=int, default=4)
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--n_layer", type=int, default=2)
    parser.add_argument("--n_embd", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--dot_prod_save_interval", type=int, default=10)
    run_dir = train(parser.parse_args())
    scores = gradsight.read_scores(run_dir)
    print(f"{scores.num_rows} scores in {run_dir}; columns: {', '.join(scores.column_names)}")


if __name__ == "__main__":
    main()
