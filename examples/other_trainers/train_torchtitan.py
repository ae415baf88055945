"""Trains with the real torchtitan on the CPU, and compares the record with what it logs itself.

    python -m torch.distributed.run --nproc_per_node=2 train_torchtitan.py FOLDER replicate|tensor

torchtitan knows accelerators alone, and its attention has no backward pass on the CPU: what is in
the way is replaced below. Data and tokenizer are our own, for nothing can be downloaded. Run by
run.sh, in an environment of its own.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

STEPS = 4
WORDS = 2048


def use_the_cpu() -> None:
    """Has to come before anything of torchtitan's is imported."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: torch.cpu
    for name, answer in {"set_device": None, "current_device": 0, "get_device_name": "cpu"}.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    torch.distributed.set_timeout = lambda *_: None
    from torchtitan.components import metrics
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = torch.cpu
    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = mock.Mock(device_name="cpu", get_peak_stats=lambda: stats)
    metrics.build_device_memory_monitor = lambda: monitor
    FlexAttention.forward = _attention


def _attention(
    self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, enable_gqa: bool = False, **_: Any
) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=enable_gqa
    )
    return made.transpose(1, 2)


def data_config() -> tuple[Any, Any]:
    """Configurations of a tokenizer and of a data loader."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Words(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any = None, *, tokenizer_path: Any = None) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return [0]

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return WORDS

    class Batches(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
        ) -> None:
            self._shape = (local_batch_size, seq_len + 1)
            self._generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[Any]:
            while True:
                ids = torch.randint(0, WORDS, self._shape, generator=self._generator)
                places = torch.arange(ids.shape[1] - 1).expand(len(ids), -1).contiguous()
                inputs = {"input": ids[:, :-1], "positions": places}
                yield inputs, ids[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return Words.Config(), Batches.Config()


def configured(folder: Path, kind: str) -> Any:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = data_config()
    config.training.steps = STEPS
    config.training.seq_len = 32
    config.training.local_batch_size = 2
    config.training.global_batch_size = 8
    config.training.max_norm = 0.5
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.checkpoint.enable = False
    config.dump_folder = str(folder)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.data_parallel_shard_degree = 1
    if kind == "tensor":
        config.parallelism.tensor_parallel_degree = 2
    else:
        config.parallelism.data_parallel_replicate_degree = 2
    config.override.imports = [("gradsight_torchtitan.watched", {"quiet": True})]
    return config


def main(folder: Path, kind: str) -> None:
    use_the_cpu()
    from torchtitan.components.metrics import MetricsProcessor

    import gradsight

    logged: list[tuple[float, float]] = []

    def log(self: Any, step: int, loss: float, most: float, norm: float, **_: Any) -> None:
        logged.append((loss, norm))

    MetricsProcessor.log = log
    trainer = configured(folder, kind).build()
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        run = gradsight.open_run(folder / "gradsight")
        steps = list(run.steps())
        assert [step.step for step in steps] == list(range(STEPS)), steps
        for step, (loss, norm) in zip(steps, logged, strict=True):
            assert step.gradient == "true", step
            assert abs(step.loss - loss) < 1e-6 * loss, (step, loss)
            # torch sums half a million float32 squares one after the other on the CPU.
            assert abs(step.total_norm - norm) < 3e-4 * norm, (step, norm)
            assert abs(step.clip_coef - 0.5 / norm) < 1e-4, (step, norm)
        assert not list(run.problems()), list(run.problems())
        print(f"torchtitan, {kind}: loss, norm and clip coefficient of {STEPS} steps are its own")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
