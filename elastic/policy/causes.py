"""Causes: the classes of failure, and the signs by which each is told from a text.

The order of a table is the order of asking: hardware comes before memory, memory before the errors
of CUDA and NCCL in which it may be wrapped, and what a peer has done comes late. Plain data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """The class of a failure."""

    PREEMPTION = "preemption"
    NODE_LOST = "node_lost"
    WORKER_KILLED = "worker_killed"
    HOST_MEMORY = "host_memory"
    CUDA_MEMORY = "cuda_memory"
    CUDA_ERROR = "cuda_error"
    ECC_ERROR = "ecc_error"
    NCCL_ERROR = "nccl_error"
    HANG = "hang"
    COMMUNICATION = "communication"
    """Only victims have spoken: somebody lost a peer, and nobody was found at fault."""
    DATA = "data"
    STORAGE = "storage"
    USER_EXCEPTION = "user_exception"
    START_UP = "start_up"
    DRIVER = "driver"


TOLD_BY = {
    Cause.PREEMPTION: "Ray's word that the node was preempted, or a death on a node that drains",
    Cause.NODE_LOST: "a node whose raylet takes no connection, or Ray's word that it has died",
    Cause.WORKER_KILLED: "a process that is gone; a crash that the rank wrote of last",
    Cause.HOST_MEMORY: "Ray's memory monitor, the kernel's killer, an allocation that was refused",
    Cause.CUDA_MEMORY: "`CUDA out of memory`, also inside an error of NCCL or cuBLAS",
    Cause.CUDA_ERROR: "an error of CUDA, cuBLAS or cuDNN; an Xid line that is not of ECC",
    Cause.ECC_ERROR: "`uncorrectable ECC error`; Xid 48, 63, 64, 92, 94, 95, 140",
    Cause.NCCL_ERROR: "NCCL's own error, that of its network, or a wrong use of it",
    Cause.HANG: "a rank that held up the group, or a collective that ran into its time limit",
    Cause.COMMUNICATION: "victims alone: a peer was lost, and no rank was found at fault",
    Cause.DATA: "an exception out of a data loader, or its process that crashed",
    Cause.STORAGE: "no space, a stale handle, a store that refuses, a failed save or a suspect one",
    Cause.USER_EXCEPTION: "any other exception of the training function",
    Cause.START_UP: "a group that could not be started, but for want of room",
    Cause.DRIVER: "Ray's control plane, or the death of a worker's owner",
}
"""What each is told by, in short."""


@dataclass(frozen=True)
class Sign:
    """A pattern of one class. Victims' signs say what a peer did to them."""

    cause: Cause
    pattern: re.Pattern[str]
    is_victim: bool = False


def _sign(cause: Cause, *phrases: str, is_victim: bool = False) -> Sign:
    return Sign(cause, re.compile("|".join(phrases), re.IGNORECASE), is_victim)


