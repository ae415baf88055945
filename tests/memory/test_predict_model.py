"""gradsight memory predict MODEL --json: the contract, and the numbers against measured steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsight.cli import main
from gradsight.cli.config_model import config_step, load_config
from gradsight.memory.lora_options import parse_lora
from gradsight.memory.variants import with_lora
from memory.measured_step import measured

Run = Callable[..., tuple[int, str, str]]
KEYS = {
    "model",
    "parameters",
    "device",
    "gpus",
    "parallel",
    "batch_size",
    "block_size",
    "dtype",
    "optimizer",
    "policy",
    "peak_bytes",
    "by_kind",
    "assumptions",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = LlamaConfig(
        vocab_size=96, num_attention_heads=2, max_position_embeddings=64, dtype="bfloat16", **shape
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*tokens: str, command: str = "predict") -> tuple[int, str, str]:
        code = main(["memory", command, *tokens])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def object_of(run: Run, *tokens: str) -> dict[str, Any]:
    code, out, err = run(*tokens, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found.keys() >= KEYS
    assert sum(found["by_kind"].values()) == found["peak_bytes"]
    return found


def test_a_configuration_by_default(run: Run, llama: str) -> None:
    """The type that it names, as many tokens as it has positions, nothing checkpointed."""
    found = object_of(run, llama)
    build = config_step(load_config(llama), 1, 64, "bfloat16")
    assert found["peak_bytes"] == measured(build)
    assert found["parameters"] == sum(each.numel() for each in build()[0].parameters())
    expected = {
        "model": llama,
        "device": "cpu",
        "gpus": 1,
        "parallel": None,
        "batch_size": 1,
        "block_size": 64,
        "dtype": "bf16",
        "optimizer": "adamw",
        "policy": "none",
        "assumptions": [],
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("policy", "optimizer", "dtype", "lora"),
    [
        ("full", "sgd", "fp32", None),
        ("none", "none", "bf16", None),
        ("selective", "adam", "bf16", "r=4"),
    ],
)
def test_options_against_a_measured_step(
    run: Run, llama: str, policy: str, optimizer: str, dtype: str, lora: str | None
) -> None:
    options = ["--policy", policy, "--optimizer", optimizer, "--dtype", dtype]
    options += ["--batch_size", "2", "--block_size", "32"]
    build = config_step(load_config(llama), 2, 32, {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    if lora is not None:
        options += ["--lora", lora]
        build = with_lora(build, parse_lora(lora))
    found = object_of(run, f"{llama}/config.json", *options)
    name = None if optimizer == "none" else optimizer
    assert found["peak_bytes"] == measured(build, None if policy == "none" else policy, name)
    assert (found["dtype"], found["optimizer"], found["policy"]) == (dtype, optimizer, policy)


def test_adapters_are_in_fp32_on_a_frozen_base(llama: str) -> None:
    build = with_lora(config_step(load_config(llama), 1, 8, "bfloat16"), parse_lora("r=2"))
    model = build()[0]
    types = {(each.requires_grad, each.dtype) for each in model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.slow
def test_several_devices(run: Run, llama: str) -> None:
    """Buckets are one copy of the gradients; shards are shared, and gathered beside them."""
    alone = object_of(run, llama)
    ddp = object_of(run, llama, "--gpus", "2")
    assert (ddp["gpus"], ddp["parallel"]) == (2, "ddp")
    assert ddp["by_kind"]["buckets"] == alone["by_kind"]["parameters"]
    assert ddp["peak_bytes"] - ddp["by_kind"]["buckets"] == alone["peak_bytes"]
    sharded = object_of(run, llama, "--gpus", "4", "--parallel", "fsdp2", "--policy", "full")
    assert (sharded["gpus"], sharded["parallel"]) == (4, "fsdp2")
    assert sharded["by_kind"]["gathered"] > 0
    assert sharded["by_kind"]["parameters"] == pytest.approx(
        alone["by_kind"]["parameters"] / 4, rel=0.05
    )
    one = object_of(run, llama, "--gpus", "1", "--parallel", "fsdp2")
    assert (one["parallel"], one["peak_bytes"]) == (None, alone["peak_bytes"])


PRECISIONS = (
    ("bfloat16", (), "bf16, from the configuration (change: --dtype fp32)", None),
    ("float16", (), "fp16, from the configuration (change: --dtype bf16)", None),
    ("float64", (), "fp32, the default (change: --dtype bf16)", None),
    (None, (), "fp32, the default (change: --dtype bf16)", None),
    ("bfloat16", ("--dtype", "fp32", "--device", "cuda"), "fp32", "cuda"),
)


@pytest.mark.parametrize("command", ["predict", pytest.param("plan", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("named", "options", "precision", "device"),
    [PRECISIONS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in PRECISIONS[1:])],
)
def test_an_answer_says_which_precision_and_device_it_assumes(
    run: Run,
    tmp_path: Path,
    command: str,
    named: str | None,
    options: tuple[str, ...],
    precision: str,
    device: str | None,
) -> None:
    shape = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = {"model_type": "gpt2", **shape} | ({} if named is None else {"dtype": named})
    (tmp_path / "config.json").write_text(json.dumps(config))
    budget = ("--budget", "1GB") if command == "plan" else ()
    code, out, err = run(str(tmp_path), *options, *budget, command=command)
    assert code == 0, err
    top = [line.strip() for line in out.split("Optimizer:")[0].splitlines()]
    assert f"Precision:               {precision}" in top
    device = device or "cpu, the default (change: --device cuda)"
    assert f"Device:                  {device}" in top


@pytest.mark.parametrize(
    "options",
    [
        ("--lora", "r=4", "--dtype", "fp32"),
        ("--lora", "r=4", "--device", "cuda"),
        ("--gpus", "4", "--parallel", "fsdp2"),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_a_plan_takes_the_options_of_a_prediction(
    run: Run, llama: str, options: tuple[str, ...]
) -> None:
    """A step of every kind fits exactly its own peak, and one byte less needs a plan."""
    place = (llama, "--batch_size", "8", *options)
    peak = object_of(run, *place)["peak_bytes"]
    code, out, err = run(*place, "--budget", str(peak), command="plan")
    assert code == 0, err
    assert "Plan:                    none\n" in out
    assert "there is nothing to apply" in out
    code, out, err = run(*place, "--budget", str(peak - 1), command="plan")
    assert code == 0, err
    assert 'apply_checkpointing(model, "' in out


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_a_batch_that_does(run: Run, llama: str) -> None:
    options = (llama, "--lora", "r=4")
    smallest = object_of(run, *options, "--batch_size", "2", "--policy", "full")["peak_bytes"]
    code, _, err = run(
        *options, "--batch_size", "64", "--budget", str(smallest + 1), command="plan"
    )
    assert code == 2
    assert "no checkpointing fits" in err
    found = re.search(r"--batch_size (\d+) would fit", err)
    assert found is not None, err
    assert 2 <= int(found[1]) < 10


BUILD = """
import torch
from torch import nn

