"""The Ray cluster that a job runs on: the one it was submitted to, or one of its own."""

from __future__ import annotations

import os


def connect(num_workers: int) -> None:
    """Join the cluster this runs in, or start one on this machine with room for the workers."""
    import ray

    if os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"):
        ray.init(address="auto", log_to_driver=False)
        return
    cores = os.cpu_count() or 1
    ray.init(
        address="local",
        num_cpus=max(cores, num_workers),
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
    )
    url = ray._private.worker.get_dashboard_url()
    print(f"started a local Ray; Ray's own dashboard is at http://{url}")


def has_gpus() -> bool:
    """Whether any node of the cluster has one."""
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))
