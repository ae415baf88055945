"""Predictions of memory beside other tools': accuracy, seconds, and peaks when checkpointed.

    python benchmarks/memory.py                  all tables
    python benchmarks/memory.py --models llama   one model
    python benchmarks/memory.py --speed          CPU seconds of one thread for large models

Truth is the measured peak of a real step with AdamW on the CPU. torch's MemTracker runs the same
step on fake tensors; accelerate's estimate is four times the weights; torch's planner of selective
checkpointing (SAC) asks for a CUDA device, and is run in a process of its own because it aborts
without one. Hugging Face's own checkpointing recomputes as much as `full`.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cyclopts
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsight import measure_peak_memory, plan_checkpointing, predict_peak_memory
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.workload import Workload, as_workload, backward, make_optimizer, warm_up

Build = Callable[[], tuple[Any, Any]]
TOKENS = (4, 128)
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SHAPE, "intermediate_size": 256}),
    "gpt2": ("GPT2", {"vocab_size": 1000, "n_embd": 128, "n_layer": 6, "n_head": 4}),
    "mixtral": ("Mixtral", {**SHAPE, "intermediate_size": 128, "num_local_experts": 4}),
    "vit": ("ViT", {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}),
    "bart": ("Bart", {"vocab_size": 1000, "d_model": 128, "encoder_layers": 3}),
}
PLANNER = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.sac_estimator import SACEstimator
with FakeTensorMode():
    model = torch.nn.Linear(8, 8)
    with SACEstimator()(estimate_mode_type="operator-level-cost-model"):
        model(torch.ones(2, 8)).sum().backward()
"""


def build_of(name: str) -> Build:
    """The model of a name with a batch of tokens, or of images."""
    kind, options = MODELS[name]

    def build() -> tuple[Any, Any]:
        config = getattr(transformers, f"{kind}Config")(**options)
        if kind == "ViT":
            images = torch.randn(TOKENS[0], 3, config.image_size, config.image_size)
            labels = torch.zeros(TOKENS[0], dtype=torch.long)
            model = transformers.ViTForImageClassification(config)
            return model, {"pixel_values": images, "labels": labels}
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.randint(3, 1000, TOKENS)
        return model, {"input_ids": tokens, "labels": tokens}

    return build


def measured(build: Build, change: Callable[[Any], object] = lambda model: None) -> int:
    """The peak of a real step, of a model that was changed first."""
    workload = as_workload(build())
    change(workload.model)
    return measure_peak_memory(step_of(workload)).peak_bytes


def step_of(workload: Workload) -> Callable[[], None]:
    """A whole step; the optimizer's state is there already."""
    optimizer = make_optimizer("adamw", workload.model)
    assert optimizer is not None
    warm_up(optimizer)

    def step() -> None:
        backward(workload)
        optimizer.step()

    return step


def by_mem_tracker(build: Build) -> int:
    """torch's own tracker on fake tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = as_workload(build())
        tracker = MemTracker()
        tracker.track_external(workload.model)
        with tracker:
            step_of(workload)()
    peaks = tracker.get_tracker_snapshot("peak")
    return max(int(peak["Total"]) for peak in peaks.values())


def by_accelerate(build: Build) -> int:
    """What `accelerate estimate-memory` prints for training with Adam: four times the weights."""
    from accelerate.utils import calculate_maximum_sizes

    return 4 * int(calculate_maximum_sizes(build()[0])[0])


def accuracy(names: list[str]) -> Table:
    """Peaks as predicted by each tool, against the measured one."""
    table = Table("model", "measured", "tool", "error", "CPU s")
    tools: dict[str, Callable[[Build], int]] = {
        "gradsight": lambda build: predict_peak_memory(build).peak_bytes,
        "MemTracker": by_mem_tracker,
        "accelerate": by_accelerate,
    }
    for name in names:
        build = build_of(name)
        truth = measured(build)
        for tool, predict in tools.items():
            started = time.process_time()
            try:
                error = f"{predict(build) / truth - 1:+.1%}"
            except Exception as failure:
                error = type(failure).__name__
            seconds = time.process_time() - started
            table.add_row(name, f"{truth / 1e6:.2f} MB", tool, error, f"{seconds:.1f}")
    return table


def checkpointed(names: list[str]) -> Table:
    """Peaks at equal recomputation, and what a plan recomputes for the same peak."""
    table = Table("model", "plain", "Hugging Face's own", "full", "plan for that peak, recomputed")
    for name in names:
        build = build_of(name)
        plain = measured(build)
        theirs = measured(build, lambda model: model.gradient_checkpointing_enable())
        ours = measured(build, lambda model: apply_checkpointing(model, "full"))
        plan = plan_checkpointing(build, max(theirs, ours))
        peaks = [f"{peak / 1e6:.2f} MB" for peak in (plain, theirs, ours)]
        table.add_row(name, *peaks, f"{plan.policy}, {plan.extra_flops:.1%}")
    return table


def gpt2_large() -> tuple[Any, Any]:
    """774M parameters, one row of 1024 tokens."""
    tokens = torch.zeros(1, 1024, dtype=torch.long)
    config = transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def llama_7b() -> tuple[Any, Any]:
    """In bf16, one row of 2048 tokens."""
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    return model.to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}


def llama_of_48() -> tuple[Any, Any]:
    """48 blocks of width 1024, four rows of 1024 tokens."""
    tokens = torch.zeros(4, 1024, dtype=torch.long)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def seconds() -> Table:
    """CPU seconds of one thread, without what is imported on the first use."""
    torch.set_num_threads(1)
    for name in ("llama", "gpt2"):
        plan_checkpointing(build_of(name), predict_peak_memory(build_of(name)).peak_bytes)
    table = Table("what", "CPU s")
    plain = predict_peak_memory(llama_of_48).peak_bytes
    full = predict_peak_memory(llama_of_48, policy="full").peak_bytes
    tasks: dict[str, Callable[[], object]] = {
        "GPT-2 Large, predicted": lambda: predict_peak_memory(gpt2_large),
        "Llama 7B, predicted": lambda: predict_peak_memory(llama_7b),
        "48 blocks, planned": lambda: plan_checkpointing(llama_of_48, (plain + 2 * full) // 3),
    }
    for name, task in tasks.items():
        started = time.process_time()
        task()
        table.add_row(name, f"{time.process_time() - started:.1f}")
    return table


def planner() -> str:
    """Whether torch's planner of selective checkpointing runs here."""
    command = [sys.executable, "-c", PLANNER]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return "torch's SAC estimator runs here"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"torch's SAC estimator does not run here (exit {done.returncode}): {last}"


def main(models: list[str] | None = None, *, speed: bool = False) -> None:
    """Print the tables."""
    transformers.logging.set_verbosity_error()
    names = models or list(MODELS)
    console = Console()
    if speed:
        console.print(seconds())
        return
    console.print(accuracy(names))
    console.print(checkpointed(names))
    console.print(planner(), markup=False)


if __name__ == "__main__":
    cyclopts.run(main)
