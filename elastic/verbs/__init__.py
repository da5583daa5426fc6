"""The operator's verbs, a module for each noun; `elastic.cli` gathers them. Neither ray nor torch."""

from __future__ import annotations
