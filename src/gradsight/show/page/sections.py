"""The words of the page: findings, samples, memory, incidents, what could not be seen. No torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from gradsight.show.experts import ExpertNorms
from gradsight.show.influence import Influence
from gradsight.show.page.encode import packed
from gradsight.show.page.series import number
from gradsight.show.samples import TextOf
from gradsight.show.summary import Summary
from gradsight.values.causes import groups
from gradsight.values.diagnoses import Diagnosis, GuiltySample, Incident
from gradsight.values.dumps import DumpMetadata
from gradsight.values.findings import Finding, Problem
from gradsight.values.health_report import Abstention
from gradsight.values.plain import counted, plain
from gradsight.values.sizes import format_size
from gradsight.values.steps import Scalar
from gradsight.values.texts import for_terminal
from gradsight.values.wording import diagnosis_lines, named, short_place

_MOST_NAMES = 200
_MOST_SAMPLES = 4
_LEAST_SHARE = 0.01
_MOST_TEXT = 600
_TOP = 8
_MOST_DOMAINS = 30
_MOST_LISTED = 100
_COSTS = {
    "seconds_per_step": "time of the training thread, per step",
    "steps": "measured over so many steps",
}
_MONITORED = {
    "memory/gpu_allocated_gb": "GPU, allocated",
    "memory/gpu_reserved_gb": "GPU, reserved",
    "memory/rss_gb": "process, resident",
    "memory/tensor_gb": "tensors",
}


def verdict(summary: Summary) -> dict[str, str]:
    """The status, the sentence, and how many findings of which severity there are."""
    # What follows from another is counted under it: its cause stands for the worst of both.
    findings = [group.worst.severity for group in groups(summary.health.findings)]
    counts = []
    for severity in ("critical", "warning"):
        found = findings.count(severity)
        if found:
            counts.append(f"{found} {severity}")
    status = summary.severity
    if summary.failure is not None and status == "healthy":
        status = "warning"
    return {
        "status": status,
        "sentence": summary.sentence,
        "counts": ", ".join(counts) or status,
    }


def finding_section(finding: Finding, text_of: TextOf) -> dict[str, Any]:
    """A finding with its cause, and the text of its guilty samples where that may be shown."""
    shown: dict[str, Any] = {
        name: getattr(finding, name)
        for name in ("code", "name", "severity", "first_step", "evidence", "message", "family")
    }
    shown["caused_by"] = finding.caused_by
    shown["recommendation"] = finding.recommendation
    shown["fix"] = finding.fix
    shown["parameters"] = list(finding.parameters[:_MOST_NAMES])
    shown["more"] = max(0, len(finding.parameters) - _MOST_NAMES)
    shown["incident"] = finding.incident
    if finding.diagnosis is not None:
        shown["cause"] = cause_section(finding.diagnosis, text_of)
    return shown


def cause_section(diagnosis: Diagnosis, text_of: TextOf) -> dict[str, Any]:
    """What was found out about a bad step: in words, the line of source, the samples."""
    operation = diagnosis.operation
    shown: dict[str, Any] = {
        # The page wraps by itself.
        "lines": diagnosis_lines(diagnosis, width=10_000),
        "samples": [_guilty(each, diagnosis, text_of) for each in _worst(diagnosis)],
    }
    if operation is not None and operation.source:
        place = short_place(operation.place) if operation.place else ""
        shown["source"] = {"place": place, "text": operation.source.strip("\n")}
    return shown


def _worst(diagnosis: Diagnosis) -> list[GuiltySample]:
    """The samples that have a real part in the step: the worst, and those that come near it."""
    few = diagnosis.samples[:_MOST_SAMPLES]
    near = [each for each in few[1:] if each.share is None or each.share >= _LEAST_SHARE]
    return [*few[:1], *near]


def _guilty(sample: GuiltySample, diagnosis: Diagnosis, text_of: TextOf) -> dict[str, Any]:
    text = None
    if sample.sample_id is not None:
        text = text_of(str(sample.sample_id))
    return {
        "name": named(sample, diagnosis.micro_batches > 1),
        "norm": number(sample.norm),
        "share": sample.share,
        "text": None if text is None else text[:_MOST_TEXT],
    }


def incident_section(incident: Incident, text_of: TextOf) -> dict[str, Any]:
    """An incident: what happened, where it is kept, whether it can be run again."""
    shown: dict[str, Any] = {
        "step": incident.step,
        "code": incident.code,
        "reason": incident.damage or incident.reason,
        "place": f"incidents/step{incident.step}-{incident.code}",
        "replayable": incident.replayable,
    }
    if incident.diagnosis is not None:
        shown["cause"] = cause_section(incident.diagnosis, text_of)
    return shown


def sample_section(influence: Influence | None, text_of: TextOf) -> dict[str, Any] | None:
    """Samples and domains by influence."""
    if influence is None:
        return None
    few = max(1, min(_TOP, len(influence.scores) // 2))
    places = range(len(influence.scores))
    tallies, edges = influence.histogram(24)
    return {
        "target": influence.target,
        "rows": influence.rows,
        "samples": len(influence.scores),
        "first": influence.first_step,
        "last": influence.last_step,
        "not_finite": influence.not_finite,
        "best": [_sample(influence, place, text_of) for place in list(places)[: -few - 1 : -1]],
        "worst": [_sample(influence, place, text_of) for place in places[:few]],
        "domains": [
            {
                "name": domain.name,
                "score": number(domain.score),
                "samples": domain.samples,
                "below_zero": domain.below_zero,
                "over_time": [None if each is None else number(each) for each in domain.over_time],
            }
            for domain in influence.domains[:_MOST_DOMAINS]
        ],
        "more_domains": max(0, len(influence.domains) - _MOST_DOMAINS),
        "histogram": {"counts": tallies.tolist(), "edges": edges.tolist()},
    }


def _sample(influence: Influence, place: int, text_of: TextOf) -> dict[str, Any]:
    sample_id = str(influence.sample_ids[place])
    text = text_of(sample_id)
    return {
        "id": sample_id,
        "domain": influence.sample_domains[place],
        "score": number(influence.scores[place]),
        "seen": int(influence.seen[place]),
        "text": None if text is None else text[:_MOST_TEXT],
    }


def memory_table(memory: Iterable[Scalar]) -> dict[str, Any] | None:
    """A step's memory by kind, plain and with checkpointing, and what was seen while training."""
    series: dict[str, list[Scalar]] = {}
    for scalar in memory:
        series.setdefault(scalar.name, []).append(scalar)
    last = {name: values[-1].value for name, values in series.items()}
    if not series:
        return None
    kinds = {}
    for name, value in last.items():
        if name.startswith("checkpointing/plain/"):
            kind = name.removeprefix("checkpointing/plain/").removesuffix("_gb")
            other = last.get(f"checkpointing/optimized/{kind}_gb", 0.0)
            kinds[kind] = [value * 1e9, other * 1e9]
    watched = []
    for name, label in _MONITORED.items():
        if name in series:
            values = [scalar.value * 1e9 for scalar in series[name]]
            watched.append([label, values[0], values[-1], max(values)])
    totals = {
        name: last.get(f"checkpointing/{name}")
        for name in ("baseline_gb", "optimized_gb", "reduction", "extra_flops")
    }
    return {
        "kinds": kinds,
        "totals": totals,
        "identical": last.get("checkpointing/gradients_identical"),
        "predicted_gb": last.get("memory/predicted_peak_gb"),
        "watched": watched,
    }


