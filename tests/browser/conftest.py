"""One headless Chromium for all tests of the page; skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from elastic.dashboard.page.server import PageServer
from elastic.storage.filesystem import Filesystem

_ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium on this machine, and CI is set: apt-get install chromium")
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[PageServer]:
    """The runs below `tmp_path`."""
    with PageServer(Filesystem.at(str(tmp_path))) as server:
        yield server


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page that has met no error in its script and broken no rule of its policy."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    yield page
    page.close()
    assert problems == []
