"""The operator's verbs, a module for each noun; `elastic.cli` gathers them. No ray, no torch."""

from __future__ import annotations
