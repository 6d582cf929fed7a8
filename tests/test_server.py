"""The policy server: what clients get, and that nothing they send stops it."""

import socket
import threading

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from wamlab.config import ConfigError
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.evaluate.policy import ObservationError, Policy
from wamlab.evaluate.server import PolicyServer, ServerConfig, metadata, serving
from wamlab.evaluate.wire import WireError, packb, unpackb

VIEWS, JOINTS = EMBODIMENTS["droid"].views, "observation/joint_position"


class Counter(Policy):
    """Answers with how often it was asked since its reset; every fork counts for itself."""

    def __init__(self, embodiment="droid"):
        self.embodiment, self.count, self.seen = EMBODIMENTS[embodiment], 0, []

    def reset(self):
        self.count = 0

    def fork(self):
        return Counter(self.embodiment.name)

    def infer_batch(self, observations):
        (observation,) = observations
        if observation["prompt"] == "refuse":
            raise ObservationError("this policy refuses")
        if observation["prompt"] == "break":
            raise RuntimeError("a secret of the server")
        self.count += 1
        width = sum(p.end - p.start for p in self.embodiment.action)
        return [np.full((self.horizon, width), self.count, np.float32)]


def request(prompt="lift the cup", **more):
    views = {f"observation/{name}": np.zeros((4, 6, 3), np.uint8) for name in VIEWS}
    state = {
        JOINTS: np.zeros(7),
        "observation/cartesian_position": np.zeros(6),  # sent by RoboArena, not read here
        "observation/gripper_position": np.zeros(1),
    }
    return {**views, **state, "prompt": prompt, **more}


@pytest.fixture
def port():
    with serving(PolicyServer(Counter(), config=ServerConfig(port=0, max_bytes=20_000))) as port:
        yield port


@pytest.fixture
def client(port):
    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as socket:
        unpackb(socket.recv())
        yield socket


def ask(client, message):
    client.send(message if isinstance(message, str | bytes) else packb(message))
    reply = client.recv()
    return reply if isinstance(reply, str) else unpackb(reply)


def test_the_server_speaks_first(port):
    with connect(f"ws://127.0.0.1:{port}", compression=None) as socket:
        found = unpackb(socket.recv())
    assert found == {
        "image_resolution": None,
        "needs_wrist_camera": True,
        "n_external_cameras": 2,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    }


def test_what_the_server_declares_follows_from_the_embodiment():
    droid = metadata(EMBODIMENTS["droid"], (180, 320))
    assert droid["image_resolution"] == [180, 320]
    libero = metadata(EMBODIMENTS["libero"], None)
    assert libero["n_external_cameras"] == 1
    assert libero["action_space"] == "cartesian_velocity"


def test_openpi_gets_a_map_and_roboarena_an_array(client):
    assert ask(client, request())["actions"].shape == (24, 8)
    actions = ask(client, request(endpoint="infer"))
    assert actions.shape == (24, 8)
    assert actions.dtype == np.float32


@pytest.mark.parametrize("dialect", ["openpi", "roboarena"])
def test_a_set_dialect_holds_whatever_is_asked(dialect):
    config = ServerConfig(port=0, dialect=dialect)
    with (
        serving(PolicyServer(Counter(), config=config)) as port,
        connect(f"ws://127.0.0.1:{port}", compression=None) as socket,
    ):
        socket.recv()
        for message in (request(), request(endpoint="infer")):
            assert isinstance(ask(socket, message), dict) == (dialect == "openpi")


def test_no_more_of_a_chunk_is_sent_than_is_to_be_carried_out():
    with (
        serving(PolicyServer(Counter(), execute=8, config=ServerConfig(port=0))) as port,
        connect(f"ws://127.0.0.1:{port}", compression=None) as socket,
    ):
        socket.recv()
        assert ask(socket, request())["actions"].shape == (8, 8)


