"""One dump from staged pieces to a complete folder: offered, planned, written, completed.

Whatever goes wrong on one rank is told to all in the next exchange, so that no rank waits for
another that has given up, and either every rank knows the dump complete or none does.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gradsight.core import files
from gradsight.core.group import ProcessGroup
from gradsight.dump import full, sampled
from gradsight.dump.folders import Layout
from gradsight.dump.full import Shard
from gradsight.dump.gradients import Gradients, Row
from gradsight.dump.manifest import NAME, SCHEDULE, Chunk, Entry, Manifest, Stored, encode
from gradsight.dump.plan import Fault, Offer, Plan, decide
from gradsight.dump.staging import Buffer, Span
from gradsight.measure.clipping import ClipReading, joint_coefficient
from gradsight.measure.host_copy import HostCopy

T = TypeVar("T")
FRAME_BYTES = 2048
"""More than what is written around one piece."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the gradient beside its values; a watch knows more than a user's call."""

    gradient: str = "as found in .grad"
    """Its form: "true" is accumulated, reduced, unscaled, before clipping."""
    reason: str = SCHEDULE
    clip_coef: float | None = None
    """What clipping multiplies this gradient with; None where that is not known."""
    scale: float | None = None
    """The loss scale; None without one."""
    divisor: float = 1.0
    """What the values found must be divided by to be unscaled."""
    late: "LateFacts | None" = None
    """What is on its way from the device still."""

    @property
    def is_scaled(self) -> bool:
        """Whether the values found carry a loss scale."""
        return self.divisor != 1.0 or (self.late is not None and self.late.scale is not None)

    def settled(self) -> "Facts":
        """The same, with what was on its way; waits for the device, so for the writer's thread."""
        if self.late is None:
            return self
        scale = self.scale if self.late.scale is None else self.late.scale.number()
        clip_coef = joint_coefficient(self.late.clips) if self.late.clips else self.clip_coef
        divisor = self.divisor if scale is None else scale
        return replace(self, scale=scale, divisor=divisor, clip_coef=clip_coef, late=None)


@dataclass(frozen=True, slots=True)
class LateFacts:
    """Numbers that nobody has waited for yet."""

    scale: HostCopy | None = None
    """The loss scale that the gradient carries."""
    clips: tuple[ClipReading | None, ...] = ()
    """How much each optimizer used of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be kept, and how many rows are dumped."""

    keep_last: int | None = None
    max_bytes: int | None = None
    first_n: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A dump to be written; without a buffer, the word to other ranks that this one gave it up."""

    step: int
    facts: Facts
    gradients: Gradients
    buffer: Buffer | None = None
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class DumpOutcome:
    """How a dump ended: complete unless `fault`; `notes` are lesser troubles."""

    fault: Fault | None = None
    bytes: int = 0
    notes: tuple[Fault, ...] = field(default_factory=tuple)


def run(
    job: Job, layout: Layout, ranks: ProcessGroup, limits: Limits, first: bool = False
) -> DumpOutcome:
    """Write one dump together with the other ranks, which have all come for it."""
    facts = _guarded(job.facts.settled)
    job = replace(job, fault=facts) if isinstance(facts, Fault) else replace(job, facts=facts)
    offers: list[Any] = ranks.gather_objects(_guarded(lambda: _offer(job))) or []
    decision: Any = None
    if ranks.is_first:
        decision = _guarded(lambda: _prepare(job, offers, layout, limits, first))
    plan: Plan | Fault = ranks.from_first(decision)
    if isinstance(plan, Fault):
        return DumpOutcome(plan)
    shards = _write(job, layout, limits, ranks, plan, offers)
    ending: Any = None
    if ranks.is_first:
        ending = _complete(job, layout, limits, plan, offers, shards)
    outcome: DumpOutcome = ranks.from_first(ending)
    return outcome


def _guarded(action: Callable[[], T]) -> T | Fault:
    """What an action returns, or what stopped it."""
    try:
        return action()
    except OSError as error:
        text = str(error.strerror or error)
        if error.filename:
            text += f": {error.filename}"
        return Fault("disk", text)
    except Exception as error:
        return Fault("fault", f"{type(error).__name__}: {error}")


def _offer(job: Job) -> Offer | Fault:
    """What this rank has to give; pieces that others may have too carry a checksum."""
    if job.fault is not None or job.buffer is None:
        return job.fault or Fault("fault", "nothing was staged")
    job.buffer.settle(job.facts.divisor)
    rows = tuple(full.checked(job.buffer, span) for span in job.buffer.spans)
    gradients = job.gradients
    return Offer(
        job.step, rows, gradients.parameters, gradients.aliases, gradients.left_out, gradients.seen
    )


def _prepare(
    job: Job, offers: Sequence[Offer | Fault], layout: Layout, limits: Limits, first: bool
) -> Plan | Fault:
    """Decide who writes what, and see to it that it can be written."""
    plan = decide(offers)
    if isinstance(plan, Fault):
        return plan
    needed = sum(plan.lengths) + FRAME_BYTES * sum(len(indices) for indices in plan.choices)
    total = sum(plan.lengths)
    if limits.max_bytes is not None and total > limits.max_bytes:
        allowed = f"max_bytes={limits.max_bytes:,}"
        return Fault("size", f"one dump takes {total:,} bytes, more than {allowed} allows")
    free = files.free_bytes(layout.root)
    if needed > free:
        text = f"the dump needs {needed:,} bytes, {free:,} are free"
        return Fault("disk", f"not enough space in {layout.root}: {text}")
    if first:
        # Only the first dump of a process can meet what another, killed one has left.
        layout.recover()
    layout.prepare(job.step)
    return plan


def _write(
    job: Job,
    layout: Layout,
    limits: Limits,
    ranks: ProcessGroup,
    plan: Plan,
    offers: Sequence[Offer],
) -> list[Shard | Fault]:
    """Write this rank's share, and gather at rank 0 what all have written."""
    assert job.buffer is not None
    folder = layout.partial(job.step)
    buffer = job.buffer
    spans: list[Span] = [buffer.spans[index] for index in plan.choices[ranks.rank]]
    if limits.first_n is None:
        mine = _guarded(lambda: full.write_shard(folder, ranks.rank, buffer, spans))
        return ranks.gather_objects(mine) or []
    parts = sampled.bring_together(ranks, buffer, spans, plan)
    if not ranks.is_first:
        return []
    rows = limits.first_n
    return [_guarded(lambda: sampled.write_samples(folder, plan, offers, parts, rows))]


