"""Python processes for tests, forked from a parent that has already imported torch.

`run` and `Popen` take what follows `python` on a command line (a script, `-c CODE` or `-m MODULE`,
then arguments) and otherwise work like their namesakes in `subprocess`:

    done = warm.run(["-c", "import torch; print(torch.ones(2).sum())"], capture_output=True, text=True)

A new interpreter needs two seconds to import torch, a forked one a few milliseconds. With
`preload=["transformers"]` the process is forked from a second parent, which has imported these
modules as well. They must not start threads. Use `sys.executable` where a new interpreter is the
subject of the test: what an import loads, what Python's own flags do, limits on memory.

How it works: each test process starts one warm parent, which imports torch and starts no thread.
For each request it forks twice; the process in the middle ends at once, so the test process, which
is registered as the "subreaper" of its descendants, becomes the parent of the new process. That is
why `wait`, `kill` and exit codes are those of an ordinary child.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
TRANSFORMERS = ("transformers.models.gpt2.modeling_gpt2",)
"""What to preload for processes that use models of transformers. One name for all tests, so that
they share one parent: most of the time goes into what its models have in common."""
READ_BY_PYTHON_AT_ITS_START = ("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONHASHSEED")


# In the test process.


class Popen(subprocess.Popen[Any]):
    """A Python process like `subprocess.Popen([sys.executable, *args])`, started warm."""

    def __init__(
        self, args: Sequence[object], *, preload: Sequence[str] = (), **options: Any
    ) -> None:
        self._preload = tuple(preload)
        super().__init__(args, **options)  # type: ignore[arg-type]

    def _execute_child(  # type: ignore[override]
        self, args: Sequence[object], executable: Any, preexec_fn: Any, close_fds: Any,
        pass_fds: Any, cwd: Any, env: Mapping[str, str] | None, startupinfo: Any,
        creationflags: Any, shell: Any, stdin: int, to_stdin: int, from_stdout: int, stdout: int,
        from_stderr: int, stderr: int, *rest: Any,
    ) -> None:  # fmt: skip
        assert (preexec_fn, pass_fds, shell) == (None, (), False), "use sys.executable for this"
        streams = [own if own != -1 else usual for usual, own in enumerate((stdin, stdout, stderr))]
        environment = {name: str(value) for name, value in (env or os.environ).items()}
        for name in READ_BY_PYTHON_AT_ITS_START:
            assert environment.get(name) == os.environ.get(name), f"use sys.executable for {name}"
        order = {"args": [str(part) for part in args], "cwd": str(cwd or Path.cwd())}
        self.pid = _warm_parent(self._preload).fork({**order, "env": environment}, streams)
        self._child_created = True
        self._close_pipe_fds(stdin, to_stdin, from_stdout, stdout, from_stderr, stderr)


def run(
    args: Sequence[object], *, capture_output: bool = False, input: Any = None, check: bool = False,
    timeout: float | None = None, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """Run a Python process to its end, like `subprocess.run([sys.executable, *args])`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


class _WarmParent:
    """The process that imports torch once and forks on demand."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.owner = os.getpid()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        other.close()
        atexit.register(self._close)

    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        """Start a process and return its id."""
        file = _memory_file(json.dumps(order))
        try:
            socket.send_fds(self._socket, [b"fork"], [file, *streams])
        finally:
            os.close(file)
        answer = self._socket.recv(64)
        assert answer, "the warm parent has ended; its error is above"
        return int(answer)

    def _close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.close()
            self._process.wait(10)


_warm_parents: dict[tuple[str, ...], _WarmParent] = {}
"""By the modules that they import besides torch."""


def _warm_parent(modules: tuple[str, ...] = ()) -> _WarmParent:
    """The warm parent of this process with these modules, started at its first use."""
    parent = _warm_parents.get(modules)
    if parent is None or parent.owner != os.getpid():
        parent = _warm_parents[modules] = _WarmParent(modules)
    return parent


def _memory_file(text: str) -> int:
    """A file in memory: an environment may be longer than a message of a socket."""
    file = os.memfd_create("order")
    os.write(file, text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    return file


# In the warm parent.


def import_what_tests_use(modules: Sequence[str]) -> None:
    """Import torch, what most tests need with it and these modules, and start no thread."""
    import numpy  # noqa: F401
    import rich.console  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.utils.checkpoint  # noqa: F401

    import gradsight

    for name in gradsight.__all__:
        getattr(gradsight, name)
    for name in modules:
        importlib.import_module(name)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a thread was started: forked processes could hang"
    gc.freeze()


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for every request; return the request, in each forked process."""
    while True:
        message, files, *_ = socket.recv_fds(connection, 16, 4)
        if not message:
            sys.exit()
        with os.fdopen(files[0]) as file:
            order: dict[str, Any] = json.load(file)
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            for usual, stream in enumerate(files[1:]):
                os.dup2(stream, usual)
            os.closerange(3, 256)
            return order
        os.close(tell)
        os.waitpid(middle, 0)  # from here on the new process has its new parent
        connection.send(os.read(told, 64))
        for open_file in (told, *files[1:]):
            os.close(open_file)


def become(order: dict[str, Any]) -> None:
    """Go on as the Python process that was asked for."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    random.seed()
    import numpy

    numpy.random.seed()
    args = order["args"]
    unbuffered = args[0] == "-u"
    del args[: int(unbuffered)]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    output: Any = open(1, "wb", closefd=False, buffering=-int(not unbuffered))  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, write_through=unbuffered)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        open(2, "wb", closefd=False),  # noqa: SIM115
        errors="backslashreplace",
        line_buffering=True,
    )
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path[1:] if path not in paths]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    _run_sitecustomize(paths)
    if args[0] == "-m":
        import runpy

        sys.argv[:] = args[1:]
        sys.path[:] = [os.getcwd(), *paths, *known]
        runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]
        return
    if args[0] == "-c":
        code, name = args[1], "<string>"
        sys.argv[:] = ["-c", *args[2:]]
        sys.path[:] = ["", *paths, *known]
    else:
        assert not args[0].startswith("-"), f"a warm process cannot follow {args[0]}"
        code, name = Path(args[0]).read_text(encoding="utf-8"), args[0]
        main.__file__ = name
        sys.argv[:] = args
        sys.path[:] = [str(Path(name).resolve().parent), *paths, *known]
    sys.modules["__main__"] = main
    exec(compile(code, name, "exec"), main.__dict__)


def _run_sitecustomize(paths: Sequence[str]) -> None:
    """Run the sitecustomize.py on PYTHONPATH, as a new interpreter does.

    That of `gradsight check` waits for imports; those that have happened already are made up for.
    """
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", list(paths))
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    waiting = getattr(module, "_actions", {})
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)(sys.modules[name])


def end(function: Callable[[dict[str, Any]], None], order: dict[str, Any]) -> None:
    """Call a function and end the process as Python does, but without taking torch apart.

    That takes a second. `python`'s own order is kept: threads, exit functions, streams.
    """
    code = 0
    try:
        function(order)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if code and not isinstance(exit.code, int):
            print(exit.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        here = error.__traceback__ and error.__traceback__.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error, here and here.tb_next)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_what_tests_use(sys.argv[2:])
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end(become, wanted)
