"""Which host is gone: a heartbeat of every rank, so that a lost one is named and never waited for.

A host that dies takes its ranks along without a word. The others learn it as "connection closed by
peer" at best, and as ten minutes of silence inside a collective at worst.
"""

import os
import socket
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from wamlab.config import UserError
from wamlab.dist import gather, rank
from wamlab.train.topology import host_name

BEAT_S = 1.0
LOST = 75  # exit code of a rank whose peers are lost
SIGNS = ("gloo", "NCCL", "Connection", "closed by peer", "Broken pipe")


class LostHostError(UserError):
    """Another host of the run is gone; names it."""


class PeerWatch:
    """Watches the ranks of other hosts while its body runs; nothing on a single host.

    Every rank counts up in the run's store once a second. Where a count stands still for
    `silence_s` (20 s or more: a compiler may hold the interpreter for seconds), a rank that is
    stuck in a collective is ended with exit code 75 after saying whose count it was; one that a
    failed collective has already thrown out raises LostHostError instead. Either way torchrun ends
    the job or, with `--max-restarts`, starts it again.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._hosts: list[str] = []
        self._done = threading.Event()
        self._failed = threading.Event()
        self._lost: str | None = None
        self._found = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeerWatch":
        self._hosts = gather(f"{host_name()} ({_address()})")
        if len(set(self._hosts)) > 1:
            store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own
            self._thread = threading.Thread(target=self._watch, args=(store,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS):
            self._failed.set()
            self._found.wait(self.silence_s + 5 * BEAT_S)
        self._done.set()
        self._thread.join()
        if error is not None and self._lost:
            raise LostHostError(self._lost) from error

    def _watch(self, store: dist.Store) -> None:
        mine = rank()
        seen = {other: (-1, time.monotonic()) for other in range(len(self._hosts)) if other != mine}
        while not self._done.wait(BEAT_S):
            try:
                store.add(f"alive/{mine}", 1)
                for other, (count, since) in seen.items():
                    now = store.add(f"alive/{other}", 0)
                    if now != count:
                        seen[other] = (now, time.monotonic())
                    elif time.monotonic() - since > self.silence_s:
                        return self._end(f"rank {other} on host {self._hosts[other]}")
            except RuntimeError as error:  # the store's host answers no more
                where = f"the host of the rendezvous, {self._hosts[0]},"
                return self._end(where, str(error).splitlines()[0])

    def _end(self, who: str, how: str | None = None) -> None:
        how = how or f"no sign of life for {self.silence_s:.0f} s"
        self._lost = f"{who} is lost: {how}"
        self._found.set()
        if not self._failed.wait(2 * BEAT_S) and not self._done.is_set():
            print(f"rank {rank()} ends: {self._lost}", file=sys.stderr, flush=True)
            os._exit(LOST)  # the main thread hangs in a collective that nobody will end


def _address() -> str:
    """Return the address by which this host reaches the run's master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "address unknown"
