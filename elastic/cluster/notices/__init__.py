"""Interruption notices: what says that this node will be taken, and the loop that asks. No ray."""

from __future__ import annotations
