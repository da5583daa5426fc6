"""Sizes as `python -m jobs.bench` reads them."""

from __future__ import annotations

import argparse

import pytest

from jobs.bench.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("1GB", 10**9),
        ("1g", 10**9),
        ("1.5 MB", 1_500_000),
        ("512MiB", 512 * 2**20),
        ("2Ki", 2048),
        ("3b", 3),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "0", "-1", "1.5", "1e9", "1PB", "1i", "1 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number of bytes"):
        parse_bytes(text)
