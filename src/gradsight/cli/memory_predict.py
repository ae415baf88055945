"""gradsight memory predict: the number people need before they rent a machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from gradsight.cli.memory_step import ModelChoice, StepOptions
from gradsight.errors import UsageError
from gradsight.memory.lora_options import Lora, parse_lora
from gradsight.memory.setting import ALONE, Ranks, StepSetting
from gradsight.values.memory import CheckpointingPlan, MemoryUse

if TYPE_CHECKING:
    from gradsight.memory.predict import ModelFacts

NO_POLICY = "none"
COMPARED = "full"
"""What a table shows beside the plain step where no policy is asked for."""


@Parameter(name="*", name_transform=lambda name: name)
@dataclass(frozen=True)
class TrainingOptions:
    """How the model is trained."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The type of the model's parameters and activations. Default: the type that a configuration
    names or that file.py:build uses, else fp32.
    """
    lora: str | None = None
    """Train adapters on the frozen model, for example r=16 (fp32 adapters, PEFT's modules)."""
    gpus: int | None = None
    """How many devices train the model together."""
    parallel: Literal["ddp", "fsdp2"] | None = None
    """How several devices share the work: DistributedDataParallel, or fully_shard on every block
    and the model; ddp where only --gpus is given.
    """
    device: Literal["cpu", "cuda"] | None = None
    """The device to predict for; cuda needs no GPU. Default: cpu."""

    def refuse_nonsense(self) -> None:
        """Refuse what cannot be meant, before anything is imported or built."""
        if self.gpus is not None and self.gpus < 1:
            raise UsageError(f"--gpus must be 1 or more, got {self.gpus}")
        if self.parallel is not None and self.gpus is None:
            raise UsageError(
                f"--parallel {self.parallel} needs --gpus, for example --gpus 4: how many devices"
            )

    def ranks(self) -> Ranks:
        """The devices; --parallel means nothing on one."""
        if self.gpus is None or self.gpus == 1:
            return ALONE
        return Ranks(self.gpus, self.parallel or "ddp")


@dataclass(frozen=True)
class Question:
    """One model and all that is asked about it."""

    choice: ModelChoice
    step: StepOptions
    training: TrainingOptions
    policy: str
    limit: int | None = None
    """Bytes for which the largest batch and the cheapest plan are looked for."""
    ranks: Ranks = ALONE
    lora: Lora | None = None

    def build(self, batch_size: int | None = None) -> Callable[[], Any]:
        """The build function, with the type and the adapters that were asked for."""
        from gradsight.memory.variants import in_type, with_lora

        build = self.choice.build(batch_size or self.step.batch_size)
        if self.training.dtype is not None and not self.choice.in_type:
            build = in_type(build, self.training.dtype)
        if self.lora is not None:
            build = with_lora(build, self.lora)
        return build

    def setting(self, policy: str) -> StepSetting:
        """The step under one policy."""
        checkpointed = None if policy == NO_POLICY else policy
        blocks = self.step.block_names
        if checkpointed is None and self.ranks.parallel != "fsdp2":
            blocks = None
        optimizer = self.step.optimizer_name
        return StepSetting(checkpointed, optimizer, self.device, blocks, self.ranks)

    @property
    def device(self) -> str:
        return self.training.device or "cpu"


@dataclass(frozen=True)
class Answer:
    """What was predicted of a model."""

    question: Question
    model: "ModelFacts"
    uses: dict[str, MemoryUse]
    """The peak by policy."""
    largest: dict[str, int] = field(default_factory=dict)
    """The largest batch that fits, by policy; empty where none was looked for."""
    plan: CheckpointingPlan | None = None
    """The cheapest plan that fits."""
    smallest: CheckpointingPlan | None = None
    """The plan of the smallest reachable peak, where nothing fits."""

    @property
    def asked(self) -> MemoryUse:
        """The peak under the policy that was asked for."""
        return self.uses[self.question.policy]


def ask(
    place: str | None, step: StepOptions, training: TrainingOptions, architecture: str | None = None
) -> Question:
    """The question that a command line stands for, without policy and limit yet."""
    training.refuse_nonsense()
    lora = None if training.lora is None else parse_lora(training.lora)
    choice = step.choice(place, architecture, training.dtype)
    return Question(choice, step, training, NO_POLICY, ranks=training.ranks(), lora=lora)


def refuse_unknown_batches(questions: list[Question]) -> None:
    """Refuse to look for a batch size where the build function has but one batch."""
    for question in questions:
        if question.limit is not None and question.choice.sized is None:
            raise UsageError(
                "--memory looks for a batch size, and file.py:build makes its own batch: "
                "use --architecture, a configuration, or a build that takes batch_size"
            )


def answer(question: Question, policies: list[str], tell: Callable[[str], None]) -> Answer:
    """Predict a model under each policy, and what fits where that is asked."""
    # torch takes 1.6 s to import: neither --help nor a wrong option may wait for it.
    from gradsight.memory.predict import model_facts, predict_step
    from gradsight.memory.progress import heard_by

    title = question.choice.title
    with heard_by(tell):
        uses = {}
        for policy in policies:
            tell(f"Predicting {title}, policy {policy}")
            uses[policy] = predict_step(question.build(), question.setting(policy))
        facts = model_facts(question.build())
        if question.limit is None:
            return Answer(question, facts, uses)
        largest = {policy: _largest_batch(question, policy, tell) for policy in policies}
        tell(f"Planning {title}")
        plan, smallest = _cheapest_plan(question)
    return Answer(question, facts, uses, largest, plan, smallest)


def _largest_batch(question: Question, policy: str, tell: Callable[[str], None]) -> int:
    """The largest batch on each device that fits under one policy."""
    from gradsight.memory.predict import largest_batch

    assert question.limit is not None
    setting = question.setting(policy)

    def build_for(size: int) -> Callable[[], Any]:
        tell(f"Looking for the largest batch, policy {policy}: {size}")
        return question.build(size)

    return largest_batch(
        build_for,
        question.limit,
        policy=setting.policy,
        optimizer=setting.optimizer,
        device=setting.device,
        ranks=setting.ranks,
    )


def _cheapest_plan(
    question: Question,
) -> tuple[CheckpointingPlan | None, CheckpointingPlan | None]:
    """The plan that fits at the least extra work; else the one of the smallest peak."""
    from gradsight.memory.plan import OverBudget, plan_step

    assert question.limit is not None
    try:
        return plan_step(question.build(), question.limit, question.setting(COMPARED)), None
    except OverBudget as error:
        return None, error.smallest
    except UsageError as error:
        if "no repeated blocks" not in str(error):
            raise
        return None, None
