"""Which versions of Ray and torch this program supports, and the refusal of any other.

It uses private names of both, so that another version could fail at any moment of a run, or save
what cannot be read again. Asked before either is imported: must import neither ray nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# As pyproject.toml has them. The distribution's own metadata will not do: a job may run from a
# working directory that was never installed.
SUPPORTED = {
    "ray": "ray[default,train]>=2.60,<2.61",
    "torch": "torch>=2.13,<2.14",
}
_RANGE = re.compile(r"[^<>=]+>=([\d.]+),<([\d.]+)")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


class UnsupportedVersion(RuntimeError):
    """A package is installed in a version that this program was not made for."""

    def __init__(self, package: str, found: str) -> None:
        super().__init__(package, found)
        self.package = package
        self.found = found

    def __str__(self) -> str:
        lowest, above = _ends(self.package)
        return (
            f"{self.package} {self.found} is installed, this version of elastic supports "
            f"{self.package} >={lowest},<{above}: install it with "
            f"pip install '{SUPPORTED[self.package]}', or use a version of elastic that is made "
            f"for {self.package} {self.found}"
        )


def check(*packages: str, version: Callable[[str], str] | None = None) -> None:
    """Nothing, if the installed version of each package is a supported one.

    A local part such as `+cu130` does not matter, and a release candidate counts as its release.
    A package without metadata is passed by: if it is missing, importing it says so. `version` gives
    the installed one, from the packages' metadata if not given.

    Raises:
        UnsupportedVersion: names what was found, what is supported, and what to do.
    """
    # Not at the top: `elastic status` starts fast and never asks.
    import importlib.metadata as metadata

    for package in packages:
        try:
            found = (version or metadata.version)(package)
        except metadata.PackageNotFoundError:
            continue
        if not _is_supported(package, found):
            raise UnsupportedVersion(package, found)


def _is_supported(package: str, found: str) -> bool:
    lowest, above = _ends(package)
    release = _RELEASE.match(found)
    return release is not None and _numbers(lowest) <= _numbers(release[0]) < _numbers(above)


def _ends(package: str) -> tuple[str, str]:
    ends = _RANGE.fullmatch(SUPPORTED[package])
    assert ends is not None, SUPPORTED[package]
    return ends[1], ends[2]


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]
