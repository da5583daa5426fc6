"""Thought: what should happen, as pure functions of events and facts. No effect of any kind."""

from __future__ import annotations
