"""Which finding follows from which: one cause is told once, with what follows under it. No torch.

A report is read from the top, and a reader of five findings starts with the wrong one. So every
finding that another explains names it in `caused_by`: always a finding of the same report, and
always one that itself follows from none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsight.values.adapters import layer_of
from gradsight.values.findings import Finding

BROKEN = ("GS103", "GS104")
"""Gradients that are not finite."""
_TOO_LONG_STEPS = ("GS610", "GS305", "GS408", "GS406", "GS108", "GS401")
_CUT_OFF = ("GS607", "GS403", "GS301")
_SOON = 5
"""Steps within which a spike's consequences show."""
_JUDGED_EVERY = 10
"""Steps between two looks at a trend, which so begins up to that much before it is said to."""

FOLLOWS_FROM: dict[str, tuple[str, ...]] = {
    "GS101": ("GS302", "GS609", *_TOO_LONG_STEPS, "GS201", "GS202"),
    "GS102": ("GS302", "GS609", *_TOO_LONG_STEPS, "GS201", "GS202", "GS101"),
    "GS103": ("GS606", *_TOO_LONG_STEPS, "GS104", "GS102", "GS202", "GS101", "GS201"),
    "GS104": ("GS606", *_TOO_LONG_STEPS, "GS103", "GS102", "GS202", "GS101", "GS201"),
    "GS105": ("GS106", "GS605", "GS606", "GS604", "GS406", "GS403", "GS204", "GS205", "GS107"),
    "GS106": (
        "GS606",
        "GS611",
        "GS306",
        *_TOO_LONG_STEPS,
        *BROKEN,
        *_CUT_OFF,
        "GS204",
        "GS205",
        "GS107",
    ),
    "GS107": ("GS606", *_TOO_LONG_STEPS, *BROKEN, *_CUT_OFF, "GS207", "GS204", "GS205"),
    "GS108": ("GS605", "GS610"),
    "GS109": ("GS606", *_TOO_LONG_STEPS, *BROKEN),
    "GS201": (*_TOO_LONG_STEPS, "GS202"),
    "GS202": ("GS302", "GS609", *_TOO_LONG_STEPS),
    "GS203": (
        *("GS604", "GS605", "GS606", *_TOO_LONG_STEPS, "GS407", *BROKEN, *_CUT_OFF),
        *("GS204", "GS205", "GS107", "GS106", "GS402", "GS502"),
    ),
    "GS204": ("GS606", *_TOO_LONG_STEPS, "GS403"),
    "GS205": ("GS302", *_TOO_LONG_STEPS, *BROKEN, "GS403", "GS204"),
    "GS206": (
        *("GS601", "GS604", "GS612", "GS605", "GS606", "GS614", "GS607", "GS611", "GS409"),
        *(*_TOO_LONG_STEPS, "GS407"),
        *(*BROKEN, "GS403", "GS404", "GS405", "GS402", "GS304", "GS106", "GS107", "GS301"),
        *("GS204", "GS205", "GS105", "GS203", "GS102", "GS101", "GS202", "GS302", "GS503"),
    ),
    "GS207": ("GS606", *_TOO_LONG_STEPS, *BROKEN, "GS607", "GS403"),
    "GS208": ("GS606", *_TOO_LONG_STEPS, *BROKEN, "GS607", "GS403", "GS207"),
    "GS301": ("GS302", "GS306", "GS607", "GS205", "GS606", "GS403", "GS207"),
    # One line that passes the wrong network to an optimizer causes both findings.
    "GS303": ("GS306",),
    "GS304": ("GS611", "GS409", "GS407", "GS402", "GS405"),
    "GS401": ("GS610", "GS305", "GS303", "GS408", "GS406", "GS108"),
    "GS402": ("GS409", "GS407", "GS405", "GS403", "GS204", "GS105", "GS107"),
    "GS404": (*BROKEN, "GS401"),
    "GS405": ("GS409", "GS610", "GS609", "GS305", "GS401", "GS202"),
    "GS501": ("GS502", "GS407", "GS402", "GS304"),
    "GS503": (*BROKEN, "GS201"),
    "GS607": ("GS205",),
    "GS610": ("GS609",),
}
"""By the code of a finding: what it may follow from, the deepest cause first.

There is no way around in a circle, but for the two kinds of what is not finite: there the earlier
one is the cause.
"""

