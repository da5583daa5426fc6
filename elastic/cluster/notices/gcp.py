"""GCP's notices to a machine, read from its metadata server: preemption and host maintenance.

The server holds a question back until the value changes, so that a notice is heard at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlencode

from elastic.cluster.notices import metadata
from elastic.cluster.notices.metadata import UnexpectedAnswer
from elastic.cluster.notices.notice import Notice

PREEMPTED_S = 30.0
"""What Compute Engine leaves a machine that it preempts, at most."""
_FLAVOR = "Metadata-Flavor"
_HELD_S = 20
# Between two questions; also where a server does not hold them back.
_PAUSE_S = 1.0


class _Value:
    """One value of the metadata server, and how it is waited for."""

    def __init__(self, base_url: str, key: str) -> None:
        self._url = f"{base_url}/computeMetadata/v1/instance/{key}"
        self._etag = ""

    def wait(self) -> str:
        """The value: now when it is asked for the first time, else when it changes or a while is
        over."""
        url, timeout_s = self._url, metadata.SHORT_S
        if self._etag:
            asked = {"wait_for_change": "true", "timeout_sec": _HELD_S, "last_etag": self._etag}
            url, timeout_s = f"{url}?{urlencode(asked)}", _HELD_S + metadata.SHORT_S
        etag, self._etag = self._etag, ""  # after any failure the value is asked for at once
        answer = metadata.ask(url, {_FLAVOR: "Google"}, timeout_s=timeout_s)
        if answer.status != 200:
            raise UnexpectedAnswer(f"HTTP {answer.status} for {self._url}; expected 200")
        if answer.headers.get(_FLAVOR) != "Google":
            raise UnexpectedAnswer(
                f"an answer for {self._url} without the header {_FLAVOR}: Google; it is not from "
                "the metadata server"
            )
        self._etag = answer.headers.get("ETag", etag)
        return answer.text.strip()


class GcpPreempted:
    """The preemption of this spot or preemptible machine."""

    name = "gcp"
    interval_s = _PAUSE_S

    def __init__(
        self, base_url: str = metadata.ADDRESS, now_s: Callable[[], float] = time.time
    ) -> None:
        self._value = _Value(base_url, "preempted")
        self._now_s = now_s
        self._notice: Notice | None = None

    def poll(self) -> Notice | None:
        """See `Source.poll`. Its deadline counts from when it was first heard."""
        value = self._value.wait()
        if value not in ("TRUE", "FALSE"):
            raise UnexpectedAnswer(f"preempted is {value!r}; expected TRUE or FALSE")
        if value == "FALSE":
            self._notice = None
        elif self._notice is None:
            deadline_s = self._now_s() + PREEMPTED_S
            told = "GCP preempts this machine"
            self._notice = Notice(kind="gcp-preempted", deadline_s=deadline_s, text=told)
        return self._notice


class GcpMaintenance:
    """Maintenance of the host that stops this machine. One that moves it alive is no notice.

    The machine goes in a minute, or in an hour when it has GPUs; which of them is not told.
    """

    name = "gcp"
    interval_s = _PAUSE_S

    def __init__(self, base_url: str = metadata.ADDRESS) -> None:
        self._value = _Value(base_url, "maintenance-event")

    def poll(self) -> Notice | None:
        """See `Source.poll`."""
        value = self._value.wait()
        if value in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
            return None
        if value != "TERMINATE_ON_HOST_MAINTENANCE":
            raise UnexpectedAnswer(f"maintenance-event is {value!r}")
        told = "GCP stops this machine for maintenance of its host"
        return Notice(kind="gcp-maintenance", deadline_s=None, text=told)
