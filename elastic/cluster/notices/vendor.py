"""Whose machine this is, as its firmware says. Asks no network."""

from __future__ import annotations

from pathlib import Path

DMI = Path("/sys/class/dmi/id")
_FIELDS = ("sys_vendor", "product_name", "board_vendor", "bios_vendor", "bios_version")
# In any of the fields above, in small letters. Older types of AWS say it in `bios_version` alone.
_MARKS = {"amazon ec2": "aws", ".amazon": "aws", "google compute engine": "gcp"}


def detect(dmi: Path = DMI) -> str | None:
    """`aws`, `gcp`, or None where the firmware names neither."""
    for field in _FIELDS:
        try:
            said = (dmi / field).read_text(encoding="utf-8", errors="replace").lower()
        except OSError:
            continue
        for mark, vendor in _MARKS.items():
            if mark in said:
                return vendor
    return None
