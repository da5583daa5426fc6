"""The web page of runs: what it shows, who may look, and the server. Reads storage only."""

from __future__ import annotations
