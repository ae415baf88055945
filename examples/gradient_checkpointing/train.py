"""Trains a GPT by `gradsight train`, with a run for each setting of gradient checkpointing.

python3 train.py --config config/train_shakespeare_char.py --gradient_checkpointing true
"""

import sys

from gradsight.cli import main


def with_defaults(options: list[str]) -> list[str]:
    """The options, and what makes two runs comparable where they do not say it themselves."""
    named = {option.partition("=")[0] for option in options}
    if "--method" not in named:
        options = [*options, "--method", "Regular"]  # scores of samples would take memory too
    if not named & {"--experiment", "--resume", "--eval_only"}:
        text = " ".join(options).replace("=", " ")
        checkpointing = "--gradient_checkpointing true" in text.lower()
        name = "with-checkpointing" if checkpointing else "without-checkpointing"
        options = [*options, "--experiment", name, "--overwrite"]
    return options


if __name__ == "__main__":
    sys.exit(main(["train", *with_defaults(sys.argv[1:])]))
