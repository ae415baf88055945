"""The loss of a batch, run so that its backward pass is scored, in one pass or in two."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.core.beside import beside_training, eager
from gradsight.core.random_state import all_states, foreign_states, seed_foreign, set_all_states
from gradsight.core.sharing import reshard, without_reduction
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.arguments import calling_loss_fn
from gradsight.ghost.blocks import BlockScorer
from gradsight.ghost.joined_batch import JoinedBatch
from gradsight.ghost.loss_calls import (
    JoinedLossCall,
    LossCalls,
    find_loss_calls,
    refuse_other_losses,
)
from gradsight.ghost.observation import Observation
from gradsight.ghost.one_pass import OnePassRefusal
from gradsight.ghost.one_pass_check import as_in_training
from gradsight.ghost.open_pass import weakly
from gradsight.ghost.pass_choice import PassChoice
from gradsight.ghost.selfcheck import rounding
from gradsight.ghost.targets import LossFn, check_loss


@dataclass(frozen=True, slots=True)
class Announced:
    """A batch that is to be scored."""

    batch: Any
    ids: list[int | str] | None
    domains: list[str | None] | None
    step: int | None


class TrainingPasses:
    """Chooses the pass of every block, and runs losses in it."""

    def __init__(self, blocks: BlockScorer, loss_fn: LossFn, choice: PassChoice) -> None:
        self._blocks = blocks
        self._loss_fn = loss_fn
        self._choice = choice
        self._calls: LossCalls | None = None
        self._tried: set[bool] = set()
        """Of the two ways to a loss, inside and outside of the model, those that were tried."""

    def loss(self, announced: Announced) -> Tensor:
        """The loss of a batch; when its backward pass has returned, the scores are there."""
        self._blocks.abandon()
        joined = self._joined(announced)
        loss = None if joined is None else self._loss_of_one_pass(joined, announced)
        return self._loss_of_two_passes(announced) if loss is None else loss

    def _loss_of_one_pass(self, joined: JoinedLossCall, announced: Announced) -> Tensor | None:
        """None where two passes have to be taken instead: nothing of this one is left then."""
        blocks = self._blocks
        states = all_states(blocks.parameters.root.modules())
        try:
            observation, one_pass = blocks.begin_joined(
                joined.parts, announced.step, splits_loss=joined.calls.inside
            )
            loss = joined.run(one_pass)
            check_loss(loss, "on the training batch")
            observation.judge(loss)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except GradsightError as error:
            if blocks.group.size > 1:
                raise  # several processes must go the same way
            blocks.abandon()
            self._choice.refused(error, for_good=False)
            set_all_states(states)
            return None
        self._end_with_backward(observation, announced)
        return loss

    def _loss_of_two_passes(self, announced: Announced) -> Tensor:
        size = None if announced.ids is None else len(announced.ids)
        observation = self._blocks.begin(size, announced.step)
        with calling_loss_fn("on the training batch", announced.batch):
            loss = self._loss_fn(self._blocks.model, announced.batch)
        check_loss(loss, "on the training batch")
        observation.judge(loss)
        self._end_with_backward(observation, announced)
        return loss

    def _end_with_backward(self, observation: Observation, announced: Announced) -> None:
        observation.look_away()
        observation.on_finished = partial(
            weakly(self._blocks.end_later), announced.ids, announced.domains
        )

    def joined_pair(self, x: Any, y: Any, step: int | None) -> JoinedBatch | None:
        """The rows of a pair (X, Y) with every target's; None where two passes are right."""

        def join() -> JoinedLossCall:
            batches = self._blocks.targets.batches
            targets = {name: _as_pair(name, batch) for name, batch in batches.items()}
            calls = LossCalls(self._blocks.model, self._loss_fn, inside=True)
            return JoinedLossCall(calls, [(x, y)], JoinedBatch((x, y), targets))

        found = self._chosen(join, (x, y), step)
        return None if found is None else found.joined

    def _joined(self, announced: Announced) -> JoinedLossCall | None:
        def join() -> JoinedLossCall:
            if self._calls is None:
                root = self._blocks.parameters.root
                self._calls = find_loss_calls(
                    self._blocks.model, root, self._loss_fn, announced.batch
                )
            return self._calls.join(announced.batch, self._blocks.targets.batches)

        return self._chosen(join, announced.batch, announced.step)

    def _chosen(
        self, join: Callable[[], JoinedLossCall], batch: Any, step: int | None
    ) -> JoinedLossCall | None:
        """The joined call, where one pass is possible and a bargain."""
        choice = self._choice
        if not choice.possible:
            choice.say_settings()
            return None
        first = not self._tried
        try:
            joined: JoinedLossCall = self._agreed(join)
            if first or joined.calls.inside not in self._tried:
                self._agreed(partial(self._try, joined, batch))
        except GradsightError as error:
            # Several processes must go the same way: later refusals are each one's own.
            if not first and self._blocks.group.size > 1:
                raise
            choice.refused(error, for_good=first)
            return None
        choice.begin_block(self._blocks.step_to_come(step))
        several = self._blocks.group.size > 1
        if not several and not choice.is_cheaper(joined.parts.train, sum(joined.parts.targets)):
            return None
        return joined

    def _agreed(self, action: Any) -> Any:
        """What an action gives; before the first block a refusal anywhere is one everywhere."""
        if self._tried or self._blocks.group.size == 1:
            return action()
        result = None
        fault: GradsightError | None = None
        try:
            result = action()
        except GradsightError as error:
            fault = error
        refused = self._blocks.group.sum(torch.tensor(float(fault is not None)))
        if float(refused) > 0:
            raise fault or OnePassRefusal("another process refuses one pass.")
        return result

    def _try(self, joined: JoinedLossCall, batch: Any) -> None:
        """Run one pass beside training, and compare its losses with those of single passes."""
        blocks = self._blocks
        blocks.refuse_other_targets()
        root = blocks.parameters.root
        sharded = blocks.group.sharded
        with without_reduction(blocks.model):
            with as_in_training(root, sharded=sharded), torch.no_grad():
                training = self._loss_fn(blocks.model, batch).detach()
            with beside_training(root, evaluating=True), eager(), torch.no_grad():
                targets = [
                    self._loss_fn(blocks.model, each).detach()
                    for each in blocks.targets.batches.values()
                ]
            reshard(blocks.model)
            with as_in_training(root, sharded=sharded):
                found = self._losses_of_trial(joined)
        names = ["the training batch", *(f"target {name!r}" for name in blocks.targets.names)]
        refuse_other_losses(found, [training, *targets], names, rounding(blocks.parameters))
        self._tried.add(joined.calls.inside)

    def _losses_of_trial(self, joined: JoinedLossCall) -> list[Tensor]:
        observation, one_pass = self._blocks.rehearsal(
            joined.parts, splits_loss=joined.calls.inside
        )
        try:
            observation.start()
            # From a state of our own: a model that seeds numpy in every call leaves one state
            # behind.
            seed_foreign(8_675_309)
            before = foreign_states()
            loss = joined.run(one_pass)
            check_loss(loss, "on the training batch")
            observation.refuse_unsplit(loss)
            if foreign_states() != before:
                raise OnePassRefusal(
                    "the model uses random numbers of numpy or Python. In one pass, Gradsight "
                    "cannot switch them off for the validation rows."
                )
            if joined.joined.pads_training and observation.dropped_out:
                raise OnePassRefusal(
                    "padding the training rows to the length of the validation rows would change "
                    "their dropout masks."
                )
            return [loss.detach(), *one_pass.losses.values()]
        finally:
            observation.stop()
            observation.release()


def _as_pair(name: str, batch: Any) -> tuple[Any, ...]:
    """A target's data as a pair (X, Y)."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in batch):
        raise OnePassRefusal(
            f"the batch-wise protocol needs validation data as a pair (X, Y) of tensors; target "
            f"{name!r} is {type(batch).__name__}."
        )
    return tuple(batch)
