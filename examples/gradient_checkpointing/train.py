"""Trains a GPT by `gradsight train`, with a run for each setting of gradient checkpointing.

python3 train.py --config config/train_shakespeare_char.py --gradient_checkpointing true
"""

import sys

from gradsight.cli import main

FLAG = "--gradient_checkpointing"


def with_defaults(options: list[str]) -> list[str]:
    """The options, and what makes two runs comparable where they do not say it themselves."""
    words = " ".join(options).lower().replace("=", " ").split()
    added = []
    if "--method" not in words:
        added = ["--method", "Regular"]  # scores of samples would take memory too
    names_a_run = {"--experiment", "--resume", "--eval_only"} & set(words)
    if FLAG in words and not names_a_run:
        off = "false" in words[words.index(FLAG) + 1 :][:1]
        experiment = "without-checkpointing" if off else "with-checkpointing"
        added += ["--experiment", experiment, "--overwrite"]
    return [*options, *added]


if __name__ == "__main__":
    sys.exit(main(["train", *with_defaults(sys.argv[1:])]))
