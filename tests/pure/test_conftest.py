"""How the process of the tests ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A function that C calls at exit, and that is not there.
BREAK = (
    "import ctypes, resource, types, tests.conftest as c;"
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
    "ctypes.CDLL(None).on_exit(ctypes.c_void_p(8), 0);"
)
FINISH = "c.pytest_sessionfinish(types.SimpleNamespace(exitstatus={}))"


def ends(*statements: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BREAK + ";".join(statements)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("verdict", [0, 1, 5])
def test_the_exit_code_is_the_verdict_whatever_breaks_after_it(verdict: int) -> None:
    done = ends(
        "import atexit; atexit.register(print, 'other exit functions')",
        FINISH.format(verdict),
    )
    assert done.returncode == verdict, done.stderr
    assert done.stdout == "other exit functions\n", "they are called, and nothing is held back"


def test_what_breaks_pytest_after_the_verdict_is_not_hidden() -> None:
    done = ends(FINISH.format(0), "raise RuntimeError('in the clean-up')")
    assert done.returncode != 0 and "in the clean-up" in done.stderr


def test_without_a_verdict_it_ends_as_any_process_does() -> None:
    assert ends("pass").returncode == -signal.SIGSEGV