_SAME_PARAMETERS = {
    *(
        ("GS301", "GS205"),
        ("GS301", "GS306"),
        ("GS301", "GS207"),
        ("GS303", "GS306"),
        ("GS401", "GS408"),
    ),
    ("GS607", "GS205"),
    # zero_grad() of an optimizer does not clear what it does not hold: that adds up.
    *(("GS101", "GS302"), ("GS102", "GS302"), ("GS202", "GS302")),
}
"""Effect and cause that belong together only where they name a parameter in common."""
_SAME_LAYER = {("GS205", "GS302"), ("GS301", "GS302")}
"""The same for a layer: a factor of an adapter gets no gradient while its partner stays at zero."""
_AT_ONCE = {
    *((effect, "GS201") for effect in ("GS101", "GS102", *BROKEN)),
    *(("GS503", cause) for cause in (*BROKEN, "GS201")),
}
"""Effect and cause of which one comes with the other, or within a few steps of it."""
_SEEN_LATE = {"GS306", "GS203", "GS204", "GS206", "GS405"}
"""Checks that look at trends every few steps."""


@dataclass(frozen=True, slots=True)
class Group:
    """A finding that follows from none, and those that follow from it."""

    root: Finding
    consequences: tuple[Finding, ...] = ()

    @property
    def worst(self) -> Finding:
        """The most severe finding of the group; the root, unless a consequence is more severe."""
        # max() returns the first of several that are equal.
        return max((self.root, *self.consequences), key=lambda each: each.severity == "critical")


def with_causes(findings: Sequence[Finding]) -> list[Finding]:
    """The same findings, each with the code of the one that it follows from."""
    by_code = {finding.code: finding for finding in reversed(findings)}
    return [replace(each, caused_by=_root_code(each, by_code)) for each in findings]


def groups(findings: Sequence[Finding]) -> list[Group]:
    """The findings by their causes, in the order in which the causes stand."""
    consequences: dict[str, list[Finding]] = {}
    codes = {finding.code for finding in findings if finding.caused_by is None}
    roots = []
    for finding in findings:
        if finding.caused_by in codes:
            consequences.setdefault(str(finding.caused_by), []).append(finding)
        else:
            roots.append(finding)
    # One list per code: of two findings of one code, the first has them.
    return [Group(root, tuple(consequences.pop(root.code, ()))) for root in roots]


def roots_of(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that follow from none."""
    return [group.root for group in groups(findings)]


def _root_code(finding: Finding, by_code: dict[str, Finding]) -> str | None:
    """The code at the end of the way from effect to cause; None where there is no way."""
    seen = {finding.code}
    now = finding
    while (cause := _direct_cause(now, by_code, seen)) is not None:
        seen.add(cause.code)
        now = cause
    return None if now is finding else now.code


def _direct_cause(effect: Finding, by_code: dict[str, Finding], seen: set[str]) -> Finding | None:
    if _is_of_the_data(effect):
        return None
    for code in FOLLOWS_FROM.get(effect.code, ()):
        cause = by_code.get(code)
        if cause is not None and code not in seen and _explains(cause, effect):
            return cause
    return None


def _explains(cause: Finding, effect: Finding) -> bool:
    pair = (effect.code, cause.code)
    if pair in _SAME_PARAMETERS and not set(effect.parameters) & set(cause.parameters):
        return False
    if pair in _SAME_LAYER and not _layers(effect) & _layers(cause):
        return False
    later = effect.first_step - cause.first_step
    if pair in _AT_ONCE:
        return -1 <= later <= _SOON
    if later == 0 and set(pair) == set(BROKEN):
        return cause.code == "GS103"
    return later >= -(_JUDGED_EVERY if cause.code in _SEEN_LATE else 0)


def _layers(finding: Finding) -> set[str]:
    return {layer_of(name) for name in finding.parameters}


def _is_of_the_data(finding: Finding) -> bool:
    """Whether a broken batch was found to be behind it, which no other finding explains."""
    operation = None if finding.diagnosis is None else finding.diagnosis.operation
    return operation is not None and (operation.phase, operation.operation) == ("before", "input")
