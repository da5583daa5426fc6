"""A node's name for people: which machine a message is about, wherever it is read.

Must import neither ray nor torch.
"""

from __future__ import annotations

import socket


def node_name(peer: str = "") -> str:
    """This machine's host name, and its address on the way to `peer`."""
    name = socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            # Connecting a datagram socket sends nothing; 192.0.2.1 is nobody's.
            route.connect((peer or "192.0.2.1", 9))
            return f"{name} [{route.getsockname()[0]}]"
    except OSError:
        return name