def test_each_session_remembers_for_itself(client):
    def count(**more):
        return ask(client, request(**more))["actions"][0, 0]

    assert [count(session_id="a"), count(session_id="a"), count(session_id="b")] == [1, 2, 1]
    assert count() == 1
    assert ask(client, {"endpoint": "reset", "session_id": "a"}) == "reset"
    assert [count(session_id="a"), count(session_id="b")] == [1, 2]


def test_the_longest_unused_session_is_forgotten():
    config = ServerConfig(port=0, sessions=2)
    with (
        serving(PolicyServer(Counter(), config=config)) as port,
        connect(f"ws://127.0.0.1:{port}", compression=None) as socket,
    ):
        socket.recv()
        asked = [ask(socket, request(session_id=s))["actions"][0, 0] for s in "abacbab"]
    assert asked == [1, 1, 2, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("message", "reply"),
    [
        ({}, "observation/exterior_image_1_left is an image .* got nothing"),
        ({"endpoint": "jump"}, "endpoint is infer or reset, got 'jump'"),
        (request(session_id=3.5), "session_id is a text"),
        (request(prompt=7), "prompt is a text of 1 to 4096 characters, got int"),
        (request(prompt="refuse"), "this policy refuses"),
        (
            request(**{"observation/joint_position": np.zeros(6)}),
            r"is 7 numbers, got float64 \[6\]",
        ),
        (request(**{"observation/joint_position": "far"}), "is 7 numbers, got str"),
        (request(**{"observation/joint_position": np.full(7, np.nan)}), "is 7 finite numbers"),
        (request(**{"observation/joint_position": [[1], 2]}), "is 7 numbers, got list"),
        (request(**{f"observation/{VIEWS[0]}": np.zeros((4, 6, 3))}), r"got float64 \[4, 6, 3\]"),
        (request(**{f"observation/{VIEWS[0]}": np.zeros((2, 6, 3), np.uint8)}), "one shape"),
    ],
)
def test_a_bad_request_gets_its_reason_and_the_connection_goes_on(client, message, reply):
    answer = ask(client, message)
    assert isinstance(answer, str)
    with pytest.raises(ConfigError, match=reply):
        raise ConfigError(answer)
    assert ask(client, request())["actions"].shape == (24, 8)


def test_a_fault_of_the_server_is_logged_and_not_sent(client, caplog):
    answer = ask(client, request(prompt="break"))
    assert answer == "error: the server failed on this request; its log says why"
    assert "a secret of the server" in caplog.text
    assert ask(client, request())["actions"].shape == (24, 8)


