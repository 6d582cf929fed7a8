"""Made-up hosts on one machine: network namespaces with addresses and names of their own.

Two of them, joined by a link of a chosen rate, are enough to see what several real hosts do: a slow
link's wait, a rendezvous over the network, a host that dies. Linux and root are needed; `why_not`
says what is missing.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from wamlab.config import UserError

NETWORK = "10.213.7"
PORT = 29_400
BURST_KB = 128  # a token bucket must hold the largest packet that TCP hands down, 64 KB
RENAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class HostsError(UserError):
    """Hosts that cannot be made on this machine, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One made-up host.

    Attributes:
        name: its host name.
        address: its IPv4 address on the link.
        interface: its end of the link.
        namespace: its network namespace.
        number: its place, from 0; host 0 holds the rendezvous.
    """

    name: str
    address: str
    interface: str
    namespace: str
    number: int

    @property
    def within(self) -> list[str]:
        """The words in front of a command that run it on this host."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", RENAME, self.name]

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that lead gloo and NCCL to the link."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}

    def torchrun(self, nodes: str = "2", *, restarts: int = 0) -> list[str]:
        """Return torchrun's options on this host.

        Args:
            nodes: how many hosts, or "1:2" for one to two.
            restarts: times that the ranks may be started again.
        """
        keep = "keep_alive_interval=2,keep_alive_max_attempt=2,last_call_timeout=3,join_timeout=60"
        return [
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={NETWORK}.1:{PORT}",
            "--rdzv-id=wamlab",
            f"--rdzv-conf=is_host={int(self.number == 0)},{keep}",
            f"--local-addr={self.address}",
            f"--max-restarts={restarts}",
        ]


def why_not() -> str | None:
    """Return what this machine lacks for made-up hosts, or None."""
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (Debian, Ubuntu: apt-get install {package})"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with linked_hosts(rate_mbit=1000.0) as hosts:
            _run(*hosts[0].within, "true")
    except HostsError as error:
        return str(error)
    return None


@contextlib.contextmanager
def linked_hosts(rate_mbit: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Make two hosts joined by one link, and take them away afterwards.

    Args:
        rate_mbit: the link's rate in each direction, in megabit a second; None does not limit it.

    Raises:
        HostsError: the system refuses; the message holds its words.
    """
    _sweep()
    key = os.getpid()
    hosts = [
        Host(
            name=f"host-{letter}",
            address=f"{NETWORK}.{number + 1}",
            interface=f"wam{key}{letter}",
            namespace=f"wamlab-{key}{letter}",
            number=number,
        )
        for number, letter in enumerate("ab")
    ]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
        a, b = hosts
        link = ["ip", "link", "add", a.interface, "netns", a.namespace, "type", "veth"]
        _run(*link, "peer", "name", b.interface, "netns", b.namespace)
        for host in hosts:
            _bring_up(host, rate_mbit)
        yield a, b


def _sweep() -> None:
    """Take away the hosts of processes that were killed before they could."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for namespace, pid in re.findall(r"^(wamlab-(\d+)[ab])\b", found.stdout, re.M):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _bring_up(host: Host, rate_mbit: float | None) -> None:
    ip = ["ip", "-n", host.namespace]
    _run(*ip, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _run(*ip, "link", "set", "lo", "up")
    _run(*ip, "link", "set", host.interface, "up")
    if rate_mbit is not None:
        bucket = ["tbf", "rate", f"{rate_mbit}mbit", "burst", f"{BURST_KB}kb", "latency", "400ms"]
        qdisc = ["tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root"]
        _run(*qdisc, *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise HostsError(f"`{' '.join(command[:4])}` was refused: {words}")
