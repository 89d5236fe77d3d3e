"""Entry point of the command ``para_core`` and of ``python -m para_core``.

The command line itself is in :mod:`para_core.cli`, which needs the extra ``cli`` (in a checkout:
``pip install '.[cli]'``). Tests: tests/cli/test_interrupts.py, tests/cli/test_help.py.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}


def main() -> None:
    """Run the command line, and exit with its exit code."""
    _end_at_once_on_signals()
    try:
        from para_core.cli.app import run
        from para_core.cli.signals import SignalCode
    except ModuleNotFoundError as error:
        from para_core.fleet.failures import describe_exception

        sys.exit(f"error: {describe_exception(error)}")
    code = run(sys.argv[1:])
    if isinstance(code, SignalCode):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end_at_once_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process with one sentence, until a command has something to end or to
    keep.

    A library that is being imported may swallow a KeyboardInterrupt, or turn it into another exception.
    """
    # As is_first_of_torchrun of cli/torchrun.py, which cannot be imported without the extra cli.
    first = "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"

    def end(signum: int, frame: Any) -> None:
        try:
            if first:
                os.write(2, f"{_SIGNALS[signal.Signals(signum)]}\n".encode())
        finally:
            # Also if stderr is a closed pipe: a library that is being imported may swallow the OSError.
            os._exit(128 + signum)

    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        # Another handler is that of the program that called main. A background job of a shell ignores SIGINT.
        if signal.getsignal(number) is default:
            signal.signal(number, end)


if __name__ == "__main__":
    main()
