"""Whereabouts: the process, job and cluster that the driver lives in, for lease and ledger."""

from __future__ import annotations

import os
import socket

import ray


def in_words() -> str:
    """This driver, for whoever finds the run held by it."""
    context = ray.get_runtime_context()
    return f"job {context.get_job_id()} on the Ray cluster at {context.gcs_address}"


def in_fields() -> dict[str, object]:
    """The same for programs: pid, host, job_id, node_id, and dashboard_url, "" without one."""
    context = ray.get_runtime_context()
    url = ray._private.worker.get_dashboard_url() or ""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "job_id": context.get_job_id(),
        "node_id": context.get_node_id(),
        "dashboard_url": f"http://{url}" if url else "",
    }
