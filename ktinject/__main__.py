"""Where the command `ktinject` and `python -m ktinject` begin, so that Ctrl-C is dealt with before the long imports.

Python turns Ctrl-C into KeyboardInterrupt in whatever code runs at that moment. Code that imports modules often loses
it: extension modules turn it into an ImportError, after which transformers goes on and says twenty seconds later that
some class could not be imported. So while modules are imported Ctrl-C ends the process at once. There is nothing to
give back then that the operating system does not take anyway.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended: 128 + SIGINT
_SAID = b"ktinject: interrupted\n"


def main() -> None:
    """The `ktinject` command."""
    # Whoever started this process may have decided that it ignores Ctrl-C, as `nohup` and scripts with `&` do.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from ktinject import cli

        cli.main()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            os.write(2, _SAID)
        raise
    finally:
        # What is left is the interpreter's end, which another Ctrl-C would only fill with tracebacks.
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT: end the process if the main thread imports a module, else raise KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            os.write(2, _SAID)
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
