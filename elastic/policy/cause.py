"""The cause of a failure: what each report tells, and which of several explains the others.

When one rank dies or raises, its peers fail too, in a collective, and often report first. What
they say ("connection closed by peer") is true and of no use. Pure text and data, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic.policy.causes import (
    DEATH_SIGNS,
    ERROR_SIGNS,
    EXIT_SIGNS,
    LINE_SIGNS,
    MEMORY_SIGNS,
    STORAGE_SIGNS,
    Cause,
    Sign,
)
from elastic.policy.events import RankError, WorkerDied

_EVIDENCE_CHARS = 240


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one text tells: the class, the line that decided, and whether it is a victim's."""

    cause: Cause
    evidence: str = ""
    is_victim: bool = False
    """It says that a peer is gone or did not come: where another rank has words, those count."""


# Ray's list of what may have killed a process names the kernel's memory killer each time.
_GUESSES = re.compile(
    r"There are some potential root causes.*|Some common causes include.*", re.DOTALL
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Raised by user code on its own account: never by a library that lost a peer or a device.
_OWN_TYPES = _names(
    """
    ValueError TypeError KeyError IndexError LookupError AttributeError NameError
    AssertionError ZeroDivisionError ArithmeticError FloatingPointError OverflowError
    ImportError SyntaxError ModuleNotFoundError NotImplementedError StopIteration
    RecursionError UnicodeDecodeError UnicodeEncodeError UnboundLocalError FileNotFoundError
    LossNotFinite
    FileExistsError PermissionError IsADirectoryError NotADirectoryError
    """
)
# Raised by torch, by the system and by what wraps them: their texts tell.
_TEXT_TYPES = _names(
    """
    RuntimeError AcceleratorError DistError DistBackendError DistNetworkError DistStoreError
    OutOfMemoryError SystemError OSError IOError ConnectionError CheckpointException SaveFailed
    RaySystemError RpcError Error
    """
)
_STORAGE_TYPES = _names(
    """
    ClientError EndpointConnectionError ConnectTimeoutError ReadTimeoutError HTTPClientError
    ConnectionClosedError NoCredentialsError ResponseStreamingError IncompleteReadError
    FSTimeoutError S3Error HttpError HttpResponseError ServiceRequestError ServiceResponseError
    ClientConnectorError ServerDisconnectedError ServerTimeoutError SSLError
    ProxyConnectionError CheckpointNotVisible StorageNotShared CheckpointGone CheckpointCorrupt
    LoadFailed WriteFailed NotComplete SaveIncomplete Unreadable NoSoundCheckpoint
    NothingToResume SafetensorError CheckpointException SaveFailed StorageFull
    CheckpointSuspect LocalUnusable
    """
)
_DIST_TYPES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_DRIVER_TYPES = frozenset({"RpcError", "RaySystemError"})

_LOADER = re.compile(r"Caught \w+ in (DataLoader worker|pin memory thread)[^\n]*")
_LOADER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (\w+)[^\n]*")
_LOADER_ENDED = re.compile(
    r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly|DataLoader timed out after[^\n]*"
)
_KILLS = frozenset({"Killed", "Terminated"})
_LAST_FRAME = re.compile(r'File "([^"]+)", line \d+, in [^\n]*\n\s*([^\n]*)')
_CHAIN = ("direct cause of the following exception", "another exception occurred")
_LIBRARIES = ("site-packages", "dist-packages", "/elastic/", "/lib/python3")
_DATA_FILES = ("/torch/utils/data/", "/elastic/training/data.py", "/torchdata/")


def of_error(type_name: str, message: str, traceback: str = "") -> Told:
    """What an exception tells. `type_name` is its bare class name.

    An exception of a class that user code raises on its own account is the user's, whatever it
    says, or the data's where it came out of a data loader. So is one that says what victims say and
    was raised by a `raise` in user code.
    """
    if told := _of_loader(message, traceback):
        return told
    if type_name in _OWN_TYPES:
        return _of_type(type_name, message, traceback)
    if type_name == "MemoryError":
        return Told(cause=Cause.HOST_MEMORY, evidence=_line(f"{type_name}: {message}"))
    told = _found(ERROR_SIGNS, [message]) if type_name in _TEXT_TYPES else None
    if told and not (told.is_victim and _is_raised_by_user(type_name, traceback)):
        return told
    return _of_type(type_name, message, traceback)


def _of_type(type_name: str, message: str, traceback: str) -> Told:
    evidence = _line(f"{type_name}: {message}")
    if type_name in _DIST_TYPES:
        return Told(cause=Cause.COMMUNICATION, evidence=evidence, is_victim=True)
    if type_name == "OutOfMemoryError":
        return Told(cause=Cause.CUDA_MEMORY, evidence=evidence)
    if type_name == "LoadFailed":  # another rank's trouble, which that one tells itself
        return Told(cause=Cause.STORAGE, evidence=evidence, is_victim=True)
    if type_name in _STORAGE_TYPES:
        return Told(cause=Cause.STORAGE, evidence=evidence)
    if type_name in _DRIVER_TYPES:
        return Told(cause=Cause.DRIVER, evidence=evidence)
    cause = Cause.DATA if _is_of_data(traceback) else Cause.USER_EXCEPTION
    return Told(cause=cause, evidence=evidence)


def of_death(text: str, last_lines: Sequence[str] = (), *, node_lost: bool = False) -> Told:
    """What the death of a worker's process tells.

    `text` is Ray's, `last_lines` are what the rank wrote last. Without words of either the process
    was killed, or its node was lost: then the evidence is empty.
    """
    said = _GUESSES.sub("", text)
    told = _found(DEATH_SIGNS, [said])
    if node_lost:
        is_notice = told is not None and told.cause is Cause.PREEMPTION
        return told if told and is_notice else Told(cause=Cause.NODE_LOST, evidence=_line(said))
    if told:
        return told
    wordless = Told(cause=Cause.WORKER_KILLED)
    return _found(LINE_SIGNS, last_lines) or _found(EXIT_SIGNS, [said]) or wordless


def of_start(reason: str) -> Told:
    """What a group that could not be started tells: a lost node, or a start that went wrong."""
    told = _found(DEATH_SIGNS, [_GUESSES.sub("", reason)])
    if told and told.cause is not Cause.USER_EXCEPTION:
        return told
    if storage := _found(STORAGE_SIGNS, [reason]):
        return storage
    return Told(cause=Cause.START_UP, evidence=_line(reason))


def _of_loader(message: str, traceback: str) -> Told | None:
    """What befell a data loader's process. What kills it from outside is no fault of the data."""
    if memory := _found(MEMORY_SIGNS, [message]):
        return memory if "DataLoader" in message else None
    killed = _LOADER_KILLED.search(message) or _LOADER_KILLED.search(traceback)
    if killed and killed[1] in _KILLS:
        return Told(cause=Cause.WORKER_KILLED, evidence=_line(killed[0]))
    found = killed or _LOADER.search(message) or _LOADER_ENDED.search(message)
    return Told(cause=Cause.DATA, evidence=_line(found[0])) if found else None


def _is_raised_by_user(type_name: str, traceback: str) -> bool:
    frames = _LAST_FRAME.findall(traceback)
    if type_name in _DIST_TYPES or not frames or any(words in traceback for words in _CHAIN):
        return False
    path, code = frames[-1]
    return code.startswith("raise ") and not any(part in path for part in _LIBRARIES)


def _is_of_data(traceback: str) -> bool:
    return any(part in path for path, _ in _LAST_FRAME.findall(traceback) for part in _DATA_FILES)


def _found(signs: Iterable[Sign], texts: Sequence[str]) -> Told | None:
    for sign in signs:
        for text in texts:
            if found := sign.pattern.search(text):
                begin = text.rfind("\n", 0, found.start()) + 1
                evidence = _line(text[begin:], at=found.start() - begin)
                return Told(cause=sign.cause, evidence=evidence, is_victim=sign.is_victim)
    return None


def _line(text: str, at: int = 0) -> str:
    """The line of the text that holds the place, cut around it if it is long."""
    line = text.strip().split("\n", 1)[0]
    if len(line) <= _EVIDENCE_CHARS:
        return line
    begin = max(0, min(at - _EVIDENCE_CHARS // 3, len(line) - _EVIDENCE_CHARS))
    return line[begin : begin + _EVIDENCE_CHARS]


def is_victim(type_name: str, message: str, traceback: str = "") -> bool:
    """Whether an error only says that a peer went away, or did not come.

    `type_name` is the bare class name. An error of a class that user code raises on its own
    account is never taken for a victim's, whatever it says.
    """
    return of_error(type_name, message, traceback).is_victim


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The class of a failure, what it is told by, and the report that explains the others."""

    cause: Cause
    evidence: str = ""
    """The line that decided; empty where a process is gone and nobody said why."""
    source: RankError | WorkerDied | None = None

    @property
    def world_rank(self) -> int:
        """Of the rank at fault; -1 where there is none."""
        return -1 if self.source is None else self.source.world_rank


def find(
    errors: Sequence[RankError],
    deaths: Sequence[WorkerDied],
    draining: Collection[int] = (),
) -> Finding:
    """The class of a failure with its evidence, from all that was reported.

    A death on a node that drains is a preemption. An exception of a rank's own stays what it is,
    also there: it would have come on any node.
    """
    source = first_cause(errors, deaths)
    if isinstance(source, RankError):
        told = of_error(source.type_name, source.message, source.traceback)
        return Finding(cause=told.cause, evidence=told.evidence, source=source)
    if isinstance(source, WorkerDied):
        if source.hang:
            return Finding(cause=Cause.HANG, evidence=source.hang, source=source)
        told = _of(source)
        cause = Cause.PREEMPTION if source.world_rank in draining else told.cause
        return Finding(cause=cause, evidence=told.evidence, source=source)
    victims = [of_error(one.type_name, one.message, one.traceback) for one in errors]
    for cause in (Cause.STORAGE, Cause.NCCL_ERROR, Cause.HANG, Cause.COMMUNICATION):
        if told_by := next((told for told in victims if told.cause is cause), None):
            return Finding(cause=cause, evidence=told_by.evidence)
    return Finding(cause=Cause.COMMUNICATION)


def _of(death: WorkerDied) -> Told:
    return of_death(death.told or death.detail, death.last_lines, node_lost=death.node_lost)


def first_cause(
    errors: Sequence[RankError], deaths: Sequence[WorkerDied]
) -> RankError | WorkerDied | None:
    """The report that explains the others: an exception of a rank's own, else a death, else None.

    An exception outranks a death, since a rank that raised may well take its process with it.
    Of deaths, a lost node comes first, then one that was told why, and last who died of what a
    peer had done to it; among equals the first to arrive wins. Victims alone explain nothing, so
    they give None.
    """
    own = [error for error in errors if not error.is_victim]
    return own[0] if own else min(deaths, key=_order, default=None)


def _order(death: WorkerDied) -> int:
    told = _of(death)
    if death.node_lost or told.cause is Cause.PREEMPTION:
        return 0
    if told.is_victim:
        return 3
    return 1 if told.evidence or death.hang else 2


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
