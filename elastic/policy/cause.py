"""Which of several reports is the cause of a failure, and which are only its victims.

When one rank dies or raises, its peers fail too, in a collective, and often report first. What
they say ("connection closed by peer") is true and of no use. Pure text and data, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.policy.events import RankError, WorkerDied

# What the transports say when a peer is gone: gloo, NCCL, the TCP store, DCP's wrapped form.
_VICTIM_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connect timeout",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "read error",
    "application timeout caused pair closure",
    "timed out waiting",
    "gloo",
    "recvvalue failed",
    "sendbytes failed",
    "nccl communicator was aborted",
    "nccl error",
    "ncclremoteerror",
    "remote process exited",
    "unhandled system error",
    "watchdog caught collective operation timeout",
    "the remote end closed",
)
_VICTIM_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_NEVER_VICTIM_TYPES = ("ValueError", "TypeError", "KeyError", "AssertionError", "OutOfMemoryError")


def is_victim(type_name: str, message: str) -> bool:
    """Whether an error only says that a peer went away.

    `type_name` is the bare class name. An error of a class that user code raises on its own
    account is never taken for a victim's, whatever it says.
    """
    if type_name in _NEVER_VICTIM_TYPES:
        return False
    if type_name in _VICTIM_TYPES:
        return True
    if type_name not in ("RuntimeError", "CheckpointException", "SaveFailed", "ConnectionError"):
        return False
    text = message.lower()
    return any(phrase in text for phrase in _VICTIM_PHRASES)


def first_cause(
    errors: Sequence[RankError], deaths: Sequence[WorkerDied]
) -> RankError | WorkerDied | None:
    """The report that explains the others: an exception of a rank's own, else a death, else None.

    An exception outranks a death, since a rank that raised may well take its process with it;
    among equals the first to arrive wins. Victims alone explain nothing, so they give None.
    """
    own = [error for error in errors if not error.is_victim]
    if own:
        return own[0]
    lost = [death for death in deaths if death.node_lost]
    if lost:
        return lost[0]
    return deaths[0] if deaths else None


def headline(cause: RankError | WorkerDied | None, errors: Sequence[RankError]) -> str:
    """One line that tells a person what happened first, and where."""
    if isinstance(cause, RankError):
        text = cause.message.strip().splitlines()
        return f"rank {cause.world_rank} raised {cause.type_name}: {text[0] if text else ''}"
    if isinstance(cause, WorkerDied) and cause.hang:
        return f"rank {cause.world_rank} hung: {cause.hang}"
    if isinstance(cause, WorkerDied):
        what = "was lost with its node" if cause.node_lost else "died"
        return f"rank {cause.world_rank} {what}: {cause.detail}"
    ranks = ", ".join(str(error.world_rank) for error in errors)
    said = errors[0].message.strip().splitlines()[0] if errors else "nothing"
    return f"ranks {ranks} lost a peer, and no rank was found at fault; the first said: {said}"