print("building")


def build(batch_size=4):
    print("really")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)])
    return model, torch.ones(batch_size, 8), lambda model, batch: model(batch).square().mean()
"""


@pytest.mark.slow
def test_a_build_function_with_a_batch_size(run: Run, tmp_path: Path) -> None:
    """What it prints is not on stdout; what fits is found, and so is the plan."""
    (tmp_path / "own.py").write_text(BUILD)
    place = f"{tmp_path}/own.py:build"
    plain = object_of(run, place, "--batch_size", "100")
    limit = plain["peak_bytes"]
    found = object_of(run, place, "--batch_size", "400", "--memory", str(limit))
    assert 100 <= found["largest_batch_size"] < 110
    assert found["plan"]["policy"] is None or found["plan"]["peak_bytes"] <= limit


@pytest.mark.slow
def test_the_table(run: Run, llama: str) -> None:
    ways = ("--gpus", "2", "--parallel", "fsdp2", "--policy", "none", "--block_size", "32")
    code, out, err = run(llama, *ways, "--memory", "550kB")
    assert code == 0
    for text in ("peak by kind", "gathered", "total", "This batch fits 550 kB", "largest batch"):
        assert text in out.replace("\n", " ")
    assert "Looking for the largest batch" in err
    assert "Weighing 3 blocks, step 1" in err


OWN_CODE = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("{folder}/own",), "use file.py:build"),
        (("{folder}/t5",), "T5Config, which transformers has no causal language model for"),
        (("{folder}/broken",), "cannot be read as a configuration"),
        (("{folder}",), "has no config.json in it"),
        (("./nowhere",), "there is no file or folder ./nowhere"),
        (
            ("no-such-model-in-the-cache",),
            "not in Hugging Face's local cache; nothing is downloaded",
        ),
        (("{llama}", "--dropout", "0.1"), "a configuration has its own"),
        (("{llama}", "--block_size", "0"), "--block_size must be 1 or more"),
        (("{llama}", "--gpus", "0"), "--gpus must be 1 or more, got 0"),
        (("{llama}", "--parallel", "ddp"), "needs --gpus"),
        (("{llama}", "--lora", "rank=3"), "'rank=3' is not understood"),
        (("{llama}", "--lora", "r=0"), "r must be 1 or more"),
        (("{llama}", "--policy", "most"), "'most' is not a policy"),
        (("{llama}", "--memory", "6G"), "'6G' is not a size of memory"),
        (("{llama}", "--dtype", "fp8"), "Invalid value"),
        ((), "name a model"),
    ],
)
def test_wrong_usage(
    run: Run, llama: str, tmp_path: Path, tokens: tuple[str, ...], message: str
) -> None:
    for name, text in {
        "own": json.dumps(OWN_CODE),
        "t5": '{"model_type": "t5"}',
        "broken": "{",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "own" / "own.py").write_text("raise SystemExit('code of a stranger was run')")
    filled = [token.format(llama=llama, folder=tmp_path) for token in tokens]
    code, out, err = run(*filled, "--json")
    assert (code, out, message in err) == (64, "", True), err


def test_positions_that_a_model_does_not_have(run: Run, tmp_path: Path) -> None:
    """A real step would fail, so there is no number."""
    from transformers import GPT2Config

    GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2).save_pretrained(
        tmp_path
    )
    code, out, err = run(str(tmp_path), "--block_size", "32", "--json")
    assert (code, out) == (3, "")
    assert "index out of range: 31 in an embedding of 16 rows" in err
