"""Lines of a rank's output: cut from raw bytes, and made safe for a terminal or to keep as text.

What a rank writes may hold anything: half a character, a progress bar that redraws itself, an
escape sequence that would repaint the screen of whoever looks. Pure: no file, no ray, no torch.
"""

from __future__ import annotations

MOST_LAST_LINES = 20
MOST_LAST_BYTES = 4000
TAIL_BYTES = 64 * 1024
"""Enough raw output for that many lines, also where a progress bar has redrawn one of them."""

_MOST_LINE_BYTES = 64 * 1024
_CUT = "..."


def readable(line: bytes) -> str:
    """One line as a terminal would leave it, everything unprintable spelled out as an escape.

    Of a line that was redrawn (carriage returns) only its last form is left; tabs become spaces.
    """
    text = line.decode("utf-8", "backslashreplace").rstrip("\r").rsplit("\r", 1)[-1]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.expandtabs())


def last_lines(tail: bytes, *, is_whole: bool) -> list[str]:
    """The last lines of an output that ends with `tail`, readable: at most 20 and 4 kB in all.

    `is_whole` says that the tail begins with the start of a line. A single line that is too long
    is cut at its front.
    """
    lines = tail.removesuffix(b"\n").split(b"\n") if tail else []
    if not is_whole and len(lines) > 1:
        lines = lines[1:]
    kept: list[str] = []
    left_bytes = MOST_LAST_BYTES
    for line in reversed(lines[-MOST_LAST_LINES:]):
        text = readable(line)
        num_bytes = len(text.encode()) + 1
        if num_bytes > left_bytes:
            if not kept:
                kept.append(_end_of(text))
            break
        left_bytes -= num_bytes
        kept.append(text)
    return kept[::-1]


def _end_of(text: str) -> str:
    end = text.encode()[-(MOST_LAST_BYTES - len(_CUT) - 1) :]
    return _CUT + end.decode("utf-8", "ignore")


class LineSplitter:
    """Puts lines together from pieces of output, in the order in which they were written."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that this piece ends, without their line ends."""
        *lines, begun = (self._begun + piece).split(b"\n")
        redrawn = begun.rfind(b"\r", 0, -1)
        if redrawn >= 0:
            # A progress bar ends its line only when it is done: what it has shown is shown.
            shown, begun = begun[:redrawn], begun[redrawn + 1 :]
            lines += [shown] if shown.strip() else []
        if len(begun) > _MOST_LINE_BYTES:
            lines.append(begun)
            begun = b""
        self._begun = begun
        return lines

    def rest(self) -> list[bytes]:
        """The line that was begun and not ended, if there is one."""
        begun, self._begun = self._begun, b""
        return [begun] if begun else []
