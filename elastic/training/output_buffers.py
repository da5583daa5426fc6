"""Output buffers: what Python and C hold back of what this process has written.

Led to a file they would hold kilobytes, which a SIGKILL takes along. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import threading

_LINE_BUFFERED = 1  # C's _IOLBF

_flushing = threading.Lock()
# A child that is forked during a flush would find the stream locked for ever.
os.register_at_fork(
    before=_flushing.acquire,
    after_in_parent=_flushing.release,
    after_in_child=_flushing.release,
)


def buffer_by_line() -> None:
    """From now on a whole line is written at once, whatever descriptors 1 and 2 are led to."""
    for stream in _python_streams():
        with contextlib.suppress(ValueError, OSError):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(ValueError, OSError, AttributeError):
        library, stdout = _c_stdout()
        library.setvbuf(stdout, None, _LINE_BUFFERED, 0)


def flush() -> None:
    """Write what is held back, lines that are only begun too. Callable from any thread."""
    with _flushing:
        for stream in _python_streams():
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
        with contextlib.suppress(ValueError, OSError, AttributeError):
            library, stdout = _c_stdout()
            library.fflush(stdout)


def _python_streams() -> list[io.TextIOWrapper]:
    """Not what a user has put in their place, which may be anything."""
    streams = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
    return [stream for stream in streams if isinstance(stream, io.TextIOWrapper)]


def _c_stdout() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library = ctypes.CDLL(None)
    return library, ctypes.c_void_p.in_dll(library, "stdout")
