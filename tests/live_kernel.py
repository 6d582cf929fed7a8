"""Running cells in a real Jupyter kernel, as a notebook does."""

import contextlib
import dataclasses
import queue
import time
from collections.abc import Iterator
from pathlib import Path

from jupyter_client.manager import KernelManager

TESTS = Path(__file__).parent


@dataclasses.dataclass
class Ran:
    """What a cell left: its printed text, the displays sent for it and its error, if any."""

    text: str = ""
    displays: list[dict] = dataclasses.field(default_factory=list)
    error: str | None = None  # "Type: message"


class Kernel:
    """One kernel and its client."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(TESTS))
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def send(self, code: str) -> str:
        """Send a cell and return its id at once."""
        return self.client.execute(code)

    def run(self, code: str, timeout_s: float = 90.0) -> Ran:
        """Run a cell to its end."""
        return self.collect(self.send(code), timeout_s)

    def collect(self, cell: str, timeout_s: float = 90.0) -> Ran:
        """Collect what belongs to a cell until the kernel is idle again."""
        ran, end = Ran(), time.monotonic() + timeout_s
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=1.0)
                if message["parent_header"].get("msg_id") == cell and self._take(message, ran):
                    return ran
        raise TimeoutError(f"the cell did not end within {timeout_s} s: {ran}")

    def _take(self, message: dict, ran: Ran) -> bool:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            ran.text += content["text"]
        elif kind in ("display_data", "update_display_data", "execute_result"):
            ran.displays.append(content["data"])
        elif kind == "error":
            ran.error = f"{content['ename']}: {content['evalue']}"
        return kind == "status" and content["execution_state"] == "idle"

    def await_text(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a cell has printed `text`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for message in self.messages(0.2):
                if text in message["content"].get("text", ""):
                    return
        raise TimeoutError(f"no {text!r} within {timeout_s} s")

    def messages(self, seconds: float) -> list[dict]:
        """Return all that the kernel publishes within `seconds`."""
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                found.append(self.client.get_iopub_msg(timeout=0.2))
        return found

    def interrupt(self) -> None:
        """What a notebook's stop button does."""
        self.manager.interrupt_kernel()

    def restart(self, *, now: bool) -> None:
        """Restart; `now` kills the old kernel by SIGKILL."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@contextlib.contextmanager
def kernel() -> Iterator[Kernel]:
    """Yield a kernel with `launch` imported and the tests' folder on its path."""
    made = Kernel()
    try:
        ran = made.run("from wamlab.jupyter.launch import launch, Job")
        assert ran.error is None, ran.error
        yield made
    finally:
        made.close()
