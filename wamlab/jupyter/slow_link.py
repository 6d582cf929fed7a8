"""A slow link on purpose: the same training on two made-up hosts, and what brings the wait down.

On one host memory carries the exchange, and on eight GPUs NVLink; both hide the wait. Here two
network namespaces are joined by a link with a token bucket, or two GPUs are told to talk through
the loopback device. Records say so: scope "slow_link".
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wamlab.hosts import Host, linked_hosts
from wamlab.jupyter.launch import Job, launch
from wamlab.measure import Record
from wamlab.train.bench_communication import CommCase, CommPlan

TARGET = "wamlab.train.bench_communication:measure"
THROUGH_LOOPBACK = {  # for NCCL on one host
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
BASELINE = "one all-reduce"
ARMS: dict[str, tuple[Any, ...]] = {
    BASELINE: (),  # after the backward
    "buckets": ({"name": "ddp", "bucket_mb": 1.0},),
    "fp16": ({"name": "ddp", "bucket_mb": 1.0, "wire": "fp16"},),
    "low rank 4": ({"name": "ddp", "bucket_mb": 1.0, "wire": "lowrank", "rank": 4},),
    "low rank 1": ({"name": "ddp", "bucket_mb": 1.0, "wire": "lowrank", "rank": 1},),
}


def cases(names: Sequence[str] = tuple(ARMS), **changes: Any) -> tuple[CommCase, ...]:
    """Return one case an arm, with other fields of CommCase changed alike."""
    return tuple(
        CommCase(name=name, optimizations=ARMS[name], scope="slow_link", **changes)
        for name in names
    )


def start_on_hosts(hosts: Sequence[Host], target: Any, config: Any, out: str | Path) -> list[Job]:
    """Start a target with one rank on each made-up host.

    Args:
        hosts: from `linked_hosts`.
        target: as for `launch`.
        config: as for `launch`.
        out: folder of one run folder a host.
    """
    return [
        launch(
            target,
            config,
            1,
            out=Path(out) / host.name,
            env=host.env,
            threads=1,
            monitor=False,
            torchrun=host.torchrun(),
            within=host.within,
        )
        for host in hosts
    ]


def over_slow_link(runs: Sequence[CommCase], out: str | Path, *, rate_mbit: float) -> list[Record]:
    """Run cases on two made-up hosts with a link of `rate_mbit` and return their records.

    Raises:
        HostsError: this machine cannot make hosts.
    """
    plan = CommPlan(cases=tuple(runs), device="cpu")
    with linked_hosts(rate_mbit) as hosts:
        jobs = start_on_hosts(hosts, TARGET, plan, out)
        try:
            records = jobs[0].result()
        finally:
            for job in jobs:
                job.stop()
    label = {"link": "rate-limited veth between network namespaces", "rate_mbit": rate_mbit}
    return with_baseline(records, label)


def over_loopback(runs: Sequence[CommCase], out: str | Path) -> list[Record]:
    """Run cases on two GPUs that talk through the loopback device and return their records."""
    plan = CommPlan(cases=tuple(runs), device="cuda")
    records = launch(TARGET, plan, 2, out=out, env=THROUGH_LOOPBACK, monitor=False).result()
    return with_baseline(records, {"link": "NCCL over loopback, P2P and shared memory off"})


def with_baseline(records: Sequence[Record], label: Mapping[str, Any]) -> list[Record]:
    """Return records that carry the label and the baseline's exposed share of the same seed."""
    base = {r.extra["seed"]: r.exposed_comm_share for r in records if r.name == BASELINE}
    return [
        dataclasses.replace(
            r,
            extra={**r.extra, **label, "baseline_exposed_comm_share": base.get(r.extra["seed"])},
        )
        for r in records
    ]
