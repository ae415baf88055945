"""gradsight explain [CODE]: the page of a check, made from the check itself. No torch."""

import inspect
import textwrap
from collections.abc import Iterator

from gradsight.errors import UsageError
from gradsight.health import judge
from gradsight.health.registry import CHECKS, MISSING, Advice, Check
from gradsight.values.causes import FOLLOWS_FROM
from gradsight.values.plain import nearest

assert judge  # importing it files the checks

_WIDTH = 79
_WHEN = {
    "step": "at every step",
    "stretch": "every ten steps",
    "look": "at steps measured in detail: often during the first steps, then every 50",
    "ranks": "whenever the gradients of ranks were compared",
    "digests": "when the checksums of all ranks have arrived, at three of the first nine steps",
    "networks": "at the end of a script under `gradsight check` or `gradsight run`",
    "first": "once, when the first step has been examined",
    "passes": "at steps whose backward passes are recorded: the first four, then two in every 25",
}
_SHARE = "A share is a fraction of 1: 0.5 is half."
_WHY = "Why:"


def explain(code: str | None = None, /) -> int:
    """Print what a check looks for, why, when it runs, its settings, and how to fix the fault.

    Without a code, list all checks with a line each. Exits with 64 for an unknown code.

    Parameters
    ----------
    code
        The code of a finding, such as GS401.
    """
    if code is None:
        print(listed_checks())
    else:
        print(explained(code))
    return 0


def explained(code: str) -> str:
    """Everything there is to say of one check."""
    check = CHECKS.get(code.upper())
    if check is None:
        known = ", ".join(sorted(CHECKS))
        raise UsageError(
            f"there is no check {code!r}; {nearest(code.upper(), sorted(CHECKS))}. "
            f"All of them: {known}"
        )
    sections = [[f"{check.code} {check.name} ({check.severity}; {check.family})"]]
    sections += [_headed(title, lines) for title, lines in _sections(check)]
    return "\n\n".join("\n".join(section) for section in sections)


def listed_checks() -> str:
    """Every check with a line."""
    return "\n".join(f"{code}  {check.name}: {check.meaning}" for code, check in _sorted())


def _sorted() -> list[tuple[str, Check]]:
    return sorted(CHECKS.items())


def _sections(check: Check) -> Iterator[tuple[str, list[str]]]:
    what, why = _what_and_why(check)
    yield "What", _wrapped(what)
    yield "Why", _wrapped(why)
    yield "How it is judged", _judged(check)
    yield "Fix", _fixed(check.advice)
    if check.advice.if_clipped is not None:
        yield "Fix, if the run clips its gradients already", _fixed(check.advice.if_clipped)
    causes = [code for code in FOLLOWS_FROM.get(check.code, ()) if code in CHECKS]
    if causes:
        named = ", ".join(f"{code} {CHECKS[code].name}" for code in dict.fromkeys(causes))
        yield (
            "What it may follow from",
            _wrapped(f"{named}. If you have one of these, fix it first."),
        )
    yield "How to silence it", _silenced(check)


def _what_and_why(check: Check) -> tuple[str, str]:
    """The paragraphs of its docstring, those of its reasons apart."""
    text = inspect.getdoc(check.function) or check.name
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    why = [each.removeprefix(_WHY).strip() for each in paragraphs if each.startswith(_WHY)]
    what = [each for each in paragraphs if not each.startswith(_WHY)]
    reasons = " ".join(why)
    return " ".join(what), f"{reasons[:1].upper()}{reasons[1:]}"


def _judged(check: Check) -> list[str]:
    text = f"The check runs {_WHEN[check.asked.when]}."
    patience = check.defaults.get("patience", 1)
    if patience > 1:
        text += f" It reports a finding after {patience} results in a row agree."
    for need in check.asked.needs:
        text += f" It abstains if {MISSING[need]}."
    lines = _wrapped(text)
    if check.defaults:
        lines += ["", "Its settings and their values:"]
        lines += [f"    {name} = {value:g}" for name, value in check.defaults.items()]
    if "share" in check.defaults:
        lines += [_SHARE]
    return lines


def _fixed(advice: Advice) -> list[str]:
    return [*_wrapped(advice.recommendation), "", *advice.fix.splitlines()]


def _silenced(check: Check) -> list[str]:
    lines = [f'gradsight.watch(model, optimizer, health={{"{check.code}": False}})']
    if check.defaults:
        name, value = next(iter(check.defaults.items()))
        lines.append(f'to tune it: health={{"{check.code}": {{"{name}": {value:g}}}}}')
    lines.append(f"in the TOML file of gradsight check --health: {check.code} = false")
    return lines


def _headed(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"    {line}".rstrip() for line in lines)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 4, break_on_hyphens=False)
