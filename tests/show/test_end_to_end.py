"""Train, score, leave out the worst, train again: a better validation loss at the same step. All by
command.
"""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from gradsight.cli import main
from gradsight.train.samples import open_samples, read_weights

STEPS, PAGE = 120, 4096


def write_data(folder: Path, share: float) -> None:
    """Two packages of the standard library; of the pages that are trained on, a share with its
    bytes shuffled.
    """
    generator = np.random.default_rng(0)
    for domain in ("email", "asyncio"):
        sources = sorted((Path(sysconfig.get_paths()["stdlib"]) / domain).glob("*.py"))
        text = b"\n".join(source.read_bytes() for source in sources)[: 20 * PAGE]
        pages = np.frombuffer(text, dtype=np.uint8).reshape(20, PAGE).copy()
        for number in range(20):
            if (
                number % 10 < 8 and generator.random() < share
            ):  # of ten pages, the last two validate and test
                pages[number] = generator.permutation(pages[number])
        (folder / domain).mkdir(parents=True)
        (folder / domain / "text.txt").write_bytes(pages.tobytes())


def train(place: Path, name: str, *options: str) -> float:
    """The validation loss after so many steps of a tiny model."""
    shape = "--model.n_layer 2 --model.n_head 2 --model.n_embd 48 --block_size 64 --batch_size 32"
    rest = f"--learning_rate 3e-3 --warmup_steps 10 --max_steps {STEPS} --eval_interval {STEPS}"
    rest += " --checkpoint_interval 0 --startup_report false"
    where = ["--data", str(place / "data"), "--results_dir", str(place), "--experiment", name]
    assert main(["train", *where, *shape.split(), *rest.split(), *options]) == 0
    loss: float = json.loads((place / name / "training_log.json").read_text())[-1]["val_loss"]
    return loss


@pytest.mark.slow
def test_training_without_the_worst_samples_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data", share=0.4)
    ghost = ["--val_batch_size", "32", "--trainer.callbacks.ghost.refresh_every", "4"]
    before = train(tmp_path, "all", *ghost)
    keep, weights = tmp_path / "keep.txt", tmp_path / "weights.csv"
    assert main(["influence", str(tmp_path / "all"), "--export", str(keep)]) == 0
    assert main(["influence", str(tmp_path / "all"), "--export", str(weights)]) == 0
    assert "No text of samples" not in capsys.readouterr().out
    after = train(tmp_path, "kept", "--method", "Regular", "--data_weights", str(keep))
    assert after < before - 0.1, f"{before:.3f} with all samples, {after:.3f} without those below 0"

    samples = open_samples(json.loads((tmp_path / "all" / "config.json").read_text())["settings"])
    kept, weighed = read_weights(keep, samples), read_weights(weights, samples)
    assert np.array_equal(kept == 0, weighed == 0), "a list and weights leave out the same samples"
    assert 0.2 < (kept == 0).mean() < 0.7
