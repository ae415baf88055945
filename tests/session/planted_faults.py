"""Plant faults where torch, a thread, the interpreter or the user calls Gradsight.

    python tests/session/planted_faults.py [--all] [--seed N]

A few watched loops are traced. An entry point is a function of Gradsight that anything but
Gradsight calls: a hook, a replaced function of torch, the target of a thread, a public method. A
fault is raised in the functions that an entry point calls, directly or through the guard. The loop
must then train as it does without Gradsight, leave everything as it was, and report the fault. From
a GhostEngine the fault comes out, but only as a GradsightError; the loop goes on without the engine.

Some faults of --all are known to fail. If a function that takes a mode off torch's stack fails for
good, the mode stays there and does nothing: only that function could take it off. If a rule fails
inside of `engine.verify`, each sample is scored by its own backward pass, which is not reported; nor
is an error in the second derivative of the loss, which not every loss has. Activation checkpointing is not planted in: the hooks that follow it may raise the fault itself.

Nothing here depends on how the package is built inside, except that the guard is in `guard.py`.
"""

import argparse
import atexit
import dis
import faulthandler
import functools
import io
import json
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

import gradsight

PACKAGE = f"{Path(gradsight.__file__).parent}/"
TORCH = f"{Path(torch.__file__).parent}/"
GUARD = "guard.py"
"""The file that the guard is defined in, in whatever folder of the package."""
TRANSPARENT = ("/contextlib.py", "/functools.py", "/torch/utils/_contextlib.py", "/torch/_dynamo/")
"""Files whose functions only pass a call on: a decorator or a `with` is not a caller."""
STEPS = 12
NAN_STEP = 5
"""The step whose batch holds a NaN."""
LARGE_STEP = 9
"""The step with a loss far too large."""
TOO_LONG = 120
"""Seconds after which a planted fault has caused a deadlock."""
MESSAGE = "fault planted by a test"


class Planted(RuntimeError):
    """The planted fault."""

    def __init__(self) -> None:
        super().__init__(MESSAGE)


# The loops.


class Called:
    """Pass calls on to an object, so that the trace can name the method that the user called."""

    methods: ClassVar[set[str]] = set()
    """What was called, as "Watch.log"."""

    def __init__(self, called: Any, name: str) -> None:
        self._called = called
        self._name = name

    def __getattr__(self, method: str) -> Any:
        return functools.partial(self._call, method)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.methods.add(f"{self._name}.{method}")
        return getattr(self._called, method)(*args, **kwargs)

    def __enter__(self) -> Any:
        return self._call("__enter__")

    def __exit__(self, *error: Any) -> Any:
        return self._call("__exit__", *error)


class Sink:
    """A user's sink."""

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take a number."""


@dataclass
class Subject:
    """A model to train, in the same way every time."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]
    others: list[torch.optim.Optimizer] = field(default_factory=list)
    dumper: Any = field(default_factory=lambda: NoWatch())

    @classmethod
    def make(cls, optimizer: Callable[..., Any]) -> "Subject":
        torch.manual_seed(7)
        # Dropout, so that a random number drawn once too often changes every weight.
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2))
        batches = [torch.randn(5, 4) for _ in range(STEPS)]
        batches[NAN_STEP][2, 1] = float("nan")
        batches[LARGE_STEP] *= 1000
        first, *others = made if isinstance(made := optimizer(model), list) else [made]
        return cls(model, first, batches, others)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, *self.others]

    def loss(self, step: int) -> Tensor:
        return self.model(self.batches[step]).square().mean()

    def clip(self) -> None:
        """Do what a careful user does about a NaN, and clip."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2)


def one_per_layer(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [sgd(layer) for layer in model if isinstance(layer, nn.Linear)]


class NoWatch:
    """Stands in for a watch where the loop runs without Gradsight."""

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: self

    def __enter__(self) -> "NoWatch":
        return self

    def __exit__(self, *error: Any) -> None:
        """Let the error through."""


Loop = Callable[[Subject, Any], None]


def by_optimizer(subject: Subject, watched: Any) -> None:
    for step in range(STEPS):
        subject.optimizer.zero_grad()
        watched.ids(list(range(5)))
        loss = subject.loss(step)
        loss.backward()
        subject.clip()
        subject.optimizer.step()
        watched.log(loss=loss, lr=0.05)
        watched.log_scalar("epoch", 1.0, step)
    watched.close()


def by_scaler(subject: Subject, watched: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    called = Called(scaler, "GradScaler")
    for step in range(STEPS):
        subject.optimizer.zero_grad()
        called.scale(subject.loss(step)).backward()
        called.unscale_(subject.optimizer)
        nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
        called.step(subject.optimizer)
        scaler.update()
    watched.close()


def by_closure(subject: Subject, watched: Any) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            subject.optimizer.zero_grad()
            loss = subject.loss(step)
            loss.backward()
            subject.clip()
            return loss

        subject.optimizer.step(closure)
    watched.close()


class EndOfLoop(Exception):
    """A user's exception, which ends a loop."""


