"""Run the command line.

Commands import their dependencies late, so that a missing package gives a sentence and no traceback.
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
"""Shells' exit status after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    from mambacache.cli.errors import sentence

    try:
        from mambacache.cli.parser import parse

        args = parse(sys.argv[1:] if argv is None else argv)
        with warnings.catch_warnings():  # without source lines
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
    """Discard buffered output after the reader ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            with suppress(OSError, AttributeError):  # the stream is no file
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
