"""The tail of a run as a file: what came after its record was published, frame by frame. No torch.

    header     8 bytes "GSTAIL2\\n", u64 number of the run, u64 number of the first frame,
               u32 crc32 of these
    frame      u32 length of the payload, u8 kind, u64 number, u32 crc32 of these; payload;
               u32 crc32 of payload, begun with that of the head
    number     counts up by one from frame to frame of a run

All numbers are little-endian. The file only ever grows at its end, so a killed writer leaves a last
frame that is cut off, and a power failure one that ends in zeros: both are *torn*, and reading ends
before it. Anything else that does not fit is *damage*, and an error. The checksum of the payload
stands behind it so that the two can be told apart: zeros there mean that it never was written.
"""

import os
import struct
import zlib
from collections.abc import Iterator

from gradsight.core import limits
from gradsight.errors import RunError

Frame = tuple[int, int, bytes]
"""Number, kind, payload."""

MAGIC = b"GSTAIL2\n"
_ANY_VERSION = MAGIC[:6]
HEADER = struct.Struct("<8sQQI")
_HEAD = struct.Struct("<IBQI")
_END = struct.Struct("<I")
_BLOCK = 1 << 20


def pack_header(run: int, first: int) -> bytes:
    """The beginning of a tail whose first frame will have this number."""
    head = HEADER.pack(MAGIC, run, first, 0)[: -_END.size]
    return head + _END.pack(zlib.crc32(head))


def pack_frame(number: int, kind: int, payload: bytes) -> bytes:
    """A frame ready to be appended."""
    head = _HEAD.pack(len(payload), kind, number, 0)[: -_END.size]
    checksum = zlib.crc32(head)
    end = zlib.crc32(payload, checksum)
    return b"".join((head, _END.pack(checksum), payload, _END.pack(end)))


class TailReader:
    """Reads an open tail from its beginning, and on from there when it has grown."""

    def __init__(self, handle: int, name: str) -> None:
        """Read the header; `name` is what errors call the file."""
        self.run: int | None = None
        """The number of the run that it belongs to; None where the tail cannot say."""
        self.first: int | None = None
        """The number of its first frame; None where that is not known."""
        self.position = 0
        """Where the next frame begins."""
        self._handle = handle
        self._name = name
        self.last = 0
        """The number of the last frame that was read; before, that of the one before the first."""
        self._block = b""
        self._block_at = 0
        self._read_header()

    def frames(self) -> Iterator[Frame]:
        """The whole frames from here on; an error where one is damaged."""
        if self.position == 0:
            # The writer was killed, or has only begun.
            self._read_header()
        if self.position:
            yield from self._new_frames()

    def is_torn(self) -> bool:
        """Whether bytes follow the last whole frame."""
        return os.fstat(self._handle).st_size > self.position

    def _read_header(self) -> None:
        self._block = b""
        data = self._read(0, HEADER.size)
        if len(data) < HEADER.size or self._only_zeros(0):
            # The writer was killed before it had written it, or has only begun.
            return
        if data[: len(MAGIC)] != MAGIC:
            if data[: len(_ANY_VERSION)] == _ANY_VERSION:
                raise self._damaged("its format is unknown, unless a newer Gradsight wrote it")
            raise self._damaged("its header is not that of a tail")
        _, run, first, checksum = HEADER.unpack(data)
        if zlib.crc32(data[: -_END.size]) != checksum:
            raise self._damaged("its header does not fit its checksum")
        self.run = run
        self.first = first
        self.last = first - 1
        self.position = HEADER.size

    def _new_frames(self) -> Iterator[Frame]:
        self._block = b""  # what was the end of the file may have grown since
        while True:
            head = self._read(self.position, _HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, kind, number, checksum = _HEAD.unpack(head)
            if zlib.crc32(head[: -_END.size]) != checksum:
                # A whole frame has a checksum behind it, which is not zero.
                if self._only_zeros(self.position + _HEAD.size):
                    return
                raise self._damaged("the head of a frame does not fit its checksum")
            if length > limits.FRAME_BYTES:
                raise self._damaged(f"a frame of {length} bytes is longer than any of ours")
            body = self._read(self.position + _HEAD.size, length + _END.size)
            if len(body) < length + _END.size:
                return
            payload = body[:length]
            (end,) = _END.unpack_from(body, length)
            if zlib.crc32(payload, checksum) != end:
                if end == 0 and self._only_zeros(self.position + _HEAD.size + length):
                    return
                raise self._damaged("a frame does not fit its checksum")
            if number != self.last + 1:
                raise self._damaged(f"frame {number} follows frame {self.last}")
            self.position += _HEAD.size + length + _END.size
            self.last = number
            yield number, kind, payload

    def _read(self, position: int, size: int) -> bytes:
        """Bytes of the file, fewer at its end; read in blocks."""
        offset = position - self._block_at
        if not 0 <= offset <= len(self._block) - size:
            self._block = os.pread(self._handle, max(size, _BLOCK), position)
            self._block_at = position
            offset = 0
        return self._block[offset : offset + size]

    def _only_zeros(self, position: int) -> bool:
        """Whether nothing but zeros follows: room that a power failure left unwritten."""
        while block := os.pread(self._handle, _BLOCK, position):
            if block.count(0) < len(block):
                return False
            position += len(block)
        return True

    def _damaged(self, what: str) -> RunError:
        place = f"at byte {self.position}: {what}"
        return RunError(
            f"{self._name} is damaged {place}. Steps from there on cannot be trusted; "
            "those of the record are not touched by it"
        )
