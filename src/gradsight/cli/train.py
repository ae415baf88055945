"""gradsight train"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, Group, Parameter, Token

from gradsight.core import rundir
from gradsight.errors import MissingPackage, UsageError
from gradsight.store.run_files import read_run_config
from gradsight.store.sinks import refuse_unavailable
from gradsight.train.config import MACHINE, Settings, from_dict, options_of
from gradsight.train.models import architecture, refuse_without_transformers
from gradsight.train.python_config import read_python_config

RUN = Group("Run", sort_key=0)
DEFAULT = Settings()
_DEFAULTS = dict(options_of(DEFAULT))
_SWITCHES = {name for name, value in _DEFAULTS.items() if isinstance(value, bool)} | {
    "resume",
    "overwrite",
    "eval_only",
}
_ONE_OF = ("max_steps", "epochs")
"""Each says when the run ends: one on the command line wins over the other in a file."""
CONFIG_FILES = (".yaml", ".yml", ".json", ".py")


def add_config_file(app: App, commands: Sequence[str], arguments: ArgumentCollection) -> None:
    """Give the options that are not on the command line the values of the config file."""
    lengths = [f"--{name}" for name in _ONE_OF if arguments[f"--{name}"].tokens]
    if len(lengths) > 1:
        raise UsageError(f"{' and '.join(lengths)} both say when the run ends: give one of them")
    file, values = _config(arguments)
    if file is None:
        return
    for name, value in options_of(from_dict(values, str(file))):
        argument = arguments[f"--{name}"]
        is_replaced = bool(lengths) and name in _ONE_OF
        if argument.tokens or is_replaced or value == _DEFAULTS[name]:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            argument.append(Token(keyword=f"--{name}", value=_text(item), source=str(file)))


app = App(
    name="train",
    name_transform=lambda name: name,
    result_action="return_value",
    config=add_config_file,
)


@app.default
def train_command(
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
        Settings from a YAML file, from the config.json of a run, or from a Python file of
        assignments such as nanoGPT's, which is read and never run; options on the command line
        win over it.
    resume
        Go on from the newest checkpoint, bit for bit, with the settings of the run.
    overwrite
        Replace the run of the same name.
    eval_only
        Only print the losses of the newest checkpoint, or of the initial weights.
    num_processes
        Processes to start on this machine; by default one per GPU. Under torchrun it is torchrun
        that says.
    """
    from gradsight.train.launch import processes_to_start, start_processes

    refuse_early(settings)
    if "RANK" not in os.environ:  # whoever started several processes has said it once
        print("Loading torch and transformers ...", flush=True)
    count = processes_to_start(num_processes, settings.device)
    if count > 1:
        flags = {"--resume": resume, "--overwrite": overwrite, "--eval_only": eval_only}
        return start_processes(settings, [flag for flag, wanted in flags.items() if wanted], count)
    from gradsight.train.run import run_training

    return run_training(settings, resume=resume, overwrite=overwrite, eval_only=eval_only)


def refuse_early(settings: Settings) -> None:
    """Refuse what can be seen to be wrong before torch is loaded and processes are started."""
    architecture(settings.architecture)
    for name in ("data", "data_weights", "tokenizer"):
        path = getattr(settings, name)
        if path is not None and not Path(path).exists():
            raise UsageError(f"--{name} {path}: there is no such file or folder")
    refuse_without_transformers(settings.architecture)
    if settings.tokenizer is not None:
        MissingPackage.refuse("tokenizers", "hf", "--tokenizer")
    refuse_unavailable(settings.trainer.callbacks.watch.sinks)


def with_joined_switches(tokens: Sequence[str]) -> list[str]:
    """The command line with `--name true` as `--name=true`.

    It is two tokens to cyclopts, which takes a switch for complete without a value.

    >>> with_joined_switches(["train", "--startup_report", "false", "--resume", "--seed", "3"])
    ['train', '--startup_report=false', '--resume', '--seed', '3']
    """
    joined: list[str] = []
    for token in tokens:
        switch = joined[-1].removeprefix("--") if joined else ""
        # There are no arguments without a name: whatever follows a switch is meant as its value.
        if switch in _SWITCHES and not token.startswith("--"):
            joined[-1] = f"--{switch}={_switch_value(switch, token)}"
        else:
            joined.append(token)
    return joined


def _switch_value(switch: str, text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"--{switch} is true or false, got {text!r}")
    return text.lower()


def _config(arguments: ArgumentCollection) -> tuple[Path | None, Mapping[str, Any]]:
    """The settings in the file that --config names; to resume or evaluate a run, in its own."""
    named = _given(arguments, "config")
    if named is not None:
        return Path(named), read_config(Path(named))
    if _given(arguments, "resume") is None and _given(arguments, "eval_only") is None:
        return None, {}
    method = _given(arguments, "method") or DEFAULT.method
    architecture_name = _given(arguments, "architecture") or DEFAULT.architecture
    results = Path(_given(arguments, "results_dir") or DEFAULT.results_dir)
    experiment = _given(arguments, "experiment") or f"{method}-{architecture_name}"
    settings = read_run_config(results / experiment).get("settings")
    if not isinstance(settings, dict) or "train" not in settings:
        # Killed before it was written: the command line says it all again.
        return None, {}
    return results / experiment / rundir.CONFIG, settings["train"]


def _given(arguments: ArgumentCollection, name: str) -> str | None:
    """An option's value on the command line."""
    tokens = arguments[f"--{name}"].tokens
    return tokens[0].value if tokens else None


def read_config(file: Path) -> Mapping[str, Any]:
    """The settings in a YAML or Python file, or in the config.json of a run."""
    import yaml

    if file.suffix == ".py":
        return _settings_in_python(file)
    if file.suffix not in CONFIG_FILES:
        known = ", ".join(CONFIG_FILES)
        raise UsageError(
            f"--config takes a YAML file, the config.json of a run or a Python file of assignments "
            f"({known}), got {file}"
        )
    kind = "JSON" if file.suffix == ".json" else "YAML"
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"--config {file} is not {kind}: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("settings"), dict):
        values = values["settings"].get("train")
        if values is None:
            raise UsageError(
                f"--config {file} is of a run that `gradsight train` did not make: "
                f"it holds no settings to repeat"
            )
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(
            f"--config {file} should hold settings by name, but holds {type(values).__name__}"
        )
    return values


def _settings_in_python(file: Path) -> Mapping[str, Any]:
    """The settings that a Python file assigns; what has no equal here is named in one line."""
    config = read_python_config(file)
    first = os.environ.get("RANK", "0") == "0"  # under torchrun all ranks read the same file
    if config.left_out and first:
        names = ", ".join(config.left_out)
        print(f"gradsight: --config {file}: not used, for nothing here is equal: {names}")
    return config.settings


def _text(value: Any) -> str:
    """A value as the command line would give it, so that floats come back bit for bit."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
