"""Delay the first Ctrl-C until no step is under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class Interrupts:
    """Count Ctrl-C in the main thread, unless the host has its own handler.

    `check` or the context's end raises the first; the second is raised at once.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self.count = 0
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        if self.count:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
