"""Predicted peaks against measured ones, CUDA's operators, and models that cannot be predicted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradsight import predict_peak_memory
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.cuda import cuda_operators
from gradsight.memory.fake import fake_tensors
from memory.measured_step import measured

Build = Callable[[], tuple[Any, ...]]


@pytest.mark.parametrize(
    "policy", [None, "full", pytest.param("selective", marks=pytest.mark.slow)]
)
def test_predicted_is_measured(build: Build, policy: str | None) -> None:
    use = predict_peak_memory(build, policy=policy)
    assert use.predicted
    assert use.peak_bytes == pytest.approx(measured(build, policy), rel=0.01)


def test_long_sequences_get_no_mask_they_do_not_need() -> None:
    """Short sequences would hide it: a mask takes length x length."""

    def build() -> tuple[Any, ...]:
        import transformers

        shape = {"vocab_size": 50, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}
        tokens = torch.randint(0, 50, (4, 256))
        config = transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}

    assert predict_peak_memory(build).peak_bytes == pytest.approx(measured(build, None), rel=0.001)


@pytest.mark.parametrize("layer", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_recurrent_layers(layer: type[nn.Module]) -> None:
    """oneDNN's LSTM keeps a workspace whose size a fake run does not know."""

    def build() -> tuple[Any, ...]:
        return layer(64, 64, 2), (torch.randn(20, 8, 64),), lambda m, b: m(*b)[0].square().mean()

    for _ in range(2):
        assert predict_peak_memory(build).peak_bytes == pytest.approx(
            measured(build, None), rel=0.01
        )


