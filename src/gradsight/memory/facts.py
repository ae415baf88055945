"""What a model is, apart from what its step takes: counted on fake tensors."""

from collections import Counter
from dataclasses import dataclass

from gradsight.memory.predict import fake_device
from gradsight.memory.workload import Build, call_build

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Parameters of a whole model, however many devices share them."""

    parameters: int
    trainable: int
    dtype: str
    """The type that most parameters have."""


def model_facts(build: Build) -> ModelFacts:
    """Count the parameters of a model that is never filled."""
    with fake_device("cpu"):
        parameters = list(call_build(build).model.parameters())
        counts: Counter[str] = Counter()
        for parameter in parameters:
            name = str(parameter.dtype).removeprefix("torch.")
            counts[NAMES.get(name, name)] += parameter.numel()
        trainable = [each.numel() for each in parameters if each.requires_grad]
    dtype = counts.most_common(1)[0][0] if counts else "fp32"
    return ModelFacts(sum(counts.values()), sum(trainable), dtype)
