"""Trains with the real OLMo-core on the CPU, and compares the record with what it logs itself.

    python train_olmo_core.py FOLDER

Run by run.sh, in an environment of its own.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

STEPS, WORDS, LENGTH, ROWS = 4, 256, 16, 8


def loader(folder: Path) -> Any:
    from olmo_core.data import DataLoaderBase

    class Batches(DataLoaderBase):
        total_batches = 100

        def _iter_batches(self) -> Iterator[dict[str, Any]]:
            generator = torch.Generator().manual_seed(0)
            while True:
                ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
                yield {"input_ids": ids}

        def get_mock_batch(self) -> dict[str, Any]:
            return next(self._iter_batches())

        def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
            return ROWS * LENGTH

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
            pass

    size = {"dp_world_size": 1, "dp_rank": 0, "fs_local_rank": 0}
    return Batches(work_dir=folder, global_batch_size=ROWS * LENGTH, **size)


def main(folder: Path) -> None:
    from gradsight_olmo_core import GradsightCallback
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import Callback
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    import gradsight

    logged: dict[int, dict[str, float]] = {}

    class Log(Callback):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            logged.setdefault(step, {}).update(metrics)

    torch.manual_seed(0)
    model = TransformerConfig.llama_like(d_model=32, vocab_size=WORDS, n_layers=2, n_heads=2)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-3),
        max_grad_norm=0.5,
    )
    config = TrainerConfig(
        save_folder=str(folder),
        max_duration=Duration.steps(STEPS),
        metrics_collect_interval=1,
        save_overwrite=True,
        device="cpu",
    )
    config = config.with_callback("gradsight", GradsightCallback(options={"quiet": True}))
    config = config.with_callback("log", Log())
    built = module.build(model.build(init_device="cpu"), device=torch.device("cpu"))
    config.build(built, loader(folder)).fit()
    run = gradsight.open_run(folder / "gradsight")
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(STEPS)), steps
    for step in steps:
        # OLMo-core counts from 1.
        own = logged[step.step + 1]
        norm = own["optim/total grad norm"]
        assert step.gradient == "true", step
        assert abs(step.loss - own["train/CE loss"]) < 1e-6 * step.loss, (step, own)
        assert abs(step.total_norm - norm) < 1e-5 * norm, (step, own)
        assert abs(step.clip_coef - 0.5 / norm) < 1e-4, (step, own)
    assert not list(run.problems()), list(run.problems())
    print(f"OLMo-core: loss, norm and clip coefficient of {STEPS} steps are its own")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
