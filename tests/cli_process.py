"""The command line in a process of its own."""

from __future__ import annotations

import sys

# Whoever runs tests in the background may have Ctrl-C ignored, which processes inherit.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mambacache.cli import main
sys.exit(main())
"""
PROCESS = (sys.executable, "-P", "-c", PROGRAM)
