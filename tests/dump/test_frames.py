"""The frame around raw bytes against the real thing: torch.load and the zip module both read it."""

import io
import zipfile
import zlib

import pytest
import torch

from gradsight.dump.torch_record import LIMIT, describe, frame

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("limit", [LIMIT, 0], ids=["32 bit", "64 bit"])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1000,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_it(dtype: torch.dtype, shape: tuple[int, ...], limit: int) -> None:
    raw = bytes(range(256)) * 16 * 4
    raw = raw[: torch.empty(shape, dtype=dtype).nbytes]
    for position in (0, 13, 64, 1000):
        around = frame(position, describe(shape, dtype), len(raw), zlib.crc32(raw), limit)
        assert (position + len(around.head)) % 64 == 0
        record = io.BytesIO(around.head + raw + around.tail)
        loaded = torch.load(record, weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
        assert not raw or loaded.view(-1).view(torch.uint8).numpy().tobytes() == raw
        with zipfile.ZipFile(record) as archive:
            assert archive.testzip() is None
            assert archive.read("r/data/0") == raw


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_description_is_that_of_torch(dtype: torch.dtype) -> None:
    """Loaded from torch's own archive, our description in place of its, a tensor is the same."""
    tensor = torch.arange(24.0).view(2, 3, 4).to(dtype)
    target = io.BytesIO()
    torch.save(tensor, target)
    with zipfile.ZipFile(target) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(entries)).split("/")[0]
    entries[f"{root}/data.pkl"] = describe((2, 3, 4), dtype)
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    loaded = torch.load(io.BytesIO(changed.getvalue()), weights_only=True)
    assert loaded.stride() == tensor.stride()
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_a_description_takes_no_memory() -> None:
    assert len(describe((1 << 40, 1 << 20), torch.float32)) < 400


def test_a_record_of_more_than_four_gigabytes_uses_the_wide_form() -> None:
    length = 5 * 2**30
    around = frame(0, describe((1,), torch.float32), length, 7)
    assert length.to_bytes(8, "little") in around.head
    assert length.to_bytes(8, "little") in around.tail
    assert b"PK\x06\x06" in around.tail
    assert b"PK\x06\x06" not in frame(0, describe((1,), torch.float32), 4, 7).tail
