"""A process of its own for a test, which begins with torch, transformers and ktinject imported.

Many tests need a process: settings are read once, memory is limited or measured, the interpreter's end is what they are
about. To import all this takes longer than most of them. So one server imports it, when it is asked first, and forks
for each request. It computes nothing itself and has one thread, so a fork is as good as a new process. The interpreter
ends as it always does.

One server for a run of pytest, with all of its workers; it ends when the run does. What libraries read while they are
loaded, such as OMP_* and LD_PRELOAD, needs a server of its own. Tests of imports need a new process.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Where the server listens. The workers of a run inherit it.
ADDRESS = "PREPARED_PROCESSES_AT"

# --- the test's side ---


def run(
    code: str | Path,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str = "",
    check: bool = False,
    server: Server | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run code, or a script, as `subprocess.run([sys.executable, ...], capture_output=True, text=True)` would."""
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as connection:
        folder = Path(name)
        request = {
            "script" if isinstance(code, Path) else "code": str(code),
            "arguments": [str(argument) for argument in arguments],
            "environ": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
        }
        (folder / "stdin").write_text(input, "utf-8")
        (folder / "request").write_text(json.dumps(request), "utf-8")
        connection.connect("\0" + (server.address if server else os.environ[ADDRESS]))
        connection.sendall(name.encode())
        answer = connection.recv(64)
        assert answer, "the server of prepared processes has ended"
        done = subprocess.CompletedProcess(
            [request.get("script", "-c"), *request["arguments"]],
            int(answer),
            (folder / "stdout").read_text("utf-8"),
            (folder / "stderr").read_text("utf-8"),
        )
    if check and done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


class Server:
    """Before the first request it has imported nothing and is idle."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        # In Linux's abstract namespace: no file, whose path might be too long.
        self.address = f"prepared-processes-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + self.address)
            listener.listen(64)
            # Ctrl-C is for the test; what the test has started then ends with it.
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=environ,
                start_new_session=True,
            )

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# --- the server's side ---


def import_all() -> None:
    from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    import ktinject.cli
    import ktinject.optimize
    import ktinject.tools.benchmark  # noqa: F401


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Answer until stdin ends; in a forked process, its request."""
    imported = False
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        if not imported:
            import_all()
            # Libraries have threads of their own, which wait, and which a fork gets none of.
            warnings.filterwarnings("ignore", ".* is multi-threaded", DeprecationWarning)
            gc.freeze()  # else each fork would copy it all when it looks for garbage, at its end at the latest
            imported = True
        if os.fork() == 0:
            listener.close()
            return attend(connection)
        connection.close()


def attend(connection: socket.socket) -> dict[str, Any]:
    """Fork once more and tell the exit code of that process, which returns its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = Path(connection.recv(4096).decode())
    child = os.fork()
    if child == 0:
        connection.close()
        request: dict[str, Any] = json.loads((folder / "request").read_text("utf-8"))
        for number, name in enumerate(["stdin", "stdout", "stderr"]):
            file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
        return request
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([connection, ended], [], [])
    if connection in ready:  # who asked is gone
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended in ready:
        connection.sendall(str(code).encode())
    os._exit(0)


def work(request: dict[str, Any]) -> None:
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    script = request.get("script")
    sys.argv[:] = [script or "-c", *request["arguments"]]
    sys.path.insert(0, str(Path(script).parent) if script else "")
    if script:
        runpy.run_path(script, run_name="__main__")
    else:
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(request["code"], "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    # The kernel forgets children that are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    del sys.path[0]  # this folder, where another ktinject is
    own = sys.modules["__main__"]  # its names are needed though another module takes the place
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        work(asked)
