"""The command line: `mambacache generate | chat | plan | demo`.

What a command needs is imported when it runs: without the dependencies there is a sentence and no traceback.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

logger = logging.getLogger(__name__)

INTERRUPTED = 130
"""What shells call the end by Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if it did its work, 1 with one sentence on standard error if it cannot."""
    from mambacache.cli.errors import sentence

    try:
        from mambacache.cli.parser import parse

        args = parse(sys.argv[1:] if argv is None else argv)
        with warnings.catch_warnings():  # a line each, without the source that Python shows
            warnings.showwarning = lambda message, *_, **__: logger.warning("%s", message)
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 1
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        try:
            print(f"mambacache: {sentence(error)}", file=sys.stderr, flush=True)
        except BrokenPipeError:
            _drop_output()
        return 1


def _drop_output() -> None:
    """Whoever read has gone, such as `head`: what is left in the buffers goes nowhere, and nothing is said of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            with suppress(OSError, AttributeError):  # of a stream that is no file
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