ARRAY = {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f4", b"shape": [2]}
DEEP = b"\x91" * 5000 + b"\x90"


@pytest.mark.parametrize(
    ("frame", "reply"),
    [
        ("hello", "got a text frame"),
        (b"", "no MessagePack message"),
        (b"\xc1", "no MessagePack message"),
        (packb(request())[:-9], "no MessagePack message"),
        (DEEP, "no MessagePack message"),
        (packb([1, 2]), "a request is a map, got list"),
        (msgpack.packb({"x": {**ARRAY, b"shape": [3]}}), "8 bytes cannot be float32"),
        (msgpack.packb({"x": {**ARRAY, b"shape": [-2]}}), "list of sizes"),
        (msgpack.packb({"x": {**ARRAY, b"shape": [2**62, 2**62]}}), "cannot be float32"),
        (msgpack.packb({"x": {**ARRAY, b"dtype": "O"}}), "dtype is a number type"),
        (msgpack.packb({"x": {**ARRAY, b"dtype": "V8"}}), "dtype is a number type"),
        (msgpack.packb({"x": {**ARRAY, b"dtype": "<c8"}}), "dtype is a number type"),
        (msgpack.packb({"x": {**ARRAY, b"dtype": "nonsense("}}), "dtype is a number type"),
        (msgpack.packb({"x": {b"__ndarray__": True}}), "dtype is a number type"),
        (msgpack.packb({"x": {b"__npgeneric__": True, b"dtype": "<f4"}}), "a scalar is a map"),
    ],
)
def test_a_frame_that_is_no_message_gets_its_reason_and_is_closed(port, client, frame, reply):
    client.send(frame)
    answer = client.recv()
    assert answer.startswith("error: ")
    with pytest.raises(ConfigError, match=reply):
        raise ConfigError(answer)
    with pytest.raises(ConnectionClosedError) as closed:
        client.recv()
    assert closed.value.rcvd.code == 1007
    with connect(f"ws://127.0.0.1:{port}", compression=None) as other:
        other.recv()
        assert ask(other, request())["actions"].shape == (24, 8)


def test_a_message_over_the_limit_is_closed_with_the_limit_in_words(port, client):
    client.send(b"\x00" * 20_001)
    with pytest.raises(ConnectionClosedError) as closed:
        client.recv()
    assert closed.value.rcvd.code == 1009
    assert "20000" in closed.value.rcvd.reason
    with connect(f"ws://127.0.0.1:{port}", compression=None) as other:
        other.recv()
        assert ask(other, request())["actions"].shape == (24, 8)


def test_clients_that_vanish_or_speak_no_websocket_do_not_stop_it(port, client):
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with connect(f"ws://127.0.0.1:{port}", compression=None) as other:
        other.recv()
        other.send(packb(request()))
        other.socket.shutdown(socket.SHUT_RDWR)  # gone before its answer
    assert ask(client, request())["actions"].shape == (24, 8)


def test_requests_sent_ahead_are_answered_in_order(client):
    for _ in range(5):
        client.send(packb(request()))
    counts = [unpackb(client.recv())["actions"][0, 0] for _ in range(5)]
    assert counts == [1, 2, 3, 4, 5]


def test_clients_at_the_same_time_are_answered_one_by_one(port):
    found = []

    def work(name):
        with connect(f"ws://127.0.0.1:{port}", compression=None) as socket:
            socket.recv()
            found.extend(ask(socket, request(session_id=name))["actions"][0, 0] for _ in range(5))

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([1, 2, 3, 4, 5] * 4)


def test_it_listens_on_loopback_unless_told_otherwise():
    assert ServerConfig().host == "127.0.0.1"
    with pytest.raises(ConfigError, match="port 70000"):
        ServerConfig(port=70000)


def test_a_port_in_use_is_refused(port):
    with (
        pytest.raises(OSError, match="in use"),
        serving(PolicyServer(Counter(), config=ServerConfig(port=port))),
    ):
        pass


def test_arrays_and_scalars_survive_the_wire():
    value = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty": np.zeros((0, 4), np.int16),
        "big": np.arange(3, dtype=">i4"),
        "b": np.float32(2.5),
        "text": "für",
        "list": [1, None, True],
    }
    found = unpackb(packb(value))
    np.testing.assert_array_equal(found["a"], value["a"])
    assert found["empty"].shape == (0, 4)
    np.testing.assert_array_equal(found["big"], value["big"])
    assert found["b"] == 2.5
    assert isinstance(found["b"], np.float32)
    assert (found["text"], found["list"]) == ("für", [1, None, True])


@pytest.mark.parametrize("value", [np.array([None]), np.zeros(2, "c8"), np.zeros(2, "V4"), {1j}])
def test_what_has_no_form_on_the_wire_is_refused(value):
    with pytest.raises(WireError, match=r"not allowed|no form"):
        packb({"x": value})


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")
def test_openpis_own_client(port):
    """The package pins numpy below 2: `pip install --no-deps openpi-client`."""
    module = pytest.importorskip("openpi_client.websocket_client_policy")
    policy = module.WebsocketClientPolicy("127.0.0.1", port)
    assert policy.get_server_metadata()["action_space"] == "joint_position"
    assert policy.infer(request())["actions"].shape == (24, 8)
    with pytest.raises(RuntimeError, match="is 7 numbers, got nothing"):
        policy.infer({k: v for k, v in request().items() if k != JOINTS})
    np.testing.assert_array_equal(policy.infer(request())["actions"], np.full((24, 8), 2.0))
    policy._ws.close()