def _complete(
    job: Job,
    layout: Layout,
    limits: Limits,
    plan: Plan,
    offers: Sequence[Offer],
    shards: Sequence[Shard | Fault],
) -> DumpOutcome:
    """Write the manifest, make the dump visible, let old ones go; or clear away what there is."""
    written = [shard for shard in shards if isinstance(shard, Shard)]
    faults = [(rank, shard) for rank, shard in enumerate(shards) if isinstance(shard, Fault)]
    ending: Manifest | Fault
    if faults:
        rank, ending = faults[0]
        if len(shards) > 1:
            ending = Fault(ending.key, f"rank {rank}: {ending.message}")
    else:
        ending = _guarded(lambda: _seal(job, layout, limits, plan, offers, written))
    if isinstance(ending, Fault):
        _guarded(lambda: layout.discard(job.step))
        return DumpOutcome(ending)
    trouble = _guarded(lambda: layout.trim(limits.keep_last, limits.max_bytes))
    notes = _notes(ending)
    if not isinstance(trouble, Fault) and job.step in trouble:
        text = "the first dumps of findings take all of max_bytes; newer dumps do not stay"
        notes.append(Fault("full", f"{text} (max_bytes={limits.max_bytes:,})"))
    if isinstance(trouble, Fault):
        notes.append(Fault("old dumps", f"an old dump could not be removed: {trouble.message}"))
    return DumpOutcome(bytes=ending.bytes, notes=tuple(notes))


def _seal(
    job: Job,
    layout: Layout,
    limits: Limits,
    plan: Plan,
    offers: Sequence[Offer],
    shards: Sequence[Shard],
) -> Manifest:
    """The last writes of a dump: the index for torch, the manifest, the rename."""
    folder = layout.partial(job.step)
    chunks: dict[str, list[Chunk]] = {}
    for shard in shards:
        for name, record in shard.records:
            chunks.setdefault(name, []).append(record.chunk)
    # Reversed, so that the lowest rank's row is the one that stays.
    rows = {row.name: row for offer in reversed(offers) for row in offer.rows}
    tensors = {name: _entry(rows[name], chunks[name]) for name in plan.parameters if name in chunks}
    stored: dict[str, Stored] = {name: file for shard in shards for name, file in shard.files}
    if layout.kind == "full":
        stored[full.METADATA] = full.write_metadata(folder, tensors, shards)
    manifest = Manifest(
        kind=layout.kind,
        step=job.step,
        created=time.time(),
        world_size=len(offers),
        gradient=job.facts.gradient,
        tensors=tensors,
        files=stored,
        parameters=plan.parameters,
        aliases=plan.aliases,
        left_out=plan.left_out,
        reason=job.facts.reason,
        clip_coef=job.facts.clip_coef,
        scale=job.facts.scale,
        save_first_n=limits.first_n,
    )
    files.write_file(folder / NAME, [encode(manifest)])
    layout.commit(job.step)
    return manifest


def _entry(row: Row, chunks: Sequence[Chunk]) -> Entry:
    """One gradient of the manifest."""
    place = row.place
    ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offsets))
    return Entry(
        place.shape,
        row.dtype,
        ordered,
        row.parameter_shape,
        row.layout,
        row.source,
        place.mesh,
        place.placements,
    )


def _notes(manifest: Manifest) -> list[Fault]:
    """What the manifest admits and the user should hear."""
    notes = []
    if manifest.left_out:
        name, why = next(iter(manifest.left_out.items()))
        text = f"{len(manifest.left_out)} gradients are not in the dump; {name}: {why}"
        notes.append(Fault("left out", text))
    return notes


def without_tensors(gradients: Gradients) -> Gradients:
    """The same gradients, no longer keeping the model's memory alive."""
    return replace(gradients, tensors=())