def by_hand(subject: Subject, watched: Any) -> None:
    """Dump by hand, and end by an exception through the watch and the dumper."""

    def train() -> None:
        for step in range(STEPS):
            subject.optimizer.zero_grad()
            loss = subject.loss(step)
            loss.backward()
            watched.step(loss=loss)
            subject.dumper.dump(subject.model, step)
            subject.clip()
            subject.optimizer.step()
        subject.dumper.wait()
        raise EndOfLoop

    with suppress(EndOfLoop), watched, subject.dumper:
        train()


def by_several_optimizers(subject: Subject, watched: Any) -> None:
    """End by an uncaught exception and the exit of the interpreter; the watch is not closed."""
    for step in range(STEPS):
        for optimizer in subject.optimizers:
            optimizer.zero_grad()
        subject.loss(step).backward()
        subject.clip()
        for optimizer in subject.optimizers:
            optimizer.step()
    Called(sys, "sys").excepthook(EndOfLoop, EndOfLoop(), None)
    while _at_exit:
        action, args, kwargs = _at_exit.pop()
        Called(functools.partial(action, *args, **kwargs), "atexit").__call__()


def by_backward(subject: Subject, watched: Any) -> None:
    """Step each optimizer inside backward, as soon as its last gradient is complete."""
    handles = []
    for layer, optimizer in zip(layers(subject), subject.optimizers, strict=True):
        missing = set()

        def step_at_last(
            parameter: Tensor,
            layer: nn.Module = layer,
            optimizer: torch.optim.Optimizer = optimizer,
            missing: set[Tensor] = missing,
        ) -> None:
            missing.discard(parameter)
            if not missing:
                for each in layer.parameters():
                    torch.nan_to_num_(each.grad).clamp_(-1, 1)
                optimizer.step()
                optimizer.zero_grad()
                missing.update(layer.parameters())

        missing.update(layer.parameters())
        handles += [
            each.register_post_accumulate_grad_hook(step_at_last) for each in layer.parameters()
        ]
    for step in range(STEPS):
        subject.loss(step).backward()
    for handle in handles:
        handle.remove()
    watched.close()


def layers(subject: Subject) -> list[nn.Module]:
    return [layer for layer in subject.model.children() if isinstance(layer, nn.Linear)]


# Loops with a GhostEngine: its errors come out, as GradsightErrors, and training goes on without.


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def called_off(engine: Any, call: Callable[[], Any]) -> Any:
    """Call the engine; return the engine to go on with, which is none after an error."""
    try:
        call()
    except gradsight.GradsightError as error:
        return without_engine(engine, error)
    return engine


def without_engine(engine: Any, error: gradsight.GradsightError) -> NoWatch:
    """Report an error as a user does, and close the engine."""
    print(error, file=sys.stderr)
    try:
        engine.close()
    except gradsight.GradsightError as another:
        print(another, file=sys.stderr)
    return NoWatch()


