"""The commands `python` and `gradsight` for shell scripts, started as warm processes.

A shell script needs commands on its PATH. Those made here are small Python programs that pass
their arguments, directory, environment and standard streams to the test process and end with the
exit code that it sends back. The test process starts the real work through `warm.Popen`.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import warm

COMMANDS = {"python": [], "gradsight": ["-m", "gradsight"]}
PROGRAM = """\
#!{python} -IS
import json, os, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
order = {{"args": {start!r} + sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
socket.send_fds(connection, [b"{{"], [0, 1, 2])
connection.sendall(json.dumps(order).encode()[1:] + b"\\n")
sys.exit(int(connection.recv(16)))
"""


@contextlib.contextmanager
def warm_commands(folder: Path, names: Iterable[str] = COMMANDS) -> Iterator[Path]:
    """Put commands into a folder, and serve them while the context is open."""
    address = f"\0gradsight-{os.getpid()}-{secrets.token_hex(8)}"
    folder.mkdir()
    for name in names:
        program = PROGRAM.format(python=sys.executable, address=address, start=COMMANDS[name])
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_accept, args=[listener], daemon=True).start()
        yield folder
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    one_at_a_time = threading.Lock()  # the warm parent answers one request after the other
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed
        threading.Thread(target=_serve, args=[connection, one_at_a_time], daemon=True).start()


def _serve(connection: socket.socket, one_at_a_time: threading.Lock) -> None:
    """Run one command: start it, wait for it, and send its exit code."""
    with connection:
        message, streams, *_ = socket.recv_fds(connection, 1, 3)
        message += connection.makefile("rb").readline()
        order = json.loads(message)
        stdin, stdout, stderr = streams
        with one_at_a_time:
            process = warm.Popen(
                order["args"],
                cwd=order["cwd"],
                env=order["env"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        for stream in streams:
            os.close(stream)

        def end_with_the_command() -> None:
            with contextlib.suppress(OSError):
                if not connection.recv(1):
                    process.terminate()

        threading.Thread(target=end_with_the_command, daemon=True).start()
        code = process.wait()
        with contextlib.suppress(OSError):  # the shell has ended the command
            connection.sendall(str(code if code >= 0 else 128 - code).encode())
