"""Run by test_kernel.py in a process of its own, where Triton interprets kernels on CPU tensors."""

import warnings

import torch
from torch import Tensor, nn

from ghost.small import SmallGPT, loss_fn, pair, relative_error
from gradsight import GhostEngine
from gradsight.ghost.kernels import product_kernel
from gradsight.ghost.kernels.triton_split_product import is_interpreted, split_product


def twin(left: Tensor, right: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a plain loop over samples in float64."""
    total = torch.zeros(left.shape[2], right.shape[2], dtype=torch.float64)
    scores = []
    for a, b in zip(left.double(), right.double(), strict=True):
        gradient = a.t() @ b
        total += gradient
        scores.append(torch.stack([(gradient * each).sum() for each in directions.double()]))
    return total, torch.stack(scores, 1)


SHAPES = [  # samples, positions, p, d, directions, groups, columns that are not used
    (4, 16, 32, 32, 1, 1, 0),  # whole tiles
    (3, 13, 37, 50, 1, 1, 0),  # ragged in every dimension
    (5, 1, 65, 33, 3, None, 0),  # one position, several directions
    (7, 40, 48, 70, 2, 3, 7),  # groups that do not divide the samples, strided rows
    (1, 33, 1, 100, 1, 2, 0),  # one sample, one output, more groups than samples
]


def check_products() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for samples, length, p, d, number, groups, unused in SHAPES:
            generator = torch.Generator().manual_seed(samples + length)
            wide = torch.randn(samples, length, p + d + unused, generator=generator).to(dtype)
            left, right = wide[..., :p], wide[..., p : p + d]
            directions = torch.randn(number, p, d, generator=generator)
            made = split_product(left, right, directions, groups)
            for own, other in zip(made, twin(left, right, directions), strict=True):
                error = float((own.double() - other).abs().max() / other.abs().max())
                assert error < 3e-6, (dtype, samples, length, p, d, error)


def scored(
    kernel: str | None, dtype: torch.dtype, **options: object
) -> tuple[list[Tensor], GhostEngine]:
    """The scores of three steps, and the gradient of the last."""
    torch.manual_seed(0)
    model = SmallGPT().to(dtype)
    engine = GhostEngine(
        model, loss_fn, targets={"a": pair(2, 1), "b": pair(2, 5)}, kernel=kernel, **options
    )
    found = []
    for step in range(3):
        model.zero_grad()
        with engine.observe():
            loss_fn(model, pair(3, 10 + step)).backward()
        found += list(engine.scores.by_target.values())
    found += [weight.grad for weight in model.parameters()]
    engine.close()
    return found, engine


def kernel_of(engine: GhostEngine) -> product_kernel.ProductKernel:
    kernel = engine._blocks._options.rules.kernel
    assert kernel is not None
    return kernel


def check_engine() -> None:
    plain, _ = scored(None, torch.float32)
    found, engine = scored("triton", torch.float32)
    assert kernel_of(engine).in_use
    assert kernel_of(engine).products > 10
    assert max(relative_error(a, b) for a, b in zip(found, plain, strict=True)) < 1e-4
    # In float64 products go as ever; bit for bit gradients are left alone.
    for options in ({"dtype": torch.float64}, {"dtype": torch.float32, "exact_grad": True}):
        _, engine = scored("triton", **options)
        assert kernel_of(engine).in_use
        assert kernel_of(engine).products == 0


def check_giving_up() -> None:
    """Wrong numbers and errors end the kernel's use, with one warning, and change no score."""
    plain, _ = scored(None, torch.float32)
    right_way = product_kernel._by_triton

    def slightly_wrong(left: Tensor, right: Tensor, tangents: object) -> object:
        total, pairs = right_way(left, right, tangents)
        return total, [(slot, scores * 1.01) for slot, scores in pairs]

    def broken(left: Tensor, right: Tensor, tangents: object) -> object:
        raise RuntimeError("no kernel image is available for execution on the device")

    for way, said in ((slightly_wrong, "away from today's route"), (broken, "no kernel image")):
        product_kernel._by_triton = way
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, engine = scored("triton", torch.float32)
        product_kernel._by_triton = right_way
        told = [str(each.message) for each in caught if "kernel='triton'" in str(each.message)]
        assert len(told) == 1, told
        assert said in told[0]
        assert not kernel_of(engine).in_use
        assert max(relative_error(a, b) for a, b in zip(found, plain, strict=True)) < 1e-5


def check_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 3))
    x, y = torch.randn(6, 9, 40), torch.randn(6, 9, 3)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (model(batch[0]) - batch[1]).float().square().mean()

    found = []
    for kernel in (None, "triton"):
        engine = GhostEngine(model, loss, (x[:2], y[:2]), kernel=kernel, _route="materialise")
        for _ in range(2):
            with engine.observe():
                loss(model, (x[2:], y[2:])).backward()
        found.append(engine.scores.total)
        engine.close()
    assert kernel_of(engine).products >= 2  # the second step, and passes of checks
    assert relative_error(*found) < 0.02  # today's route rounds every product to bfloat16


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert is_interpreted()
    check_products()
    check_engine()
    check_giving_up()
    check_autocast()
    print("ok")
