"""SLURM's variables: the number of the step, its tasks, and an address where these can meet."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Steps from here on are SLURM's own: the batch script, the interactive shell, the extern step.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Below the ports that Linux gives away by itself.
_FIRST_PORT = 20_000
_PORTS = 12_000


def slurm_step(found: Mapping[str, str]) -> int | None:
    """Return the number of the srun step that this process belongs to, if any."""
    text = found.get("SLURM_STEP_ID", found.get("SLURM_STEPID", ""))
    if not text.isdecimal() or int(text) >= _FIRST_SPECIAL_STEP:
        return None
    return int(text)


def slurm_tasks(found: Mapping[str, str]) -> int | None:
    """Return how many tasks the step has; the job may have more."""
    text = found.get("SLURM_STEP_NUM_TASKS", found.get("SLURM_NTASKS", ""))
    return int(text) if text.isdecimal() else None


def slurm_local_size(found: Mapping[str, str], default: int) -> int:
    """Return how many tasks of the step run on this host, from a list such as 4(x2),3."""
    listed = found.get("SLURM_STEP_TASKS_PER_NODE", found.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            return default
        counts.extend([int(match[1])] * int(match[2] or 1))
    node = found.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else default


def slurm_address(found: Mapping[str, str]) -> str | None:
    """Return an address where all tasks of a step can meet. Every task computes the same one.

    Rank 0 runs on the step's first host. The host on which srun was typed is the second choice,
    because it may be a login node on which no task runs.
    """
    hosts = found.get("SLURM_STEP_NODELIST") or found.get("SLURM_NODELIST", "")
    host = first_host(hosts) or found.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        return None
    job = found.get("SLURM_JOB_ID", "0")
    number = int(job) if job.isdecimal() else 0
    return f"{host}:{_FIRST_PORT + (number * 7 + (slurm_step(found) or 0)) % _PORTS}"


def slurm_name(found: Mapping[str, str]) -> str:
    """Return a name of the step, which is the same for all of its tasks."""
    return f"{found.get('SLURM_JOB_ID', '0')}.{slurm_step(found) or 0}"


def first_host(listed: str) -> str | None:
    """Return the first host of a list such as node[003-007,9],gpu1."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", listed.strip())
    if match is None:
        return None
    return match[1] + (match[2] or "") + (match[3] or "")
