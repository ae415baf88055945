"""Tiny models and data for the trainers, and what a plain float64 loop says of their steps."""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(37))]


def llama() -> transformers.LlamaForCausalLM:
    """A language model of 7,000 parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def token_rows(count: int) -> list[dict[str, Tensor]]:
    """Texts of different lengths, padded: micro-batches count different numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (1,), generator=generator))
        ids = torch.randint(3, len(WORDS), (length,), generator=generator)
        padding = 12 - length
        row = {
            "input_ids": torch.cat([ids, torch.zeros(padding, dtype=torch.long)]),
            "attention_mask": torch.cat([torch.ones(length), torch.zeros(padding)]).long(),
            "labels": torch.cat([ids, torch.full((padding,), -100)]),
        }
        rows.append(row)
    return rows


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words are tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class Texts:
    """Random texts, the same ones every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(2)

    def of(self, length: int) -> str:
        drawn = torch.randint(3, len(WORDS), (length,), generator=self._generator)
        return " ".join(WORDS[number] for number in drawn)

    def of_any_length(self) -> str:
        return self.of(int(torch.randint(4, 12, (1,), generator=self._generator)))


@dataclass(frozen=True)
class Truth:
    """A step by a plain loop in float64."""

    loss: float
    norm: float


def token_loss(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The mean over all tokens of a step that are predicted, however they were divided."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for batch in batches:
        inputs = {name: batch[name] for name in batch if name != "labels"}
        logits = model(**inputs).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        total = total + nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum"
        )
        count += int((labels != -100).sum())
    return total / count


def truth(model: nn.Module, loss: Any) -> Truth:
    """Loss and norm of `loss(twin)`, for a twin of this model in float64."""
    twin = copy.deepcopy(model).double()
    for parameter in twin.parameters():
        parameter.grad = None
    value = loss(twin)
    value.backward()
    gradients = [each.grad for each in twin.parameters() if each.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return Truth(float(value.detach()), float(norm))


class PlainLoop(transformers.TrainerCallback):
    """What a float64 loop says of every step, from the weights and batches that a Trainer has."""

    def __init__(self, collator: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self._collator = collator
        self._before: list[list[Tensor]] = []

    def collate(self, rows: list[Any]) -> Any:
        """As the Trainer's own collator, and the batch is kept."""
        batch = self._collator(rows)
        self.batches.append(dict(batch))
        return batch

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """The weights that the step starts from."""
        self._before.append(weights(model))

    def truths(self, model: nn.Module, loss: Any, counts: Sequence[int]) -> list[Truth]:
        """Of the steps that were made, by `loss(model, micro_batches)`, so many in each."""
        found = []
        batches = iter(self.batches)
        for count, before in zip(counts, self._before, strict=True):
            mine = [next(batches) for _ in range(count)]
            set_weights(model, before)
            found.append(truth(model, functools.partial(loss, batches=mine)))
        return found


def set_weights(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Give a model these parameters."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def weights(model: nn.Module) -> list[Tensor]:
    """A copy of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