@pytest.mark.parametrize(
    "optimizer",
    [None, "adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "rmsprop"))],
)
def test_every_optimizer(make_gpt: Callable[..., Any], optimizer: str | None) -> None:
    use = predict_peak_memory(make_gpt, optimizer=optimizer)
    assert use.peak_bytes == pytest.approx(measured(make_gpt, None, optimizer), rel=0.01)
    assert (use.by_kind["optimizer"] > 0) == (optimizer in ("adam", "rmsprop"))


def test_nothing_is_computed_and_no_randomness_used(make_gpt: Callable[..., Any]) -> None:
    before = torch.get_rng_state()
    predict_peak_memory(
        lambda: make_gpt(batch=4000, length=1025, width=512, dropout=0.1), policy="full"
    )
    assert torch.equal(before, torch.get_rng_state())


def test_initialisers_that_look_at_their_draws_do_nothing() -> None:
    def build() -> tuple[Any, ...]:
        model = nn.Linear(4, 4)
        for fill in (
            nn.init.trunc_normal_,
            nn.init.orthogonal_,
            nn.init.kaiming_uniform_,
            nn.init.xavier_normal_,
        ):
            fill(model.weight)
        return model, (torch.randn(2, 4),), lambda m, b: m(*b).sum()

    assert predict_peak_memory(build).peak_bytes > 0
    weight = nn.init.trunc_normal_(torch.zeros(50))
    assert weight.abs().sum() > 0, "the initialisers were not given back"


def test_cuda_keeps_a_byte_where_the_cpu_keeps_a_float(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        return (
            nn.Dropout(0.5),
            (torch.randn(1000, 100, requires_grad=True),),
            lambda m, b: m(*b).exp().sum(),
        )

    cpu, cuda = (
        predict_peak_memory(build, optimizer=None, device=device) for device in ("cpu", "cuda")
    )
    assert cpu.by_kind["activations"] - cuda.by_kind["activations"] == pytest.approx(
        100_000 * (4 - 1), rel=0.01
    )
    assert any("CUDA context" in note for note in cuda.notes)


def test_cuda_attention_keeps_no_weights(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        return make_gpt(length=129, dropout=0.1)

    cpu, cuda = (predict_peak_memory(build, device=device).peak_bytes for device in ("cpu", "cuda"))
    assert cuda < 0.6 * cpu, (
        "the CPU's attention with dropout keeps a matrix of length x length, CUDA's does not"
    )


@pytest.mark.parametrize(
    ("dtype", "mask", "expected"),
    [
        (torch.bfloat16, False, "ScaledDotProductFlashAttentionBackward0"),
        (torch.float32, False, "ScaledDotProductEfficientAttentionBackward0"),
        (torch.bfloat16, True, "ScaledDotProductEfficientAttentionBackward0"),
    ],
)
def test_cuda_attention_kernel(dtype: torch.dtype, mask: bool, expected: str) -> None:
    with fake_tensors(), cuda_operators():
        x = torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True)
        out = F.scaled_dot_product_attention(
            x,
            x[:, :2],
            x[:, :2],
            torch.ones(16, 16, dtype=torch.bool) if mask else None,
            enable_gqa=True,
        )
        assert out.shape == x.shape
        assert out.grad_fn is not None
        assert out.grad_fn.name() == expected
        out.sum().backward()
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_cuda_autocast_and_optimizer(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        model, tokens, loss = make_gpt(length=129)

        def half(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return loss(model, tokens)  # type: ignore[no-any-return]

        return model, tokens, half

    plain = predict_peak_memory(lambda: make_gpt(length=129), device="cuda")
    assert predict_peak_memory(build, device="cuda").peak_bytes < 0.8 * plain.peak_bytes


def put(model: nn.Module, how: str) -> nn.Module:
    return {
        "cuda": model.cuda,
        "to": lambda: model.to("cuda:0"),
        "device": lambda: model.to(torch.device("cuda")),
    }[how]()


@pytest.mark.parametrize("how", ["cuda", "to", "device"])
def test_models_built_on_cuda_need_no_gpu(how: str) -> None:
    def build() -> tuple[Any, ...]:
        model = put(nn.Sequential(nn.Linear(4, 4, device="cuda"), nn.Linear(4, 4)), how)
        return (
            model,
            (torch.randn(2, 4).to("cuda") + torch.ones(4, device="cuda"),),
            lambda m, b: m(*b).sum(),
        )

    assert predict_peak_memory(build, device="cuda").peak_bytes > 0


def test_cuda_blocks_are_rounded() -> None:
    def build() -> tuple[Any, ...]:
        return nn.Linear(3, 1, bias=False), (torch.randn(1, 3),), lambda m, b: m(*b).sum()

    assert predict_peak_memory(build, device="cuda").peak_bytes % 512 == 0


class Routed(nn.Module):
    """Branches on the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[self.layer(x).sum(1) > 0])


def test_a_model_that_needs_data_is_refused() -> None:
    def build() -> tuple[Any, ...]:
        return Routed(), (torch.randn(8, 4),), lambda m, b: m(*b).sum()

    with pytest.raises(
        GradsightError,
        match=r"needs real data: .*in forward, .*test_predict\.py:\d+.*measure_peak_memory",
    ):
        predict_peak_memory(build)


def test_a_build_that_needs_data_is_refused() -> None:
    def build() -> tuple[Any, ...]:
        layer = nn.Linear(3, 3)
        width = 4 + int(layer.weight.sum().item())
        return nn.Linear(width, 1), (torch.randn(2, width),)

    with pytest.raises(GradsightError, match=r"needs real data: .*in build, .*test_predict\.py"):
        predict_peak_memory(build)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, sparse=True, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bag(x).square().mean()


def sparse_embedding() -> tuple[Any, ...]:
    return nn.Embedding(50, 8, sparse=True), torch.randint(0, 50, (4, 3)), mean_square


def sparse_batch() -> tuple[Any, ...]:
    return nn.Linear(8, 8), torch.eye(8).to_sparse(), mean_square


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("optimizer", [None, "sgd", "adamw"])
@pytest.mark.parametrize(
    "build", [sparse_embedding, sparse_batch, lambda: (Bag(), (torch.randint(0, 50, (4, 3)),))]
)
def test_sparse_tensors_are_refused(build: Build, optimizer: str | None) -> None:
    assert measured(build, optimizer=None) > 0
    with pytest.raises(GradsightError, match=r"sparse tensor.*measure_peak_memory.*sparse=False"):
        predict_peak_memory(build, optimizer=optimizer)


def fitted_in_build() -> tuple[Any, ...]:
    """pykan fits its splines in this way when a model is made."""
    model = nn.Linear(4, 4)
    try:
        fitted = torch.linalg.lstsq(model.weight.detach(), torch.randn(4, 4)).solution
    except Exception:
        print("lstsq failed")
    model.weight.data = fitted
    return model, torch.randn(2, 4), mean_square


def fitted_in_the_step() -> tuple[Any, ...]:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(batch.numpy()).sum() + mean_square(model, batch)

    return nn.Linear(4, 4), torch.randn(2, 4), loss_fn


@pytest.mark.parametrize("build", [fitted_in_build, fitted_in_the_step])
def test_what_fails_only_without_data_is_sent_to_a_measurement(build: Build) -> None:
    assert measured(build, optimizer=None) > 0
    with pytest.raises(
        GradsightError, match=r"If that works, .*only without real data.*measure_peak_memory"
    ):
        predict_peak_memory(build)


def failing() -> Any:
    raise FileNotFoundError("tokens.bin")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (failing, r"build\(\) raised FileNotFoundError: tokens.bin. Call it by itself first"),
        (
            lambda: nn.Linear(1, 1),
            r"must return \(model, batch\) or \(model, batch, loss_fn\), got Linear",
        ),
        (lambda: (1, 2), r"the first must be a torch.nn.Module, got int"),
        (
            lambda: (nn.Linear(1, 1), 2),
            r"without loss_fn the batch is a dict or tuple of arguments, got int",
        ),
        (lambda: (nn.Linear(1, 1), (), 3), r"loss_fn must be a function .* got int"),
        (
            lambda: (nn.Linear(1, 1), torch.ones(2, 1)),
            r"one element, got a tensor of shape \(2, 1\): return \(model, batch, loss_fn\)",
        ),
        (
            lambda: (nn.ReLU(), torch.ones(2, 1), lambda m, b: m(b).sum()),
            r"no trainable parameters",
        ),
        (lambda: (nn.LSTM(1, 1), (torch.ones(1, 1, 1),), lambda m, b: None), r"got NoneType"),
        (3, r"build must be a function without arguments, got int"),
    ],
)
def test_bad_builds(build: Any, message: str) -> None:
    with pytest.raises(GradsightError, match=message):
        predict_peak_memory(build)


def test_bad_arguments(make_gpt: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="device must be one of cpu, cuda, got 'tpu'"):
        predict_peak_memory(make_gpt, device="tpu")
    with pytest.raises(UsageError, match="unknown optimizer 'lion'; known are adamw, adam, sgd"):
        predict_peak_memory(make_gpt, optimizer="lion")
