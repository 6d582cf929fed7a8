"""Which ranks shard a model together, planned from the links between them.

FSDP2 gathers every weight twice a step and scatters every gradient once; HSDP keeps that traffic
inside an island of fast links and sends only the sharded gradients between islands. Where all
links are equally fast there is one island and nothing to gain.
"""

import dataclasses
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence

import torch

from wamlab.config import ConfigError

WORTH = 2.0  # an island's links must be this much faster than those that leave it

# One direction, GB/s: NVLink 4 per link, PCIe 5 x16 by how far it must travel, a 400 Gbit/s network
NVLINK, NETWORK = 25.0, 50.0
MEMORY = 100.0  # between processes of one host without GPUs
PATHS = {"PIX": 50.0, "PXB": 45.0, "PHB": 40.0, "NODE": 30.0, "SYS": 20.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """How ranks are grouped: `groups[i]` shards one copy of the model; copies are replicas."""

    groups: tuple[tuple[int, ...], ...]
    reason: str

    @property
    def replicate(self) -> int:
        """Copies of the model."""
        return len(self.groups)

    @property
    def shard(self) -> int:
        """Ranks that share one copy."""
        return len(self.groups[0])


def plan_groups(
    links: Sequence[Sequence[float]], hosts: Sequence[str], numa: Sequence[int]
) -> MeshPlan:
    """Group ranks into islands of fast links; a pure function of what is given.

    Three groupings are tried, from the smallest: ranks joined by links of the fastest kind, ranks
    of one NUMA node, ranks of one host. The first counts whose islands are equally large, hold more
    than one rank, and whose slowest link inside is `WORTH` times as fast as the fastest between.

    Args:
        links: bandwidth between each two ranks, GB/s, symmetric; the diagonal is not read.
        hosts: the host of each rank.
        numa: the NUMA node of each rank on its host.

    Returns:
        The plan; one group of all ranks where no grouping is worth it.

    Raises:
        ConfigError: sizes that differ, or links that are not symmetric.
    """
    count = len(hosts)
    _check(links, count, numa)
    pairs = [(a, b) for a in range(count) for b in range(a)]
    best = max((links[a][b] for a, b in pairs), default=0.0)
    fast = [(a, b) for a, b in pairs if links[a][b] > best / WORTH]
    for what, groups in (
        ("the fastest links", _joined(count, fast)),
        ("a NUMA node", _by(list(zip(hosts, numa)))),
        ("a host", _by(hosts)),
    ):
        inside, between = _extremes(links, groups)
        equal = len({len(g) for g in groups}) == 1
        if len(groups) > 1 and len(groups[0]) > 1 and equal and inside >= WORTH * between:
            text = f"{len(groups)} islands of {len(groups[0])} ranks by {what}"
            text += f": at least {inside:g} GB/s inside, at most {between:g} GB/s between"
            return MeshPlan(groups=groups, reason=text)
    worst = min((links[a][b] for a, b in pairs), default=0.0)
    text = f"one group: links from {worst:g} to {best:g} GB/s make no equal islands worth it"
    if pairs and best < WORTH * worst:
        text = f"one group: all links are alike ({worst:g} to {best:g} GB/s), HSDP brings nothing"
    return MeshPlan(groups=(tuple(range(count)),), reason=text)


def _check(links: Sequence[Sequence[float]], count: int, numa: Sequence[int]) -> None:
    if len(links) != count or len(numa) != count or any(len(row) != count for row in links):
        raise ConfigError(
            f"{count} hosts need {count} NUMA nodes and {count} x {count} links, got {len(numa)} "
            f"and {len(links)} rows of {sorted({len(row) for row in links})}"
        )
    for a in range(count):
        for b in range(a):
            if links[a][b] != links[b][a]:
                raise ConfigError(
                    f"links must be symmetric: {links[a][b]} from {a} to {b}, {links[b][a]} back"
                )


def _joined(count: int, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the connected components, sorted."""
    label = list(range(count))
    for a, b in pairs:
        old, new = max(label[a], label[b]), min(label[a], label[b])
        label = [new if one == old else one for one in label]
    return _by(label)


def _by(keys: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    groups: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(tuple(g) for g in groups.values())


def _extremes(
    links: Sequence[Sequence[float]], groups: tuple[tuple[int, ...], ...]
) -> tuple[float, float]:
    """Return the slowest link inside a group and the fastest between two."""
    home = {rank: number for number, group in enumerate(groups) for rank in group}
    pairs = [(a, b) for a in home for b in home if b < a]
    inside = [links[a][b] for a, b in pairs if home[a] == home[b]]
    between = [links[a][b] for a, b in pairs if home[a] != home[b]]
    return min(inside, default=0.0), max(between, default=0.0)


def parse_topology(text: str) -> tuple[list[list[float]], list[int]]:
    """Read `nvidia-smi topo -m`.

    Args:
        text: what it prints: a header, then one row a GPU with a link kind for each GPU (NV18, PIX,
            SYS, ...) and its NUMA node.

    Returns:
        Bandwidths in GB/s, and the NUMA node of each GPU (0 where the table has none).

    Raises:
        ConfigError: there is no row of a GPU in it.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split("\t") for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    if not rows:
        raise ConfigError(f"no GPU in the topology table:\n{text[:300]}")
    header = next(line for line in plain.splitlines() if "GPU0" in line).split("\t")
    affinity = next((i for i, name in enumerate(header) if name.strip() == "NUMA Affinity"), None)
    kinds = [[cell.strip() for cell in row[1 : 1 + len(rows)]] for row in rows]
    links = [[_bandwidth(kind) for kind in row] for row in kinds]
    cells = ["" if affinity is None else row[affinity : affinity + 1] for row in rows]
    numa = [int(m[0]) if (m := re.match(r"\d+", "".join(cell).strip())) else 0 for cell in cells]
    return links, numa


def _bandwidth(kind: str) -> float:
    if kind.startswith("NV"):
        return NVLINK * int(kind[2:])
    return PATHS.get(kind, 0.0)  # "X": the GPU itself


def local_links(count: int) -> tuple[list[list[float]], list[int]]:
    """Return the links between this host's ranks: NVIDIA's table, or without GPUs memory's speed.

    Raises:
        ConfigError: GPUs without nvidia-smi, which comes with the driver.
    """
    if not torch.cuda.is_available():
        return [[MEMORY] * count for _ in range(count)], [0] * count
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise ConfigError("planning the mesh needs nvidia-smi; set fsdp2.replicate yourself")
    found = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, check=True)
    links, numa = parse_topology(found.stdout)
    return [row[:count] for row in links[:count]], numa[:count]


def join_hosts(
    found: Sequence[tuple[str, int, list[list[float]], list[int]]],
) -> tuple[list[list[float]], list[str], list[int]]:
    """Return links, hosts and NUMA nodes of all ranks from what each rank knows of its own host.

    Args:
        found: per rank its host, its place there, and the host's links and NUMA nodes.
    """
    links = [[a[2][a[1]][b[1]] if a[0] == b[0] else NETWORK for b in found] for a in found]
    return links, [host for host, *_ in found], [numa[place] for _, place, _, numa in found]


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()
