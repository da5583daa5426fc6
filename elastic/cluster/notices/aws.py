"""AWS's notices to a spot instance, read from its instance metadata service, version 2.

An interruption comes with its time, usually two minutes ahead; one that hibernates begins at once.
A rebalance recommendation is advice: the instance is at a higher risk, and may live on for days.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from elastic.cluster.notices import metadata
from elastic.cluster.notices.metadata import Answer, UnexpectedAnswer
from elastic.cluster.notices.notice import Notice

# What AWS recommends.
INTERVAL_S = 5.0
_TOKEN_TTL_S = 21600
_ACTIONS = ("terminate", "stop", "hibernate")


class _Metadata:
    """Asks with a token, as version 2 of the service wants it; a new one when it has expired."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._token = ""

    def ask(self, path: str) -> str | None:
        """What is at the path; None where there is nothing, which is how the service says no."""
        answer = self._with_token(path)
        if answer.status == 401:
            self._token = ""
            answer = self._with_token(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise UnexpectedAnswer(f"HTTP {answer.status} for {path}; expected 200 or 404")
        return answer.text

    def _with_token(self, path: str) -> Answer:
        self._token = self._token or self._new_token()
        headers = {"X-aws-ec2-metadata-token": self._token}
        return metadata.ask(f"{self._base_url}/latest/meta-data/{path}", headers)

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = metadata.ask(f"{self._base_url}/latest/api/token", headers, method="PUT")
        if answer.status != 200:
            raise UnexpectedAnswer(f"HTTP {answer.status} for a token; expected 200")
        return answer.text


class AwsSpot:
    """The interruption of this spot instance."""

    name = "aws"
    interval_s = INTERVAL_S

    def __init__(self, base_url: str = metadata.ADDRESS) -> None:
        self._metadata = _Metadata(base_url)

    def poll(self) -> Notice | None:
        """See `Source.poll`."""
        text = self._metadata.ask("spot/instance-action")
        if text is None:
            return None
        found = _read(text)
        action = found.get("action")
        if action not in _ACTIONS:
            raise UnexpectedAnswer(f"no action of {', '.join(_ACTIONS)} in {text!r}")
        time_s = _time_s(found.get("time"))
        when = f" at {found['time']}" if time_s is not None else ""
        told = f"AWS will {action} this spot instance{when}"
        return Notice(kind="aws-spot", deadline_s=time_s, text=told)


class AwsRebalance:
    """The recommendation to leave this spot instance."""

    name = "aws-rebalance"
    interval_s = INTERVAL_S

    def __init__(self, base_url: str = metadata.ADDRESS) -> None:
        self._metadata = _Metadata(base_url)

    def poll(self) -> Notice | None:
        """See `Source.poll`."""
        text = self._metadata.ask("events/recommendations/rebalance")
        if text is None:
            return None
        since = _read(text).get("noticeTime", "a time not told")
        told = f"AWS recommends to leave this spot instance, since {since}"
        return Notice(kind="aws-rebalance", deadline_s=None, text=told)


def _read(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UnexpectedAnswer(f"no JSON: {text!r}") from error
    if not isinstance(found, dict):
        raise UnexpectedAnswer(f"no JSON object: {text!r}")
    return found


def _time_s(text: object) -> float | None:
    """Seconds since 1970; None for what is no time, since the interruption stands all the same."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
