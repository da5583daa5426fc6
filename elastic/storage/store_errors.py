"""Store errors: what an exception of a store means for the next try, whichever client raised it.

Clients have classes of their own, which need not be installed, so that an error is known by its
numbers and codes, and by those of what caused it. Must not import ray or torch.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

__all__ = [
    "StoreFailed",
    "StoreStuck",
    "as_os_error",
    "has_expired",
    "is_full",
    "is_taken",
    "is_transient",
]

_TRANSIENT_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,  # what a soft mount of NFS says after its own time limit
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EREMOTEIO,
}
_TRANSIENT_CODES = {
    *("408", "429", "500", "502", "503", "504"),
    *("InternalError", "OperationAborted", "ConditionalRequestConflict", "RequestTimeout"),
    *("ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"),
    *("RequestLimitExceeded", "BandwidthLimitExceeded", "IncompleteBody", "BadDigest"),
}
_EXPIRED_CODES = {
    *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"),
    *("InvalidToken", "ExpiredTokenError", "401"),
}
_FINAL = (
    *(FileNotFoundError, FileExistsError, PermissionError),
    *(IsADirectoryError, NotADirectoryError),
)
# Of clients' own classes, those that tell of the way to the store and not of what was asked.
_NETWORK_CLASSES = re.compile(
    r"(aiohttp|botocore|aiobotocore|urllib3|requests|google\.auth)\..*"
    r"(Connect|Connection|Timeout|Disconnected|ClientOSError|Payload|IncompleteRead|"
    r"HTTPClientError|Checksum|ResponseParser|ProtocolError|TransportError|ChunkedEncoding|ProxyError)"
)
_CLIENTS = re.compile(r"(aiohttp|botocore|aiobotocore|urllib3|requests|google|gcsfs|s3fs)\.")
_FULL = re.compile(
    r"No space left on device|StorageFull|Disk quota exceeded|QuotaExceeded|File too large|"
    r"EntityTooLarge|XMinioStorageFull|\[Errno (27|28|122)\]"
)


class StoreStuck(TimeoutError):
    """A call has not come back within its time. Whether it takes effect yet is not known."""


class StoreFailed(OSError):
    """A client's own exception, in words: whoever reads or writes files expects an `OSError`."""


def as_os_error(error: BaseException) -> BaseException:
    """The error itself, but a `StoreFailed` for one of a client's own class."""
    if isinstance(error, OSError) or not _CLIENTS.match(_name(error)):
        return error
    return StoreFailed(f"{type(error).__name__}: {error}")


def is_transient(error: BaseException) -> bool:
    """Whether the same may well succeed a little later: a time limit, a 5xx, a lost connection.

    What is missing, is there already or is not allowed stays so, and a full disk is no trouble on
    the way either.
    """
    codes = set(_codes(error))
    if codes & _EXPIRED_CODES or (isinstance(error, _FINAL) and not codes & _TRANSIENT_CODES):
        return False
    if isinstance(error, TimeoutError | ConnectionError) or codes & _TRANSIENT_CODES:
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    return any(_NETWORK_CLASSES.match(_name(each)) for each in _with_causes(error))


def has_expired(error: BaseException) -> bool:
    """Whether the client's credentials are too old, and a client made anew may have others."""
    if set(_codes(error)) & _EXPIRED_CODES:
        return True
    return isinstance(error, OSError) and "expired" in str(error).lower()


def is_taken(error: BaseException) -> bool:
    """Whether a write on condition was refused since there is such an object."""
    codes = {"PreconditionFailed", "412"}
    return isinstance(error, FileExistsError) or bool(set(_codes(error)) & codes)


def is_full(words: str) -> bool:
    """Whether these words of an error say that the store has no room left."""
    return _FULL.search(words) is not None


def _codes(error: BaseException) -> Iterator[str]:
    """Codes and statuses that the error and its causes carry, as text."""
    for each in _with_causes(error):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):  # of botocore
            yield str(answer.get("Error", {}).get("Code", ""))
            yield str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        for name in ("code", "status"):  # of gcsfs and aiohttp
            found = getattr(each, name, None)
            if isinstance(found, int | str):
                yield str(found)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(8):
        if each is None:
            return
        yield each
        each = each.__cause__


def _name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"
