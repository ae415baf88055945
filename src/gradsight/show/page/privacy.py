"""What a page must not tell: pages get shared. No torch.

No environment, no host, no user; the home folder is `~`; values whose key is like token, key,
secret or password are masked, in settings and in command lines alike.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.values.texts import beginning

MASK = "***"
_LEFT_OUT = frozenset({"env", "environ", "environment", "host", "hostname", "node", "user"})
_LEFT_OUT_TOO = frozenset({"username", "login", "fqdn", "ip"})
_SECRET = frozenset(
    {
        *("token", "key", "apikey", "secret", "password", "passwd", "passphrase", "pwd", "auth"),
        *("authorization", "credential", "credentials", "cookie", "bearer", "accesskey"),
        *("tokens", "keys", "secrets", "passwords"),
    }
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_HOMES = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s:'\"]+|/root(?=[/\s:'\"]|$)")
_ASSIGNED = re.compile(
    r"(?i)((?:token|api[-_]?key|secret|passw(?:or)?d|credential)s?[\"']?\s*[=:]\s*[\"']?)"
    r"[^\s\"',&;]+"
)
_FLAG = re.compile(r"(?i)^--?[\w-]*(?:token|key|secret|password|credential)s?$")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")


def shareable(text: str) -> str:
    """Text without home folders and without what looks like a secret.

    >>> shareable("python /home/ada/train.py --hf_token=abc123 https://ada:pw@host/x")
    'python ~/train.py --hf_token=*** https://***@host/x'
    """
    text = beginning(text)
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(f"{home}/", "~/")
    text = _HOMES.sub("~", text)
    text = _IN_ADDRESS.sub(f"{MASK}@", text)
    text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    return _SHAPES.sub(MASK, text)


def shareable_config(value: Any) -> Any:
    """Settings without secrets, environment, host and user.

    >>> shareable_config({"api_key": "x", "lr": 0.1, "host": "box", "n_key_heads": 4})
    {'api_key': '***', 'lr': 0.1, 'n_key_heads': 4}
    """
    if isinstance(value, str):
        return shareable(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple)):
        return _arguments([shareable_config(each) for each in value])
    return value


def _mapping(settings: Mapping[Any, Any]) -> dict[str, Any]:
    shown = {}
    for key, value in settings.items():
        name = str(key)
        words = [word.lower() for word in _WORDS.findall(name)]
        if "_".join(words) in _LEFT_OUT | _LEFT_OUT_TOO:
            continue
        shown[shareable(name)] = MASK if _is_secret(words, value) else shareable_config(value)
    return shown


def _is_secret(words: list[str], value: Any) -> bool:
    """Whether a value is hidden; counts such as num_key_value_heads are none of a key's values."""
    if value is None or isinstance(value, bool):
        return False
    if isinstance(value, (int, float)):
        return bool(words) and words[-1] in _SECRET and not words[-1].endswith("s")
    return not _SECRET.isdisjoint(words)


def _arguments(values: list[Any]) -> list[Any]:
    """A command line: what follows `--token` is masked."""
    shown = list(values)
    for place, value in enumerate(values[:-1]):
        if isinstance(value, str) and _FLAG.match(value):
            shown[place + 1] = MASK
    return shown


def run_label(path: Path) -> str:
    """A run's folder by a name that says nothing of the machine: below the working folder its path.

    >>> run_label(Path("/somewhere/else/runs/first"))
    'first'
    """
    whole = path.resolve()
    try:
        label = whole.relative_to(Path.cwd()).as_posix()
    except ValueError:
        label = whole.name
    return whole.name if label == "." else label
