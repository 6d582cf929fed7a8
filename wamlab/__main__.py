"""The command line: `wamlab COMMAND`.

Each command lives in wamlab/cli/ and is imported only when it is called.
"""

import importlib
import sys
from importlib import metadata

from wamlab.config import Parser, RunError, UserError, unknown_name

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("doctor", "what this machine offers, and the cure for what is missing"),
    "demo": ("demo", "the ladder of speed-ups on a small model, measured now"),
    "train": ("train", "train from one JSON file, on one process or under torchrun"),
    "ladder": ("ladder", "run a ladder file, each row in a fresh process"),
    "report": ("report", "tables and plots from record files"),
    "bench": ("bench", "time one part alone: decoding, encoders, augmentation, the DiT and more"),
    "profile": ("profile", "where the steps of a run spend their time, on every rank"),
    "check": ("check", "find every fault of a data set in one pass"),
    "transcode": ("transcode", "re-encode a data set's videos for training"),
    "encode-prompts": ("encode_prompts", "encode each distinct prompt of a data set once"),
    "encode-latents": ("encode_latents", "encode each un-augmented sample of a data set once"),
    "train-vae": ("train_vae", "train the tiny VAE on a data set's videos"),
    "evaluate": ("evaluate", "let a trained model act: success in closed loop, error in open loop"),
    "converge": ("converge", "the same learning in less time: official against optimised, to 80 %"),
    "serve": ("serve", "answer evaluation clients with a trained policy, over a WebSocket"),
    "lab": ("lab", "open JupyterLab on the notebooks"),
    "course": ("course", "write the notebooks with their outputs as pages"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; return 0 (done), 1 (found faults, a run failed) or 2 (refused its input)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: wamlab COMMAND [options]\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:<16}{summary}")
        print("\n`wamlab COMMAND --help` lists a command's options.")
        return 0
    if argv[0] == "--version":
        print(f"wamlab {metadata.version('wamlab')}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"wamlab: {unknown_name(argv[0], COMMANDS, 'command')}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"wamlab.cli.{COMMANDS[argv[0]][0]}")
    summary = COMMANDS[argv[0]][1]
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = Parser(prog=f"wamlab {argv[0]}", description=description)
    module.add_arguments(parser)
    try:
        return module.run(parser.parse_args(argv[1:]))
    except UserError as error:
        print(f"wamlab {argv[0]}: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"wamlab {argv[0]}: {error.refusal or error}", file=sys.stderr)
        return 2 if error.refusal else 1
    except OSError as error:  # a path that cannot be read or written
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"wamlab {argv[0]}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"wamlab {argv[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
