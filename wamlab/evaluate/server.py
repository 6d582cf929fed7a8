"""Serves a policy to evaluation clients over one WebSocket each: openpi's and RoboArena's protocol.

The server speaks first, with what it needs to see. Then each request gets one reply: actions, or a
text. A request that cannot be answered gets a text that says why and the connection goes on; a
frame that is no message gets its text and the connection is closed. Nothing a client sends stops
the server, and no traceback leaves it.

Shapes: N steps of a chunk, D the robot's action width, S its state width, T frames, H W pixels.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from wamlab.config import ConfigError, UserError
from wamlab.data.embodiment import Embodiment
from wamlab.evaluate.policy import Policy
from wamlab.evaluate.wire import WireError, packb, unpackb

LOG = logging.getLogger(__name__)
ENDPOINTS = ("infer", "reset")
MAX_ID, MAX_PROMPT = 256, 4096  # characters
NOT_A_MESSAGE = 1007  # WebSocket's own number for a frame whose content is not what it should be


class RequestError(UserError):
    """A request that cannot be answered; its text is the reply."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve.

    Args:
        host: the address to listen on; the default is reached from this machine alone.
        port: 0 takes a free one.
        dialect: form of the reply: "roboarena" a packed array [N, D], "openpi" a map with
            `actions`; "auto" goes by whether the request names an endpoint.
        max_bytes: the largest message that is read.
        sessions: episodes remembered at a time; beyond it the longest unused one is forgotten.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    dialect: Literal["auto", "roboarena", "openpi"] = "auto"
    max_bytes: int = 64 * 2**20
    sessions: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port}: a port is 0 (any free one) to 65535")
        for name in ("max_bytes", "sessions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


class PolicyServer:
    """Answers the requests of any number of clients, one inference at a time.

    Args:
        policy: acts for its embodiment; each session has a fork of its own.
        execute: steps of a chunk that are sent, and so carried out; None: all of them.
        image_hw: the pixels (height, width) that a client should send, or None for any.
        config: how to serve.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        execute: int | None = None,
        image_hw: tuple[int, int] | None = None,
        config: ServerConfig = ServerConfig(),
    ) -> None:
        self.policy, self.execute, self.config = policy, execute, config
        self.metadata = metadata(policy.embodiment, image_hw)
        self._sessions: OrderedDict[Any, Policy] = OrderedDict()
        self._turn = asyncio.Lock()

    def listen(self) -> serve:
        """Return the listening server as an async context manager."""
        return serve(
            self._talk,
            self.config.host,
            self.config.port,
            compression=None,
            max_size=self.config.max_bytes,
            ping_interval=60,
            ping_timeout=600,  # a first inference may compile for minutes
        )

    async def _talk(self, socket: ServerConnection) -> None:
        client = object()  # stands for the session of a client that names none
        try:
            await socket.send(packb(self.metadata))
            async for frame in socket:
                try:
                    request = read_request(frame)
                except WireError as error:
                    LOG.warning("closed a connection: %s", error)
                    await socket.send(f"error: {error}")
                    await socket.close(NOT_A_MESSAGE, "not a message of this protocol")
                    break
                await socket.send(await self._answer(request, client))
        except ConnectionClosed as error:
            LOG.info("a client left: %s", error)
        finally:
            self._sessions.pop(client, None)

    async def _answer(self, request: dict[str, Any], client: object) -> str | bytes:
        try:
            async with self._turn:
                return await asyncio.to_thread(self._run, request, client)
        except UserError as error:
            LOG.warning("refused a request: %s", error)
            return f"error: {error}"
        except Exception:  # whatever it was, the other clients go on
            LOG.exception("a request failed")
            return "error: the server failed on this request; its log says why"

    def _run(self, request: dict[str, Any], client: object) -> str | bytes:
        endpoint = request.get("endpoint", "infer")
        if endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint is {' or '.join(ENDPOINTS)}, got {endpoint!r}"[:200])
        key = _session_id(request, client)
        if endpoint == "reset":
            if key in self._sessions:
                self._sessions[key].reset()
            return "reset"
        observation = read_observation(request, self.policy.embodiment)
        actions = self._session(key).infer(observation)[: self.execute]
        arena = self.config.dialect == "roboarena"
        if arena or (self.config.dialect == "auto" and "endpoint" in request):
            return packb(actions)
        return packb({"actions": actions})

    def _session(self, key: Any) -> Policy:
        if key not in self._sessions:
            self._sessions[key] = self.policy.fork()
            if len(self._sessions) > self.config.sessions:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return self._sessions[key]


def metadata(embodiment: Embodiment, image_hw: tuple[int, int] | None) -> dict[str, Any]:
    """Return what the server says first: which cameras, in what size, and what actions mean.

    RoboArena's client takes these keys and no others.
    """
    wrist = [v for v in embodiment.views if "wrist" in v]
    joints = any(part.name == "joint_position" for part in embodiment.action)
    return {
        "image_resolution": None if image_hw is None else list(image_hw),
        "needs_wrist_camera": bool(wrist),
        "n_external_cameras": len(embodiment.views) - len(wrist),
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position" if joints else "cartesian_velocity",
    }


def read_request(frame: str | bytes) -> dict[str, Any]:
    """Return the map in a frame.

    Raises:
        WireError: a text frame, or bytes that hold no map.
    """
    if isinstance(frame, str):
        raise WireError("a request is a binary frame with a MessagePack map, got a text frame")
    request = unpackb(frame)
    if not isinstance(request, dict):
        raise WireError(f"a request is a map, got {type(request).__name__}")
    return request


def read_observation(request: dict[str, Any], embodiment: Embodiment) -> dict[str, Any]:
    """Return the policy's observation from the keys `observation/...` and `prompt` of a request.

    Returns:
        `views`: uint8 [H, W, 3], or [T, H, W, 3] with all frames since the last request, by name;
        `state` float32 [S]; `prompt` text.

    Raises:
        RequestError: a missing key, or a value of the wrong kind, named with what was expected.
    """
    views = {name: _view(request, f"observation/{name}") for name in embodiment.views}
    shapes = {view.shape for view in views.values()}
    if len(shapes) > 1:
        raise RequestError(f"the views of one request have one shape, got {sorted(shapes)}")
    state = [_numbers(request, f"observation/{part.name}", part.width) for part in embodiment.state]
    prompt = request.get("prompt")
    if not isinstance(prompt, str) or not 0 < len(prompt) <= MAX_PROMPT:
        raise RequestError(f"prompt is a text of 1 to {MAX_PROMPT} characters, got {_kind(prompt)}")
    return {"views": views, "state": np.concatenate(state), "prompt": prompt}


def _view(request: dict[str, Any], key: str) -> np.ndarray:
    value = request.get(key)
    fits = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (3, 4)
    if not fits or value.shape[-1] != 3 or 0 in value.shape:
        raise RequestError(f"{key} is an image uint8 [height, width, 3], got {_kind(value)}")
    return value.copy()  # the message's bytes are read-only and go away


def _numbers(request: dict[str, Any], key: str, width: int) -> np.ndarray:
    value = request.get(key)
    if isinstance(value, np.ndarray | np.generic | float | int):
        value = np.atleast_1d(value)
    fits = isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and value.shape == (width,)
    if not fits or not np.isfinite(value).all():
        finite = " finite" if fits else ""
        raise RequestError(f"{key} is {width}{finite} numbers, got {_kind(request.get(key))}")
    return value.astype(np.float32)


def _session_id(request: dict[str, Any], client: object) -> Any:
    value = request.get("session_id")
    if value is None:
        return client
    if not isinstance(value, str | int) or len(str(value)) > MAX_ID:
        raise RequestError(f"session_id is a text of {MAX_ID} characters at most")
    return str(value)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {list(value.shape)}"[:100]
    return "nothing" if value is None else type(value).__name__


async def serve_until(server: PolicyServer, stop: asyncio.Event, ready: Callable[[int], None]):
    """Listen until `stop` is set, then close every connection.

    Args:
        server: what answers.
        stop: ends it.
        ready: called with the port once clients can connect.
    """
    async with server.listen() as listening:
        ready(port_of(listening))
        await stop.wait()


def port_of(listening: Server) -> int:
    """Return the port that a server listens on."""
    return next(iter(listening.sockets)).getsockname()[1]


@contextlib.contextmanager
def serving(server: PolicyServer) -> Iterator[int]:
    """Serve from a thread while the block runs; gives the port.

    Raises:
        OSError: the address cannot be listened on.
    """
    loop, stop, port = asyncio.new_event_loop(), asyncio.Event(), []
    up, failed = threading.Event(), []

    def ready(number: int) -> None:
        port.append(number)
        up.set()

    def work() -> None:
        try:
            loop.run_until_complete(serve_until(server, stop, ready))
            loop.run_until_complete(loop.shutdown_default_executor())
        except OSError as error:
            failed.append(error)
        finally:
            up.set()
            loop.close()

    thread = threading.Thread(target=work, name="policy-server")
    thread.start()
    up.wait()
    if failed:
        thread.join()
        raise failed[0]
    try:
        yield port[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
