"""`gradsight train` with the settings of config_file.py; flags on the command line win."""

import sys
from pathlib import Path

import config_file

from gradsight.cli import main

HERE = Path(__file__).resolve().parent
ARCHITECTURE = "GPT2-Small"
METHOD = "GradDotProd"


def in_this_folder(path: str) -> str:
    """A path of config_file.py, which does not depend on where the command is typed."""
    return str(HERE / Path(path).expanduser())


def settings() -> dict[str, object]:
    """What config_file.py says, by the names of the flags."""
    values: dict[str, object] = {
        "architecture": ARCHITECTURE,
        "results_dir": in_this_folder(config_file.RESULTS_DIR),
        "model_dtype": config_file.model_dtype,
        "train_dtype": config_file.train_dtype,
        "trainer.callbacks.ghost.per_parameter": str(bool(config_file.per_parameter)).lower(),
    }
    if config_file.PILE_DATA_DIR:
        values["data"] = in_this_folder(config_file.PILE_DATA_DIR)
    return values


def flags_of(arguments: list[str]) -> dict[str, str]:
    """The flags of a command line with their values, "" for those that are switches."""
    flags = {}
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, _, value = argument.removeprefix("--").partition("=")
            following = arguments[place + 1 : place + 2]
            if not value and following and not following[0].startswith("--"):
                value = following[0]
            flags[name] = value
    return flags


def with_settings(arguments: list[str]) -> list[str]:
    """The command line, with the settings that it does not give itself."""
    given = flags_of(arguments)
    values = settings()
    if {"resume", "eval_only"} & given.keys():
        usual = f"{given.get('method', METHOD)}-{given.get('architecture', ARCHITECTURE)}"
        name = given.get("experiment", usual)
        results = given.get("results_dir", values["results_dir"])
        if (Path(str(results)) / name / "config.json").is_file():
            # A run that is there knows its own settings.
            values = {"results_dir": results, "experiment": name}
    added = [f"--{name}={value}" for name, value in values.items() if name not in given]
    # A config file of the user's own stands for all of these but the place.
    if "config" in given:
        added = [flag for flag in added if flag.startswith("--results_dir=")]
    return [*added, *arguments]


if __name__ == "__main__":
    sys.exit(main(["train", *with_settings(sys.argv[1:])]))
