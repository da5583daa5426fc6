"""The format version that every file of ours carries, and the refusal of a newer one.

Must not import ray or torch.
"""

from __future__ import annotations


class UnsupportedFormat(Exception):
    """A file was written by a newer program than this one; its content was not interpreted."""

    def __init__(self, what: str, found: int, supported: int) -> None:
        super().__init__(what, found, supported)
        self.what = what
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.what} has format version {self.found}, this program reads up to "
            f"{self.supported}: use the program that wrote it, or a newer one"
        )


def check_format(what: str, found: object, supported: int) -> int:
    """The format version `found`, known to be readable.

    Raises `UnsupportedFormat` if it is newer than `supported`, `ValueError` if it is no version.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(
            f"{what} has no format version: expected a whole number from 1, found {found!r}"
        )
    if found > supported:
        raise UnsupportedFormat(what, found, supported)
    return found