def by_two_passes(subject: Subject, engine: Any) -> None:
    """Score two micro-batches per step.

    An error before backward leaves `.grad` as it was, one after backward as training wants it. Only
    after an error inside of backward is the step repeated.
    """
    for step in range(NAN_STEP):
        subject.optimizer.zero_grad()
        batches = subject.batches[step].split(3)
        at_start = torch.get_rng_state()
        number = 0
        while number < len(batches):
            before = torch.get_rng_state()
            in_backward = False
            done = number
            try:
                with engine.observe(domains=["a"] * len(batches[number])):
                    loss = mean_square(subject.model, batches[number])
                    in_backward = True
                    loss.backward()
                    done += 1
            except gradsight.GradsightError as error:
                engine = without_engine(engine, error)
                if done == number:
                    torch.set_rng_state(at_start if in_backward else before)
                if done == number and in_backward:
                    subject.optimizer.zero_grad()
                    done = 0
            number = done
        subject.clip()
        subject.optimizer.step()
    engine = called_off(engine, lambda: engine.verify(subject.batches[0][:3]))
    engine = called_off(engine, engine.honesty)
    engine = called_off(engine, lambda: engine.save(NAN_STEP))
    called_off(engine, engine.close)


def by_one_pass(subject: Subject, engine: Any) -> None:
    """Score in one pass, whose error may leave part of a gradient: the step is repeated."""
    for step in range(NAN_STEP):
        before = torch.get_rng_state()
        subject.optimizer.zero_grad()
        try:
            if isinstance(engine, NoWatch):
                loss = mean_square(subject.model, subject.batches[step])
            else:
                loss = engine.loss(subject.batches[step])
            loss.backward()
        except gradsight.GradsightError as error:
            engine = without_engine(engine, error)
            torch.set_rng_state(before)
            subject.optimizer.zero_grad()
            mean_square(subject.model, subject.batches[step]).backward()
        for parameter in subject.model.parameters():
            # One pass promises the gradient up to rounding.
            parameter.grad = (parameter.grad * 4096).round() / 4096
        subject.optimizer.step()
    called_off(engine, engine.close)


@dataclass(frozen=True)
class Watched:
    """A loop, and how it is watched."""

    loop: Loop
    optimizer: Callable[..., Any]
    by_hand: bool = False
    recorder: Any = True
    dumps: bool = False
    kind: ClassVar[str] = "Watch"

    def dumper(self, run_dir: Path) -> Any:
        return gradsight.GradientDumper(
            run_dir, enabled=self.dumps, step_interval=4, keep_last=2, dump_on="critical"
        )

    def open(self, subject: Subject, run_dir: Path, dumper: Any) -> Any:
        optimizers = subject.optimizers if subject.others else subject.optimizer
        return gradsight.watch(
            subject.model,
            None if self.by_hand else optimizers,
            run_dir=run_dir,
            sinks=[Sink()],
            histograms=gradsight.Schedule(step_interval=4),
            recorder=self.recorder,
            dump=dumper if self.dumps and not self.by_hand else None,
        )


@dataclass(frozen=True)
class Scored(Watched):
    """A loop with a GhostEngine."""

    mode: str = "two_pass"
    kind: ClassVar[str] = "GhostEngine"

    def open(self, subject: Subject, run_dir: Path, dumper: Any) -> Any:
        return gradsight.GhostEngine(
            subject.model,
            mean_square,
            torch.ones(2, 4),
            optimizer=subject.optimizer,
            mode=self.mode,
            exact_grad=self.mode == "two_pass",
            run_dir=run_dir,
            save_interval=2,
        )


LOOPS = {
    "optimizer": Watched(by_optimizer, sgd, dumps=True, recorder="batch"),
    "scaler": Watched(by_scaler, sgd),
    "closure": Watched(by_closure, lbfgs),
    "by hand": Watched(by_hand, sgd, by_hand=True, recorder="batch", dumps=True),
    "several optimizers": Watched(by_several_optimizers, one_per_layer),
    "optimizer in backward": Watched(by_backward, one_per_layer),
    "two passes": Scored(by_two_passes, sgd),
    "one pass": Scored(by_one_pass, sgd, mode="concat"),
}


# Entry points.


