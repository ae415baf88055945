"""What is to be done about a finding, as `watch(..., on_finding=)` was given it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradsight.errors import UsageError
from gradsight.health.registry import CHECKS
from gradsight.values.findings import Finding
from gradsight.values.plain import nearest

STOP = "stop"
SKIP = "skip"
ALERT = "alert"
_NAMED = (STOP, SKIP, ALERT)
_SEVERITIES = ("warning", "critical")
NOT_FINITE = ("GS103", "GS104")
"""The codes of a gradient that is not finite: the only ones that a step can be left out for."""
_EVERY = "every finding"
_FORMS = 'an action is "stop", "skip", "alert", a callable, or a list of these'

_WORD = re.compile(r"[\w ,;-]{0,30}")
"""Texts that are no address."""

Action = str | Callable[[Finding], Any]


@dataclass(frozen=True, slots=True)
class FindingActions:
    """Actions by code, by severity, or for every finding."""

    by_key: Mapping[str, tuple[Action, ...]]

    def of(self, finding: Finding) -> tuple[Action, ...]:
        """What is to be done about this finding: a code goes before a severity."""
        for key in (finding.code, finding.severity, _EVERY):
            if key in self.by_key:
                return self.by_key[key]
        return ()

    def includes(self, name: str) -> bool:
        """Whether an action of this name is asked for, for whatever finding."""
        return any(name in actions for actions in self.by_key.values())

    def is_only(self, name: str) -> bool:
        """Whether nothing but an action of this name is asked for."""
        return all(actions == (name,) for actions in self.by_key.values())

    def for_the_record(self) -> dict[str, list[str]]:
        """The actions as config.json keeps them: a callable by its name."""
        return {key: [_spoken(each) for each in actions] for key, actions in self.by_key.items()}


def finding_actions(given: object) -> FindingActions | None:
    """The actions that a user asks for; an error where they cannot be meant."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return FindingActions({_EVERY: _actions(given)})
    by_key = {}
    for key, actions in given.items():
        by_key[_key(key)] = _actions(actions)
        # A severity may stand for it: among critical findings are those that a step is skipped for.
        if SKIP in by_key[key] and key not in (*NOT_FINITE, "critical"):
            raise UsageError(
                f'on_finding: "skip" leaves out steps whose gradient is not finite, that is '
                f"{' and '.join(NOT_FINITE)}; it cannot be done for {key}"
            )
    return FindingActions(by_key)


def _key(key: object) -> str:
    if isinstance(key, str) and (key in _SEVERITIES or key in CHECKS):
        return key
    known = [*_SEVERITIES, *sorted(CHECKS)]
    raise UsageError(
        f"on_finding: there is no code or severity {_quoted(key)}; {nearest(str(key), known)}"
    )


def _actions(given: object) -> tuple[Action, ...]:
    several = [given]
    is_one = isinstance(given, str | bytes | Mapping) or callable(given)
    if isinstance(given, Iterable) and not is_one:
        several = list(given)
    if not several:
        raise UsageError(f"on_finding: a list without an action; {_FORMS}")
    return tuple(_action(each) for each in several)


def _action(given: Any) -> Action:
    if isinstance(given, str) and given in _NAMED:
        return given
    if callable(given):
        return given  # type: ignore[no-any-return]
    raise UsageError(f"on_finding: {_quoted(given)} is no action; {_FORMS}")


def _quoted(given: object) -> str:
    """What was given, unless it may hold the address of a webhook: that is a secret."""
    if isinstance(given, str):
        return repr(given) if _WORD.fullmatch(given) else "this text"
    if given is None or isinstance(given, int | float):
        return repr(given)
    return f"a {type(given).__name__}"


def _spoken(action: Action) -> str:
    if isinstance(action, str):
        return action
    return getattr(action, "__qualname__", type(action).__name__)
