"""Gradients that were looked at, and what has happened to them since: cleared, edited, added to."""

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.devices import is_accelerator
from gradsight.core.passes import (
    BackwardPass,
    GradientState,
    gradient_state,
    is_same,
    was_only_added_to,
)
from gradsight.core.shards import local_part
from gradsight.measure.host_copy import HostCopy


class ScaledHere(threading.local):
    """In each thread: the scaler that has multiplied a loss there."""

    def __init__(self) -> None:
        # A watch may be opened between `scaler.scale(loss)` and its backward pass.
        self.scaler: torch.amp.GradScaler | None = moments.scaler_in_use()

    def pass_begins(self, begun: BackwardPass) -> None:
        """Several losses may be scaled before the first optimizer steps."""
        scaler = moments.scaler_of(begun.tensors)
        if scaler is not None:
            self.scaler = scaler


class SeenGradients:
    """The rows whose reading stands, as long as nobody forgets them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.rows: dict[int, GradientState | None] = {}
        """Each with its gradient when it was last looked at."""
        self._changed: dict[int, bool | Tensor] = {}
        """Rows that a pass has added to after somebody had edited them, as far as the host knows;
        else a flag that is on the device still.
        """
        self._after_edit: dict[int, GradientState | None] = {}
        """Rows that torch has clipped or unscaled since they were looked at, as it left them."""
        self._clips: dict[int, int] = {}
        """By row: a number that tells by which calls of torch's clipping functions it was edited.

        Rows with the same number went through the same calls.
        """
        self._before_edit: dict[int, GradientState | None] = {}
        self.calls = 0
        """How often torch has clipped or unscaled gradients, these or others."""
        self.by_hand: set[int] = set()
        """Rows that were looked at again, because somebody had edited them after backward."""

    def pass_begins(self, begun: BackwardPass) -> None:
        """Note what was edited since it was looked at, before anything is added to it.

        With each row whether any entry was left: None where the gradient was taken away.
        """
        if not self.rows:
            return
        edited: dict[int, Tensor | None] = {}
        # A copy: in another thread the owner of these gradients may be looking at them.
        for row, state in tuple(self.rows.items()):
            gradient = self._parameters[row].grad
            if row in self._after_edit or not is_same(gradient, state):
                edited[row] = _any_left(gradient)
        begun.notes[self] = edited

    def pass_ended(self, begun: BackwardPass, written: Sequence[int]) -> list[int]:
        """The rows to look at now: what was written, and what nobody has touched since it was seen.

        The latter not for their own sake: gradients of one look have one clip coefficient.
        """
        edited: dict[int, Tensor | None] | None = begun.notes.get(self)
        if not self.rows:
            return list(written)
        for row in written:
            if row in self.rows:
                if edited is None:
                    self._judge_by_version(row, begun)
                else:
                    self._judge(row, edited)
        if len(written) == len(self._parameters):
            return list(written)
        now = set(written)
        untouched = (row for row in self.rows if row not in now and self._is_as_seen(row))
        return sorted(now.union(untouched))

    def _judge_by_version(self, row: int, begun: BackwardPass) -> None:
        """The same where nobody could look before the pass, as other threads' were under way."""
        seen = self.rows[row]
        parameter = self._parameters[row]
        times = begun.writes.get(id(parameter))
        if times is None:  # there was no gradient before
            self._changed.pop(row, None)
        elif seen is None or not was_only_added_to(parameter.grad, seen, times):
            self._changed[row] = True

    def _judge(self, row: int, edited: dict[int, Tensor | None]) -> None:
        """Whether what was written to a row was added to something that had been edited."""
        if row in edited:
            left = edited[row]
            if left is None:
                self._changed.pop(row, None)  # it was cleared, and begins anew
            else:
                # So it was if it was all zero. Asked on an accelerator that would wait for it.
                self._changed[row] = left if is_accelerator(left.device) else bool(left)

    def _is_as_seen(self, row: int) -> bool:
        return is_same(self._parameters[row].grad, self.rows[row])

    def edited(self, rows: Iterable[int]) -> list[int]:
        """Those of these rows that are not what they were when they were looked at."""
        return [row for row in rows if row in self.rows and not self._is_as_seen(row)]

    def edited_by_hand(self, rows: Iterable[int]) -> list[int]:
        """Those of these rows that somebody else than torch's clipping or unscaling has edited."""
        if self._after_edit:
            known = {**self.rows, **self._after_edit}
        else:
            known = self.rows
        parameters = self._parameters
        return [
            row for row in rows if row in known and not is_same(parameters[row].grad, known[row])
        ]

    def edit_begins(self) -> None:
        """Torch is about to clip or to unscale gradients, maybe these."""
        self._before_edit = {row: gradient_state(self._parameters[row].grad) for row in self.rows}

    def edit_ended(self, edited: object) -> None:
        """It has done so: to an optimizer's gradients, or to those of parameters."""
        self.calls += 1
        tensors: Iterable[object] = ()
        if isinstance(edited, Optimizer):
            tensors = (tensor for group in edited.param_groups for tensor in group["params"])
        elif isinstance(edited, Tensor):
            tensors = (edited,)
        elif isinstance(edited, list | tuple):
            tensors = edited
        named = {id(tensor) for tensor in tensors}
        for row, before in self._before_edit.items():
            parameter = self._parameters[row]
            gradient = parameter.grad
            # The version alone is not enough: unscaling and clipping of shards leave it as it was.
            is_edited = id(parameter) in named or not is_same(gradient, before)
            if row in self.rows and is_edited:
                self._after_edit[row] = gradient_state(gradient)
                self._clips[row] = hash((self._clips.get(row), self.calls))
        self._before_edit = {}

    def accept(self, rows: Iterable[int]) -> None:
        """What was done to these has left them as they were, or they are not finite."""
        for row in rows:
            self._after_edit[row] = gradient_state(self._parameters[row].grad)

    @property
    def are_clipped(self) -> bool:
        """Whether torch has clipped any gradient since it was looked at."""
        return bool(self._clips)

    def are_clipped_alike(self, rows: Iterable[int]) -> bool:
        """Whether the same calls have clipped all of these."""
        return len({self._clips.get(row) for row in rows if row in self.rows}) < 2

    def look(self, rows: Sequence[int], by_hand: bool = False) -> None:
        """These are looked at now; `by_hand`: again, as somebody has edited them."""
        parameters = self._parameters
        self.rows.update([(row, gradient_state(parameters[row].grad)) for row in rows])
        if self._after_edit:
            for row in rows:
                self._after_edit.pop(row, None)
                self._clips.pop(row, None)
        if by_hand:
            self.by_hand.update(rows)
        elif self.by_hand:
            self.by_hand.difference_update(rows)

    def are_all(self, rows: Sequence[int]) -> bool:
        """Whether there are no others: each of the others was edited since it was seen."""
        return len(rows) == len(self.rows)

    def is_any_changed(self, rows: Iterable[int]) -> bool | HostCopy:
        """Whether a pass has added to what somebody had edited; it may be on its way."""
        if not self._changed:
            return False
        changed = [self._changed.get(row, False) for row in rows]
        flags = [flag for flag in changed if isinstance(flag, Tensor)]
        if not flags or any(flag is True for flag in changed):
            return any(flag is True for flag in changed)
        there = flags[0].device
        return HostCopy.of(torch.stack([flag.to(there) for flag in flags]).any().reshape(1))

    def forget(self, rows: Sequence[int]) -> None:
        """Their optimizer has stepped."""
        if len(rows) == len(self._parameters):
            self.clear()
            return
        self.by_hand.difference_update(rows)
        for row in rows:
            self.rows.pop(row, None)
            self._changed.pop(row, None)
            self._after_edit.pop(row, None)
            self._clips.pop(row, None)

    def clear(self) -> None:
        """Nothing that was seen counts any more."""
        self.rows.clear()
        self.by_hand.clear()
        self._changed.clear()
        self._after_edit.clear()
        self._clips.clear()


def _any_left(gradient: Tensor | None) -> Tensor | None:
    """Whether an edited gradient has any entry but zeros; on the device still."""
    if gradient is None:
        return None
    entries = local_part(gradient).detach()
    if entries.is_sparse:
        entries = entries.coalesce().values()
    return entries.any()