def dump_rows(dumps: list[DumpMetadata]) -> dict[str, Any]:
    """The gradients on the disk."""
    total = format_size(sum(dump.bytes for dump in dumps))
    shown = [
        [dump.step, dump.kind, format_size(dump.bytes), dump.reason, dump.gradient]
        for dump in dumps[-_MOST_LISTED:]
    ]
    return {"count": len(dumps), "total": total, "rows": shown}


def blind_spots(problems: Iterable[Problem], abstained: Iterable[Abstention]) -> dict[str, Any]:
    """What Gradsight could not do, and the checks that could not judge, by reason."""
    faults = [
        f"{problem.message} (from step {problem.first_step}, {problem.count}x)"
        for problem in problems
    ]
    reasons: dict[str, list[str]] = {}
    for each in abstained:
        reasons.setdefault(each.reason, []).append(f"{each.code} {each.name}")
    return {"problems": faults, "abstained": [[names, why] for why, names in reasons.items()]}


def cost_rows(cost: Any) -> list[list[str]] | None:
    """What Gradsight itself took, as names and values; None where nobody measured it."""
    if not cost:
        return None
    values = plain(cost)
    if not isinstance(values, dict):
        return None
    rows = []
    for key, value in values.items():
        name = str(key)
        rows.append([_COSTS.get(name, name), _cost(name, value)])
    return rows


def _cost(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    if "bytes" in name:
        return format_size(value)
    if "seconds" in name:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.4g}"


def measured_on(summary: Summary) -> str:
    """What the norms are norms of."""
    text = f"L2 norm of the gradient {summary.config.get('gradient', '')}".strip()
    other = [step for step in summary.steps if step.gradient != "true"]
    if other:
        kinds = ", ".join(sorted({step.gradient for step in other}))
        text += f"; but on {counted(len(other), 'step')}: {kinds}"
    return f"{text}."


def expert_section(experts: Mapping[str, ExpertNorms]) -> list[dict[str, Any]]:
    """By group of experts: its looks, and a code for every expert at each of them."""
    return [
        {
            "name": for_terminal(name),
            "size": group.size,
            "steps": group.steps,
            "codes": packed(group.codes()),
        }
        for name, group in experts.items()
    ]
