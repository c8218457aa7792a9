"""A process that renders chat templates, within limits of time, memory and output; `templates.py` starts it.

A template is a program that came with a model, and may have no end. A thread that renders one cannot be ended, and
its memory is the caller's. So it is rendered here: the kernel ends this process when the template has used up its
time, and refuses it memory. Nothing of ktinject is imported, and of transformers only what renders templates.

    stdin, stdout:  8 bytes, the length of what follows; JSON
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import IO, Any

_MOST_SAID = 1000  # characters of what a template says when it refuses


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for the answer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    for name in ("torch", "PIL"):  # they take seconds and hundreds of MB, and templates do not use them
        sys.modules[name] = None  # type: ignore[assignment]
    while (asked := read(sys.stdin.buffer)) is not None:
        answer = _limited(asked)
        write(answers, answer)
        if answer.get("kind") == "memory":
            return  # what it has left may be in pieces


def read(stream: IO[bytes]) -> Any:
    """None at the end of the stream."""
    length = stream.read(8)
    return json.loads(stream.read(int.from_bytes(length, "little"))) if len(length) == 8 else None


def write(stream: IO[bytes], value: Any) -> None:
    data = json.dumps(value, default=str).encode()
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _limited(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer; {"kind", "said"} if there is none."""
    try:
        import jinja2
        from transformers.utils import chat_template_utils as utils  # the first time, not within limits
    except ImportError as error:
        return {"kind": "failed", "said": f"{type(error).__name__}: {error}"}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + asked["bytes"]
    if limits[1] != resource.RLIM_INFINITY:
        most = min(most, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    # Of computing, in whatever code: at its end the kernel ends the process.
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
    try:
        return _answer(asked, utils)
    except MemoryError:
        return {"kind": "memory", "said": ""}
    except Exception as error:
        # Exactly this class is what a template raises by itself, with words for who wrote the messages.
        refuses = type(error) is jinja2.TemplateError
        said = str(error) if refuses else f"{type(error).__name__}: {error}"
        return {"kind": "refused" if refuses else "failed", "said": said[:_MOST_SAID]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _answer(asked: dict[str, Any], utils: Any) -> dict[str, Any]:
    if asked["messages"] is None:
        from jinja2 import meta

        # A template of a hostile file is parsed within limits, too: constants are computed then.
        environment = utils._compile_jinja_template(asked["template"]).environment
        return {"names": sorted(meta.find_undeclared_variables(environment.parse(asked["template"])))}
    rendered, _ = utils.render_jinja_template(
        conversations=[asked["messages"]],
        tools=asked["tools"],
        chat_template=asked["template"],
        add_generation_prompt=True,
        **asked["variables"],
    )
    text = rendered[0]
    return {"text": text} if len(text) <= asked["characters"] else {"kind": "long", "said": ""}


if __name__ == "__main__":
    main()
