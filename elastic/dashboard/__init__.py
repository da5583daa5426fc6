"""The view of runs: what happened, what it cost, how it stands. Reads storage, changes nothing."""

from __future__ import annotations
