"""What is on disk: run file, ledger, metrics, checkpoints and retention. Neither ray nor torch."""

from __future__ import annotations
