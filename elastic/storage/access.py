"""Access: whether a process may write where its run is to be, told before anything is begun.

Knows which variables lead the clients of object stores to a bucket, and tells of those that hold a
secret only whether they are set. Must not import ray or torch.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

from elastic.storage.filesystem import Filesystem
from elastic.storage.redaction import redacted_text
from elastic.storage.store_errors import is_full

__all__ = ["BUCKET_ADVICE", "StorageRefused", "check_access", "surroundings"]

BUCKET_ADVICE = (
    "where a bucket is and who asks are told by variables of each process: set them on every node "
    "before `ray start`, or give them to the whole job (`ray job submit --runtime-env-json`)"
)
_START_BYTES = 1 << 16
_LOCAL_ADVICE = "choose a storage path that this machine and all nodes can write"
_S3 = {"AWS_ENDPOINT_URL": "AWS, or a profile", "AWS_ACCESS_KEY_ID": "a profile, or a role"}
_GCS = {
    "STORAGE_EMULATOR_HOST": "Google",
    "GOOGLE_APPLICATION_CREDENTIALS": "gcloud, or a role",
}
_VARIABLES: dict[str, dict[str, str]] = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}
"""By scheme, and who tells it in the place of each."""
_PLACES = ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST")
"""Those whose value says where, and not who."""


class StorageRefused(ValueError):
    """The run's storage cannot be written to: from where, why, and what to do."""


def check_access(fs: Filesystem, who: str) -> None:
    """Fail now, not at the first save. `who` names the process that asks.

    The root of `fs` is made, and takes a little more than a run begins with; nothing else is left.

    Raises:
        StorageRefused: nothing can be written at `fs` from here, or there is no room.
    """
    path = f".probe-{uuid.uuid4().hex}"
    try:
        fs.make_dirs()
        fs.write_bytes(path, os.urandom(_START_BYTES))
        fs.remove_tree(path)
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {redacted_text(str(error))}"
        raise StorageRefused(
            f"cannot write to the run directory {fs.url} from {who} on {socket.gethostname()}: "
            f"{found}; {_advice(fs, error)}"
        ) from None  # an object store's own traceback has a hundred lines


def surroundings(fs: Filesystem, environment: Mapping[str, str] = os.environ) -> str:
    """What this environment tells the client of the store, in words; "" where it tells nothing."""
    names = _VARIABLES.get(fs.store.scheme, {})
    return ", ".join(_told(name, without, environment) for name, without in names.items())


def _told(name: str, without: str, environment: Mapping[str, str]) -> str:
    if not environment.get(name):
        return f"{name} is not set ({without})"
    return f"{name} is {redacted_text(environment[name]) if name in _PLACES else 'set'}"


def _advice(fs: Filesystem, error: Exception) -> str:
    if is_full(str(error)):
        return f"storage is full{_free(fs)}: free room there, or choose another storage"
    if fs.is_local:
        return _LOCAL_ADVICE
    found = surroundings(fs)
    here = f"here {found}; " if found else ""
    if isinstance(error, FileNotFoundError):
        return f"{here}make the bucket, or correct its name: a run makes none"
    return f"{here}{BUCKET_ADVICE}"


def _free(fs: Filesystem) -> str:
    try:
        free_bytes = fs.free_bytes()
    except OSError:
        return ""
    return "" if free_bytes is None else f", {free_bytes} bytes are free for this user"
