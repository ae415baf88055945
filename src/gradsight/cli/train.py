"""gradsight train"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from gradsight.core import rundir
from gradsight.errors import UsageError
from gradsight.train.config import ALIASES, MACHINE, Settings, flat, from_dict
from gradsight.train.models import architecture

app = App(name="train", name_transform=lambda name: name, result_action="return_value")

RUN = Group("Run", sort_key=0)
DEFAULT = Settings()
_SWITCHES = {name for name, value in flat(DEFAULT) if isinstance(value, bool)} | {
    "resume",
    "overwrite",
    "eval_only",
}


@app.default
def train(
    *,
    config: Annotated[Path | None, Parameter(group=RUN)] = None,
    resume: Annotated[bool, Parameter(group=RUN, negative="")] = False,
    overwrite: Annotated[bool, Parameter(group=RUN, negative="")] = False,
    eval_only: Annotated[bool, Parameter(name="--eval_only", group=RUN, negative="")] = False,
    num_processes: Annotated[int | None, Parameter(name="--num_processes", group=MACHINE)] = None,
    settings: Settings = DEFAULT,
) -> int:
    """Train a GPT-2 with every instrument at work: norms, health, scores of samples, dumps, memory.

    The run goes to a folder of its own under Results, with its report. Nothing is downloaded:
    without --data it trains on the source of Python's standard library.

    Parameters
    ----------
    config
        Settings from a YAML file, or from the config.json of a run; options on the command line win over it.
    resume
        Go on from the newest checkpoint, bit for bit, with the settings of the run.
    overwrite
        Replace the run of the same name.
    eval_only
        Only print the losses of the newest checkpoint, or of the initial weights.
    num_processes
        Processes to start on this machine; by default one per GPU. Under torchrun it is torchrun that says.
    """
    from gradsight.train.launch import processes_to_start, start

    refuse_early(settings)
    count = processes_to_start(num_processes, settings.device)
    if count > 1:
        flags = {"--resume": resume, "--overwrite": overwrite, "--eval_only": eval_only}
        return start(settings, [flag for flag, wanted in flags.items() if wanted], count)
    from gradsight.train.run import run_training

    return run_training(settings, resume=resume, overwrite=overwrite, eval_only=eval_only)


def refuse_early(settings: Settings) -> None:
    """What can be seen to be wrong before torch is loaded and processes are started."""
    architecture(settings.architecture)
    for name in ("data", "data_weights", "tokenizer"):
        path = getattr(settings, name)
        if path is not None and not Path(path).exists():
            raise UsageError(f"--{name} {path}: there is no such file or folder")


def prepared(tokens: Sequence[str]) -> list[str]:
    """The command line with switches as --name=true or --name=false, and with the settings of the
    config file added.
    """
    tokens = _joined(tokens)
    given = {_option(token): token for token in tokens if token.startswith("--")}
    file = _config_file(tokens, given)
    if file is None:
        return tokens
    defaults = dict(flat(DEFAULT))
    for name, value in flat(from_dict(read_config(file), str(file))):
        if name not in given and value != defaults[name]:
            tokens += [
                f"--{name}={_text(one)}"
                for one in (value if isinstance(value, tuple) else (value,))
            ]
    return tokens


def _joined(tokens: Sequence[str]) -> list[str]:
    """`--name true` is two tokens to the parser, which takes a switch for complete without a value."""
    joined: list[str] = []
    for token in tokens:
        if (
            token.lower() in ("true", "false")
            and joined
            and joined[-1].removeprefix("--") in _SWITCHES
        ):
            joined[-1] += f"={token.lower()}"
        else:
            joined.append(token)
    return joined


def _option(token: str) -> str:
    name = token.split("=")[0].removeprefix("--")
    return ALIASES.get(name, name)


def _value(tokens: Sequence[str], name: str) -> str | None:
    """The value of an option on the command line."""
    for place, token in enumerate(tokens):
        if token.startswith(f"--{name}="):
            return token.split("=", 1)[1]
        if token == f"--{name}" and place + 1 < len(tokens):
            return tokens[place + 1]
    return None


def _config_file(tokens: Sequence[str], given: dict[str, str]) -> Path | None:
    """The file that --config names; to resume or evaluate a run, its own."""
    named = _value(tokens, "config")
    if named is not None:
        return Path(named)
    if not ({"resume", "eval_only"} & set(given)):
        return None
    default = f"{_value(tokens, 'method') or DEFAULT.method}-{_value(tokens, 'architecture') or DEFAULT.architecture}"
    place = Path(_value(tokens, "results_dir") or DEFAULT.results_dir) / (
        _value(tokens, "experiment") or default
    )
    return place / rundir.CONFIG if (place / rundir.CONFIG).is_file() else None


def read_config(file: Path) -> dict[str, Any]:
    """The settings in a YAML file, or in the config.json of a run."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(
            f"--config {file} is not {'JSON' if file.suffix == '.json' else 'YAML'}: {error}"
        ) from error
    if isinstance(found, dict) and isinstance(found.get("settings"), dict):
        found = found["settings"].get("train")
        if found is None:
            raise UsageError(
                f"--config {file} is of a run that `gradsight train` did not make: it holds no settings to repeat"
            )
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(
            f"--config {file} should hold settings by name, but holds {type(found).__name__}"
        )
    return found


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )
