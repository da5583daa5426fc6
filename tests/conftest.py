"""What every test shares: its directory is its price and its marker, and cheap tests run first."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch or starts a process: several ranks share few cores here, and
# a thread pool per rank makes every collective wait for a descheduled peer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# Who starts the tests in the background of a script has them ignore it, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# From the last test to the end too: pytest leaves it as it finds it.
faulthandler.enable()

# A busy machine stands still for longer than the 200 ms that an example may take by default; what
# hangs is found by the limit of each test.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

PRICES = ("pure", "dist", "cluster", "browser", "gpu")
TESTS = Path(__file__).resolve().parent


_sessions: list[pytest.Session] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    _sessions.append(session)


@atexit.register  # before any other, and so it is called after all of them
def _end_with_the_verdict() -> None:
    """Ends the process once Python's own exit functions are done, without those of C++.

    These take away what Ray's threads still use. Each `ray.init` but the first leaves one in its
    process, also after `ray.shutdown`: it reports metrics every ten seconds, and says so in Ray's
    log when it cannot, as its cluster is gone. Where the log has just been taken away, that is a
    segmentation fault. A process that trains calls `ray.init` once; this one does it often.
    """
    if _sessions and not hasattr(sys, "last_value"):  # pytest itself may have broken since
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(_sessions[-1].exitstatus))


def price_of(path: Path) -> str:
    """The directory under tests/ that a test file lies in.

    Raises: pytest.UsageError when it lies in none of them, for such a test would have no marker
    and no place in the order.
    """
    room = path.resolve().relative_to(TESTS).parts[0]
    if room not in PRICES:
        expected = ", ".join(f"tests/{price}" for price in PRICES)
        raise pytest.UsageError(f"{path}: expected it below one of {expected}; move it there")
    return room


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run the tests marked `thorough` too, and repeat what is random as often as was asked",
    )


@pytest.fixture(scope="session")
def is_thorough(pytestconfig: pytest.Config) -> bool:
    """Whether time is no matter: see README, "Development"."""
    return bool(pytestconfig.getoption("thorough"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("thorough") and not item.config.getoption("thorough"):
        pytest.skip("needs --thorough")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(price_of(item.path))
    items.sort(key=lambda item: PRICES.index(price_of(item.path)))
    gpu_items = [item for item in items if price_of(item.path) == "gpu"]
    if gpu_items and not cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def cuda_is_available() -> bool:
    import torch  # only where gpu tests were collected: pure runs stay free of torch

    return torch.cuda.is_available()
