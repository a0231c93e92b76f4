"""The command line in a process of its own."""

from __future__ import annotations

import sys

# A shell that runs tests in the background may ignore Ctrl-C, and processes inherit that.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mambacache.cli import main
sys.exit(main())
"""
PROCESS = (sys.executable, "-P", "-c", PROGRAM)
