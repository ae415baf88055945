"""How far a device that works later than it is told to has come, and who has waited for it."""

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

Speed = Literal["slow", "fast"] | int
"""How the device keeps up: never by itself, at once, or so many operations behind."""


# The package is not imported here: the device must exist before that.
_PACKAGE = str(Path(find_spec("gradsight").origin).parent) + "/"  # type: ignore[union-attr,arg-type]
_STAND_INS = ("backward", "scale", "unscale_", "step")


class BrokenCapture(RuntimeError):
    """Something was done that a stream cannot capture."""


@dataclass(frozen=True)
class Wait:
    """The host has waited for the device."""

    kind: str
    """What it asked for: item, equal, a copy, an event."""
    drains: bool
    """Whether nothing was ordered behind it: the device has nothing to do when the host goes on."""
    thread: str
    lines: tuple[str, ...]
    """Gradsight's innermost lines in the stack; empty where it is the training's own wait."""


@dataclass
class Clock:
    """The device's work: operations are ordered one by one, and done later."""

    speed: Speed = "slow"
    ordered: int = 0
    done: int = 0
    waits: list[Wait] = field(default_factory=list)
    kernels: Counter[bool] = field(default_factory=Counter)
    """Operations that are no views, by whether they are Gradsight's."""
    capturing: bool = False
    _arriving: deque[tuple[int, Callable[[], object]]] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]

    def order(self, *, kernel: bool = True) -> None:
        """The host orders an operation."""
        self.ordered += 1
        if kernel:
            self.kernels[bool(our_lines())] += 1

    def bring(self, put: Callable[[], object]) -> None:
        """Have this done when the device has come to what is ordered last."""
        self._arriving.append((self.ordered, put))

    def progress(self, upto: int = 0) -> None:
        """Let the device come as far as it does by itself, and at least so far."""
        behind = {"slow": self.ordered, "fast": 0}.get(str(self.speed), self.speed)
        with self._lock:
            self.done = max(self.done, upto, self.ordered - int(behind))
            while self._arriving and self._arriving[0][0] <= self.done:
                self._arriving.popleft()[1]()

    def wait(self, kind: str, upto: int | None = None) -> None:
        """Wait for all that is ordered, or up to an event; one that has passed is no wait."""
        self.forbid_in_capture(kind)
        self.progress()
        until = self.ordered if upto is None else upto
        if upto is None or upto > self.done:
            name = threading.current_thread().name
            self.waits.append(Wait(kind, until == self.ordered, name, our_lines()))
        self.progress(until)

    def forbid_in_capture(self, what: str) -> None:
        """Nothing that looks at the device, or asks for pinned memory, may be captured."""
        if self.capturing:
            raise BrokenCapture(f"{what} while the stream is being captured")

    def passed(self, upto: int) -> bool:
        """Whether the device has come so far."""
        self.forbid_in_capture("an event's query")
        self.progress()
        return self.done >= upto

    def take(self) -> tuple[list[Wait], Counter[bool]]:
        """Gradsight's waits and all kernels since the last time."""
        # Threads of ours may wait: training goes on beside them.
        waits = [
            each for each in self.waits if each.lines and not each.thread.startswith("gradsight")
        ]
        kernels = self.kernels
        self.waits = []
        self.kernels = Counter()
        return waits, kernels


def our_lines() -> tuple[str, ...]:
    """Gradsight's innermost three lines in the stack."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 3:
        _, inside, path = frame.f_code.co_filename.partition(_PACKAGE)
        # What stands in for torch's functions calls the user's: that wait is theirs.
        stands_in = path == "core/moments.py" and frame.f_code.co_name in _STAND_INS
        if inside and not stands_in:
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


class Generators:
    """One random generator per device, as states; drawn from by whoever has it in hand."""

    def __init__(self, count: int) -> None:
        self.states = [torch.Generator().manual_seed(number).get_state() for number in range(count)]

    def seed(self, seed: int) -> None:
        """Seed all of them alike."""
        fresh = torch.Generator().manual_seed(seed).get_state()
        self.states = [fresh.clone() for _ in self.states]