@functools.cache
def is_package(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


@functools.cache
def is_guard(code: CodeType) -> bool:
    return is_package(code) and Path(code.co_filename).name == GUARD


@functools.cache
def is_transparent(code: CodeType) -> bool:
    return any(each in code.co_filename for each in TRANSPARENT)


@functools.cache
def start_of(code: CodeType) -> int:
    """Return the offset at which a call starts: a generator is also resumed elsewhere."""
    return next(
        each.offset
        for each in dis.get_instructions(code)
        if each.opname == "RESUME" and not (each.arg or 0) & 3
    )


def caller_of(frame: FrameType) -> FrameType | None:
    """Return what has called a frame, leaving out decorators and context managers."""
    caller = frame.f_back
    while caller is not None and is_transparent(caller.f_code):
        caller = caller.f_back
    return caller


@dataclass(frozen=True)
class Place:
    """Where a call lies relative to the entry point below which it runs."""

    entry: FrameType
    guarded: bool
    """Whether the guard is at or above the call."""
    depth: int
    """Functions of Gradsight from the entry point to here, without the guard; 0: entry point."""


def place_of(frame: FrameType) -> Place:
    """Find the entry point of a call of Gradsight's.

    The caller of an entry point is not Gradsight. If there is Gradsight further out, that has only
    passed a call on to torch or to the user, as a replaced `backward` does: a hook that is called
    in there is an entry point of its own. But what the guard calls is below one guard already.
    """
    caller = caller_of(frame)
    is_direct = caller is not None and is_package(caller.f_code)
    while caller is not None and not is_package(caller.f_code):
        if caller.f_code.co_filename == __file__:
            caller = None  # the user, or the end of a callback
        else:
            caller = caller_of(caller)
    if caller is not None:
        outer = place_of(caller)
        if is_direct or outer.guarded:
            if is_guard(frame.f_code):
                return Place(outer.entry, True, outer.depth)
            return Place(outer.entry, outer.guarded, outer.depth + 1)
    return Place(frame, is_guard(frame.f_code), 0)


def origin_of(entry: FrameType) -> str:
    """Describe what has called an entry point, without a name from inside the package."""
    if entry.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
        return "function mode"
    caller = caller_of(entry)
    if caller is None:
        return "interpreter"
    file = caller.f_code.co_filename
    if caller.f_code is Called._call.__code__:
        return f"{caller.f_locals['self']._name}.{caller.f_locals['method']}"
    if file == __file__:
        return f"loop ({caller.f_code.co_name})"
    if file == threading.__file__:
        return "background thread"
    if file.startswith(TORCH):
        return f"torch/{file.removeprefix(TORCH)} ({caller.f_code.co_name})"
    return f"{Path(file).name} ({caller.f_code.co_name})"


ANY = "any"
"""The origin of a target that may be called from every entry point."""


@dataclass(frozen=True)
class Target:
    """A function that a fault is planted in, and the entry point that it is called from."""

    origin: str
    entry: CodeType
    code: CodeType

    def __str__(self) -> str:
        return f"{self.origin} > {name_of(self.entry)} > {name_of(self.code)}"


def name_of(code: CodeType) -> str:
    file = code.co_filename.removeprefix(PACKAGE)
    return f"{file}:{code.co_qualname}:{code.co_firstlineno}"


def target_of(frame: FrameType, deep: bool = False) -> Target | None:
    """Return the target that this new call is; None if nothing is planted here.

    A sink is the user's, but a target too: Gradsight calls it.

    deep: whether all functions below entry points are targets, and not only those that an entry
    point calls directly or through the guard.
    """
    code = frame.f_code
    if code is Sink.log_scalar.__code__:
        return Target("sink", code, code)
    if not is_package(code) or is_guard(code) or frame.f_lasti != start_of(code):
        return None
    place = place_of(frame)
    if place.depth == 0 or (place.depth > 1 and not deep):
        return None
    if deep:
        return Target(ANY, code, code)
    return Target(origin_of(place.entry), place.entry.f_code, code)


# Tracing and planting.


@contextmanager
def profiled(profile: Any) -> Iterator[None]:
    """Profile this thread, and all threads that start from now on."""
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        threading.setprofile(None)


def is_on(profile: Any) -> bool:
    """Return whether to look at this thread: others are started before the loop begins."""
    return profile.on or threading.current_thread() is not threading.main_thread()


class Counter:
    """Counts the calls of every target while it is on."""

    def __init__(self, deep: bool = False) -> None:
        self.on = False
        self.lasting = False
        self.calls: dict[Target, int] = {}
        self._deep = deep

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_on(self):
            target = target_of(frame, self._deep)
            if target is not None:
                self.calls[target] = self.calls.get(target, 0) + 1


class Planter:
    """Raises at one call of a target; with `lasting`, also at all later calls of its function."""

    def __init__(
        self, target: Target, number: int, error: BaseException, lasting: bool = False
    ) -> None:
        self.on = False
        self.raised = False
        self.lasting = lasting
        self._target = target
        self._left = number
        self._error = error

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code is not self._target.code or not is_on(self):
            return
        if self.raised:
            if not self.lasting or target_of(frame, deep=True) is None:
                return
        else:
            if target_of(frame, deep=self._target.origin == ANY) != self._target:
                return
            self._left -= 1
            if self._left > 0:
                return
        self.raised = True
        if self.lasting:
            # A profile that raises is taken off: the trace puts it on again.
            sys.settrace(self._profile_again)
        raise self._error

    def _profile_again(self, frame: FrameType, event: str, argument: Any) -> None:
        if sys.getprofile() is None:
            sys.setprofile(self)


# One attempt.


_at_exit: list[tuple[Any, Any, Any]] = []
"""What Gradsight has registered for the exit of the interpreter, while a loop runs."""
_earlier_threads: list[threading.Thread] = []
"""Threads that an earlier failure has left running: nobody waits for them again."""


@contextmanager
def exit_callbacks() -> Iterator[None]:
    """Keep what Gradsight registers with `atexit`, for a loop to call."""
    register, unregister = atexit.register, atexit.unregister

    def register_here(action: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_package(sys._getframe(1).f_code):
            return register(action, *args, **kwargs)
        _at_exit.append((action, args, kwargs))
        return action

    def unregister_here(action: Any) -> None:
        _at_exit[:] = [each for each in _at_exit if each[0] != action]
        unregister(action)

    atexit.register, atexit.unregister = register_here, unregister_here
    try:
        yield
    finally:
        atexit.register, atexit.unregister = register, unregister
        _at_exit.clear()


def hooks_of(module: nn.Module) -> list[Any]:
    """Return all hooks of a module, and the `forward` that something may have put over its own."""
    hooks = [list(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")]
    return [*hooks, vars(module).get("forward")]


def state(subject: Subject) -> dict[str, Any]:
    """Return whatever a watch may have switched, replaced or registered."""
    parameters = list(subject.model.parameters())
    modules = list(subject.model.modules())
    clips = (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_)
    return {
        "weights": [p.detach().numpy().tobytes() for p in parameters],
        "gradients": [None if p.grad is None else p.grad.numpy().tobytes() for p in parameters],
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "modes": [module.training for module in modules],
        "module hooks": [hooks_of(module) for module in modules],
        "tensor hooks": [
            (list(p._backward_hooks or ()), list(p._post_accumulate_grad_hooks or ()))
            for p in parameters
        ],
        "optimizer hooks": [
            (list(each._optimizer_step_pre_hooks), list(each._optimizer_step_post_hooks))
            for each in subject.optimizers
        ],
        "optimizer methods": [
            [name for name in vars(each) if callable(vars(each)[name])]
            for each in subject.optimizers
        ],
        "global optimizer hooks": (
            list(torch_optimizer._global_optimizer_pre_hooks),
            list(torch_optimizer._global_optimizer_post_hooks),
        ),
        "global module hooks": [
            list(value) for name, value in vars(torch_module).items() if name.endswith("_hooks")
        ],
        "backward": (torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward),
        "scaler": [vars(torch.amp.GradScaler)[name] for name in ("scale", "unscale_", "step")],
        "clipping": [[id(cell.cell_contents) for cell in each.__closure__ or ()] for each in clips],
        "function modes": (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ),
        "signals": [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)],
        "exception hooks": (sys.excepthook, threading.excepthook),
        "grad mode": torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
    }


def forget_earlier_threads() -> None:
    """Take the threads that run now as given: an attempt need not end them."""
    _earlier_threads[:] = threading.enumerate()


def new_threads() -> list[threading.Thread]:
    """Return the threads that this attempt has started and that do not end."""
    alive = [each for each in threading.enumerate() if each not in _earlier_threads]
    for thread in alive:
        thread.join(5)
    return [thread for thread in alive if thread.is_alive()]


def on_signal(number: int, frame: Any) -> None:
    """Stand for a user's handler of SIGTERM."""


def on_exception(kind: Any, error: Any, trace: Any) -> None:
    """Stand for a user's exception hook."""


@contextmanager
def user_callbacks() -> Iterator[None]:
    """Have the user's own handlers of signals and uncaught exceptions in place."""
    handler, hook = signal.signal(signal.SIGTERM, on_signal), sys.excepthook
    sys.excepthook = on_exception
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        sys.excepthook = hook


def next_watch(run_dir: Path | None) -> list[Any]:
    """Train two steps under another watch, and return what it has recorded.

    A flag, listener or lock that a fault has left behind shows in here.
    """
    generator = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        run_dir = run_dir or Path(folder) / "run"
        subject = Subject.make(sgd)
        with gradsight.watch(
            subject.model, subject.optimizer, run_dir=run_dir, start_step=100, quiet=True,
            recorder=False, preflight=False,
        ):  # fmt: skip
            for step in range(2):
                subject.loss(step).backward()
                subject.optimizer.step()
        steps = [each for each in gradsight.open_run(run_dir).steps() if each.step >= 100]
    torch.set_rng_state(generator)
    return [(each.step, each.total_norm) for each in steps]


@dataclass
class Reported:
    """What Gradsight has said, and where."""

    warned: list[str] = field(default_factory=list)
    stderr: str = ""
    recorded: str = ""

    def has(self, text: str) -> bool:
        return text in self.stderr or text in self.recorded or any(text in w for w in self.warned)


def attempt(
    watched: Watched, profile: Any, warnings_as: str = "always"
) -> tuple[dict[str, Any], Reported]:
    """Run a watched loop with a profile on; return the state after it and what was reported."""
    reported = Reported()
    stream = io.StringIO()
    subject = Subject.make(watched.optimizer)
    with (
        tempfile.TemporaryDirectory() as folder,
        user_callbacks(),
        exit_callbacks(),
        redirect_stderr(stream),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter(warnings_as)  # type: ignore[arg-type]
        # Pipes and sockets of other tests.
        warnings.simplefilter("ignore", ResourceWarning)
        run_dir = Path(folder) / "run"
        dumper = watched.dumper(run_dir)
        subject.dumper = Called(dumper, "GradientDumper")
        with profiled(profile):
            opened = watched.open(subject, run_dir, dumper)
            profile.on = True
            try:
                watched.loop(subject, Called(opened, watched.kind))
                subject.dumper.close()
            finally:
                profile.on = False
                opened.close()
                dumper.close()
        after = state(subject)
        reported.recorded = _recorded(run_dir)
        if profile.lasting:
            # A function that always fails may be the one that ends a thread or releases the run.
            after |= {"threads": [], "next watch": next_watch(None)}
        else:
            threads = [thread.name for thread in new_threads()]
            after |= {"threads": threads, "next watch": next_watch(run_dir)}
    reported.warned = [str(each.message) for each in caught or ()]
    reported.stderr = stream.getvalue()
    return after, reported


def _recorded(run_dir: Path) -> str:
    """Return the problems, incident notes and diagnoses that a run recorded."""
    if not (run_dir / "run.sqlite").exists():
        return ""  # an engine makes a record when it has something to report
    run = gradsight.open_run(run_dir)
    texts = [problem.message for problem in run.problems()]
    texts += [path.read_text() for path in run_dir.rglob("incident.json")]
    texts += [str(finding.diagnosis) for finding in run.findings()]
    return "\n".join(texts)


def differences(expected: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if after[name] != value]


@functools.cache
def targets(loop: str, deep: bool = False) -> dict[Target, int]:
    """Return the targets of a loop, with the number of their calls."""
    forget_earlier_threads()
    counter = Counter(deep)
    attempt(LOOPS[loop], counter)
    return counter.calls


@functools.cache
def plain(loop: str) -> dict[str, Any]:
    """Return the state after the loop without Gradsight."""
    subject = Subject.make(LOOPS[loop].optimizer)
    with user_callbacks():
        LOOPS[loop].loop(subject, NoWatch())
        return state(subject) | {"threads": [], "next watch": next_watch(None)}


@dataclass(frozen=True)
class Fault:
    """A fault to plant: in which loop, at which call of a target, and how."""

    loop: str
    target: Target
    number: int
    way: str

    def __str__(self) -> str:
        return f"{self.loop}, {self.way}: {self.target} call {self.number}"


def plant(fault: Fault) -> str | None:
    """Plant a fault; return what went wrong, or None."""
    warnings_as, lasting = WAYS[fault.way]
    planter = Planter(fault.target, fault.number, Planted(), lasting)
    wrong = None
    faulthandler.dump_traceback_later(TOO_LONG, exit=True)
    try:
        after, reported = attempt(LOOPS[fault.loop], planter, warnings_as)
        changed = differences(plain(fault.loop), after)
        if changed:
            wrong = f"left changed: {', '.join(changed)}"
        elif planter.raised and not reported.has(MESSAGE):
            wrong = "was not reported"
        elif not planter.raised and fault.target.origin not in (ANY, "background thread"):
            wrong = "was not planted"  # how often a thread runs depends on time
    except Exception as error:
        wrong = f"raised {type(error).__name__}: {error}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    if lasting or wrong is not None:
        # What is left behind must not make the next attempt fail.
        forget_earlier_threads()
        torch.set_grad_enabled(True)
        torch.set_anomaly_enabled(False)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
    return None if wrong is None else f"{fault}: {wrong}"


WAYS = {
    "once": ("always", False),
    "for good": ("always", True),
    "once, warnings are errors": ("error", False),
    "for good, warnings are errors": ("error", True),
}
"""How warnings are treated, and whether the function fails from then on."""


def one_loop_each(seed: int = 1) -> list[Fault]:
    """Return faults in every target of any loop, each in one of its loops.

    They are planted at the first call and at one chosen by chance, in alternate ways.
    """
    choose = random.Random(seed)
    loops: dict[Target, list[str]] = {}
    for loop in LOOPS:
        for target in targets(loop):
            loops.setdefault(target, []).append(loop)
    places = []
    for target in sorted(loops, key=str):
        loop = choose.choice(loops[target])
        calls = targets(loop)[target]
        places += [(loop, target, number) for number in _first_and_other(calls, choose)]
    return _in_alternate_ways(places)


def all_loops(loop: str, seed: int = 2) -> list[Fault]:
    """Return faults in every target of one loop, also those that other loops have."""
    choose = random.Random(seed)
    places = [
        (loop, target, number)
        for target, calls in sorted(targets(loop).items(), key=str)
        for number in {*_first_and_other(calls, choose), calls}
    ]
    return _in_alternate_ways(places)


def all_functions(loop: str, seed: int = 3) -> list[Fault]:
    """Return a fault in every function that runs below an entry point, however deep."""
    choose = random.Random(seed)
    places = [
        (loop, target, choose.randint(1, calls))
        for target, calls in sorted(targets(loop, deep=True).items(), key=str)
    ]
    return _in_alternate_ways(places)


def _first_and_other(calls: int, choose: random.Random) -> list[int]:
    return [1] if calls == 1 else [1, choose.randint(2, calls)]


def _in_alternate_ways(places: list[tuple[str, Target, int]]) -> list[Fault]:
    ways = list(WAYS)
    return [Fault(*place, ways[number % len(ways)]) for number, place in enumerate(places)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="plant in deeper functions too")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faults = one_loop_each(given.seed)
    for loop in LOOPS if given.all else ():
        faults += all_functions(loop, given.seed)
    failures = [wrong for fault in faults if (wrong := plant(fault)) is not None]
    print(*failures, sep="\n")
    promise = "an internal fault never reaches the loop"
    print(json.dumps({"promise": promise, "tries": len(faults), "failures": len(failures)}))
    sys.exit(bool(failures))
