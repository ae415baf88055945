"""The frame around raw bytes against the real thing: torch.load and the zip module both read it."""

import io
import zipfile
import zlib

import pytest
import torch

from gradsight.dump.frames import LIMIT, describe, frame

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


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


def test_a_record_of_more_than_four_gigabytes_uses_the_wide_form() -> None:
    length = 5 * 2**30
    around = frame(0, describe((1,), torch.float32), length, 7)
    assert length.to_bytes(8, "little") in around.head
    assert length.to_bytes(8, "little") in around.tail
    assert b"PK\x06\x06" in around.tail
    assert b"PK\x06\x06" not in frame(0, describe((1,), torch.float32), 4, 7).tail
