"""`wamlab serve CHECKPOINT`: a trained policy for evaluation clients, over a WebSocket."""

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from wamlab.config import ConfigError, replace
from wamlab.dist import device
from wamlab.evaluate.load import find_run, open_policy
from wamlab.evaluate.server import PolicyServer, ServerConfig, serve_until
from wamlab.model.sampling import DIT_STEPS

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab serve`."""
    own = ServerConfig()
    parser.add_argument("checkpoint", type=Path, help="a run's folder, or a checkpoint in it")
    parser.add_argument(
        "--host", default=own.host, help=f"address to listen on (default {own.host}: this machine)"
    )
    parser.add_argument(
        "--port", type=int, default=own.port, help=f"port (default {own.port}; 0: any)"
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the model"
    )
    parser.add_argument(
        "--dialect",
        default=own.dialect,
        choices=("auto", "roboarena", "openpi"),
        help="form of the reply (default: by whether the request names an endpoint)",
    )
    parser.add_argument(
        "--image-size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="what clients are asked to resize to (default: they send their own size)",
    )
    parser.add_argument(
        "--dit-steps",
        choices=tuple(DIT_STEPS),
        help="network calls a chunk (default: as the run says)",
    )
    parser.add_argument(
        "--sessions", type=int, default=own.sessions, help="clients remembered at a time"
    )
    parser.add_argument(
        "--max-mib", type=int, default=own.max_bytes >> 20, help="largest message in MiB"
    )


def run(args: argparse.Namespace) -> int:
    """Load the policy and answer until Ctrl-C or SIGTERM."""
    config = ServerConfig(
        host=args.host,
        port=args.port,
        dialect=args.dialect,
        max_bytes=args.max_mib << 20,
        sessions=args.sessions,
    )
    acting = find_run(args.checkpoint).acting()
    if args.dit_steps:
        acting = replace(acting, {"policy.sampling.dit_steps": args.dit_steps})
    policy = open_policy(args.checkpoint, acting.policy, device=device(args.device))
    size = tuple(args.image_size) if args.image_size else None
    server = PolicyServer(policy, execute=acting.execute, image_hw=size, config=config)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    if config.host not in LOOPBACK:
        print(f"note: {config.host} is open to whoever reaches it; nobody is asked who they are")
    try:
        asyncio.run(_serve(server))
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    print("stopped")
    return 0


async def _serve(server: PolicyServer) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    robot, host = server.policy.embodiment.name, server.config.host

    def ready(port: int) -> None:
        print(f"serving {robot} on ws://{host}:{port}; Ctrl-C stops", flush=True)

    await serve_until(server, stop, ready)