_GPU_SIGNS = (
    _sign(
        Cause.ECC_ERROR,
        r"uncorrectable ECC error",
        r"ECC_?Uncorrectable",
        r"\bXid\b.*: (48|63|64|92|94|95|140|171|172)\b",
        r"double[- ]bit ECC error",
        r"row[- ]remap\w* (failure|pending)",
    ),
    _sign(
        Cause.CUDA_MEMORY,
        r"(CUDA|HIP) out of memory",
        r"CUDA (driver |runtime )?error: out of memory",
        r"cuda runtime error \(2\)",
        r"Cuda failure (2 )?'out of memory'",
        r"CUDA_ERROR_OUT_OF_MEMORY",
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
    ),
    _sign(
        Cause.CUDA_ERROR,
        r"\bXid\b.*: \d+",
        r"(CUDA|HIP) (driver |runtime |kernel )?error\b",
        r"\bCuda failure\b",
        r"device-side assert",
        r"(CUDA|HIP)_ERROR_\w+",
        r"cudaError\w+",
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_\w+",
        r"unhandled cuda error",
        r"GPU has fallen off the bus",
        r"GPU is lost",
        r"Unable to determine the device handle for gpu",
        r"no CUDA-capable device",
        r"No CUDA GPUs are available",
        r"Can't initialize NVML",
        r"nvmlInit\w* failed",
    ),
)
MEMORY_SIGNS = (
    _sign(
        Cause.HOST_MEMORY,
        r"DefaultCPUAllocator: (can't allocate|not enough) memory",
        r"Cannot allocate memory",
        r"std::bad_alloc",
        r"MemoryError",
        r"Unable to allocate .* for an array",
        r"running low on memory",
        r"due to memory pressure",
        r"memory usage threshold",
        r"\bNODE_OUT_OF_MEMORY\b",
        r"out of shared memory",
        r"insufficient shared memory",
        r"unable to (write to|mmap|open|allocate|resize) .*(/dev/shm|/torch_\d|shared memory)",
        r"shared memory segment",
        r"\boom[-_ ]kill(ed|er)?\b",
        r"Out of memory: Killed process",
        r"Memory cgroup out of memory",
    ),
)
_PEER_SIGNS = (
    _sign(Cause.START_UP, r"EADDRINUSE", r"address already in use"),
    _sign(
        Cause.HANG,
        r"Watchdog caught collective operation timeout",
        r"ran for \d+ milliseconds before timing out",
        r"Timed out waiting \d+ ?ms for (recv|send|all|operation)",
        r"watchdog got stuck",
        r"failed to pass monitoredBarrier",
        r"monitoredBarrier .*timed out",
        r"collective.{0,60}timed out",
        is_victim=True,
    ),
    _sign(
        Cause.NCCL_ERROR,
        r"NET/\w+\b.*(with|got) (error|status)",
        r"ibv_\w+ failed",
        r"NCCL WARN .*(Mismatch|mismatch|unsupported|could not|invalid)",
        is_victim=True,
    ),
    _sign(
        Cause.NCCL_ERROR,
        r"ncclInvalid(Usage|Argument)",
        r"Duplicate GPU detected",
        r"NCCL (error|version).*invalid (usage|argument)",
    ),
    _sign(
        Cause.COMMUNICATION,
        r"connection (was )?(likely )?closed",
        r"connection reset",
        r"connection refused",
        r"connect(ion)? timed? ?out",
        r"broken pipe",
        r"socket (was )?(closed|timeout|has timed out)",
        r"read error",
        r"application timeout caused pair closure",
        r"timed out waiting",
        r"wait timeout after",
        r"\bgloo\b",
        r"(recvValue|recvBytes|sendBytes|recvVector|sendValue) failed",
        r"Failed to recv, got 0 bytes",
        r"communicator was aborted",
        r"ncclRemoteError",
        r"remote process exited",
        r"remote end closed",
        r"closed by remote peer",
        r"No route to host",
        r"Network is unreachable",
        r"client socket has (failed|timed out)",
        is_victim=True,
    ),
    _sign(
        Cause.NCCL_ERROR,
        r"NCCL error",
        r"nccl(System|Internal|InProgress)Error",
        r"NCCL failure",
        r"NCCL WARN",
        r"ProcessGroupNCCL",
        is_victim=True,
    ),
)
STORAGE_SIGNS = (
    # Before the peers': such an error may well say that a connection was refused.
    _sign(
        Cause.STORAGE,
        r"AWS Error \w+",
        r"An error occurred \(\w+\) when calling the \w+ operation",
        r"Could not connect to the endpoint URL",
        r"HTTPS?ConnectionPool\(",
        r"storage\.googleapis\.com",
        r"blob\.core\.windows\.net",
    ),
    _sign(
        Cause.STORAGE,
        r"No space left on device",
        r"StorageFull",
        r"Disk quota exceeded",
        r"Input/output error",
        r"Stale (NFS )?file handle",
        r"Read-only file system",
        r"Transport endpoint is not connected",
        r"\[Errno (5|14|28|30|107|116|121|122)\]",
        r"\binline_container\b",
        r"PytorchStream(Reader|Writer) failed",
        r"Slow ?Down",
        r"Service ?Unavailable",
        r"\bs3://\S+.*(failed|error|timed out)",
    ),
)
DRIVER_SIGNS = (
    _sign(
        Cause.DRIVER,
        r"Failed to connect to GCS",
        r"GCS (server )?(is|may be|may have been) (dead|killed)",
        r"GCS server is dead",
        r"owner has died",
        r"Owner's (node|worker) has",
        r"all references to the actor were removed",
    ),
)
ERROR_SIGNS = (
    *_GPU_SIGNS,
    *MEMORY_SIGNS,
    *STORAGE_SIGNS[:1],
    *_PEER_SIGNS,
    *STORAGE_SIGNS[1:],
    *DRIVER_SIGNS,
)
"""What exceptions of torch and of the system say."""

LINE_SIGNS = (
    *_GPU_SIGNS,
    *MEMORY_SIGNS,
    _sign(
        Cause.WORKER_KILLED,
        r"Fatal Python error: .*",
        r"Segmentation fault",
        r"Bus error",
        r"\*\*\* SIG\w+ received",
        r"stack smashing detected",
        r"double free or corruption",
    ),
    *_PEER_SIGNS[1:4],
    # "Connection closed" alone is said by many a library in the middle of ordinary work.
    _sign(Cause.COMMUNICATION, r"ncclRemoteError", r"remote process exited", is_victim=True),
    # Warnings of NCCL are no errors.
    _sign(
        Cause.NCCL_ERROR,
        r"NCCL error",
        r"nccl(System|Internal)Error",
        r"\[E\d* .*ProcessGroupNCCL",
        is_victim=True,
    ),
)
"""What a rank may write before it dies without an exception that anybody catches."""

DEATH_SIGNS = (
    _sign(
        Cause.PREEMPTION,
        r"node was preempted",
        r"died by preemption",
        r"forcibly preempted",
        r"DRAIN_PREEMPTED",
        r"node is drained",
    ),
    MEMORY_SIGNS[0],
    _sign(
        Cause.NODE_LOST,
        r"its node has died",
        r"node is dead",
        r"actor's node was terminated",
        r"node it was running on is dead",
        r"local raylet died",
        r"raylet (process )?(has )?(died|crashed|exited)",
    ),
    *DRIVER_SIGNS,
    _sign(Cause.START_UP, r"raised in its creation task", r"runtime[ _]env(ironment)?\b"),
    _sign(Cause.USER_EXCEPTION, r"INTENDED_USER_EXIT", r"exits by an? user request", r"exit_actor"),
)
"""What Ray says of a death."""

EXIT_SIGNS = (
    # Killed from outside says nothing of the process, and so is no sign.
    _sign(Cause.WORKER_KILLED, r"with an exit code [1-9]\d*\.(?! The process receives a SIGTERM)"),
)
"""How a process ended, where it has not said why."""
