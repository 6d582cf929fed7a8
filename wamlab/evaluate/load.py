"""From a training run's folder to a policy that acts.

A checkpoint is named by any of
    RUN                             a run's folder: its exported weights, or its newest checkpoint
    RUN/checkpoints/step_00000100   one checkpoint
    RUN/weights                     weights under the public names
with RUN/run.json beside it, which says what the model is. How to act, and the robot's statistics,
come from RUN/acting.json or, without one, from the defaults and the data set that run.json names.
"""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from wamlab.config import from_dict, load_json
from wamlab.data.codec import Codec
from wamlab.data.data_config import DataConfig, open_data
from wamlab.data.toy_env import ToyConfig
from wamlab.data.toy_play import robot_of
from wamlab.data.windows import Mixture
from wamlab.evaluate.policy import ModelPolicy, PolicyConfig
from wamlab.model import lora
from wamlab.model.stored import CheckpointError
from wamlab.model.vae import VAE, load_vae
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.model.weights import load_backbone, load_policy

ACTING = "acting.json"
# encoders at once, nothing that is thrown away, prompts once: exact, and what acting wants
QUICK = {
    "batched_encoders": True,
    "skip_unused_y": True,
    "prompt_cache": True,
    "shortcuts": True,
    "impl": "fused",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acting:
    """How a trained model acts: what a training run leaves in acting.json.

    Args:
        embodiment: a key of EMBODIMENTS.
        blocks: K, blocks of a training sample.
        statistics: `Codec.to_json`.
        policy: contexts and sampling.
        execute: steps of a chunk that are carried out before the next one; null: all of them.
        prompt: the template that it was trained with; null: the embodiment's.
        world: the toy table that it was trained on, null: another world.
    """

    embodiment: str
    blocks: int
    statistics: dict[str, Any]
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    execute: int | None = None
    prompt: str | None = None
    world: ToyConfig | None = None

    @property
    def codec(self) -> Codec:
        """The robot and its statistics."""
        robot = robot_of(self.embodiment, self.blocks)
        if self.prompt is not None:
            robot = dataclasses.replace(robot, prompt=self.prompt)
        return Codec.from_json(robot, self.statistics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Where a run's parts lie: its configuration, its folder, and its weights."""

    run: dict[str, Any]
    folder: Path
    weights: Path

    def acting(self) -> Acting:
        """Return how to act.

        Raises:
            CheckpointError: neither acting.json nor a data set with the robot's statistics.
        """
        if (self.folder / ACTING).is_file():
            return load_json(Acting, self.folder / ACTING)
        if not self.run.get("data"):
            raise CheckpointError(
                f"{self.folder}: no {ACTING}, and run.json names no data set, so nobody knows the "
                "robot's statistics"
            )
        data = open_data(from_dict(DataConfig, self.run["data"]))
        data = data.parts[0] if isinstance(data, Mixture) else data
        codec, robot = data.dataset.codec, data.embodiment
        return Acting(
            embodiment=robot.name,
            blocks=robot.blocks,
            statistics=codec.to_json(),
            prompt=robot.prompt,
        )


def find_run(checkpoint: str | Path) -> Found:
    """Find what belongs to a checkpoint.

    Raises:
        CheckpointError: no run.json near it, or no weights.
    """
    path = Path(checkpoint)
    folders = [f for f in (path, path.parent, path.parent.parent) if (f / "run.json").is_file()]
    if not folders:
        raise CheckpointError(
            f"{path}: no run.json in it or above it; name a run's folder, one of its checkpoints "
            "(checkpoints/step_...) or its exported weights"
        )
    folder = folders[0]
    weights = path
    if folder == path:
        complete = sorted(p.parent for p in path.glob("checkpoints/step_*/complete.json"))
        exported = [path / "weights"] if (path / "weights").is_dir() else []
        if not exported and not complete:
            raise CheckpointError(
                f"{path}: neither weights/ nor a complete checkpoint; train with `export` or "
                "`save_every`"
            )
        weights = (exported or complete)[-1]
    return Found(run=json.loads((folder / "run.json").read_text()), folder=folder, weights=weights)


def open_policy(
    checkpoint: str | Path,
    config: PolicyConfig | None = None,
    *,
    device: torch.device | str = "cpu",
) -> ModelPolicy:
    """Build the policy of a checkpoint; on a GPU in bf16 where the run was trained in it.

    Args:
        checkpoint: see the module.
        config: how to act; null: as the run's acting.json says.
        device: where to.

    Raises:
        CheckpointError: there is no such run, or its weights do not fit.
    """
    found, device = find_run(checkpoint), torch.device(device)
    half = device.type == "cuda" and found.run.get("precision") == "bf16"
    model_config = from_dict(WAMConfig, {**found.run["model"], "latent_cache": None})
    with device:
        model = WorldActionModel(model_config)
    _load_weights(model, found)
    prepare_to_act(model, half)
    acting = found.acting()
    return ModelPolicy(model, acting.codec, config or acting.policy)


def prepare_to_act(model: WorldActionModel, half: bool) -> None:
    """Set the quick options, and freeze the DiT in bf16 (`half`) or fp32."""
    for option, value in QUICK.items():
        model.set_option(option, value)
    model.dit.to(torch.bfloat16 if half else torch.float32).eval().requires_grad_(False)


def load_decoder(policy: ModelPolicy) -> VAE:
    """Return the policy's VAE with its decoder, to see what it imagines."""
    config, device = policy.model.config, policy.device
    size, weights = config.encoders.vae, config.vae_weights
    return load_vae(size, weights, seed=config.seed, device=device)


def _load_weights(model: WorldActionModel, found: Found) -> None:
    run, device = found.run, next(model.dit.parameters()).device
    adapted = run.get("lora") is not None
    if adapted:
        if run.get("policy"):
            load_policy(model.dit, run["policy"], device=device)
        elif run.get("backbone"):
            load_backbone(model.dit, run["backbone"], device=device, seed=model.config.seed)
        lora.inject(model.dit, from_dict(lora.LoRAConfig, run["lora"]))
    if (found.weights / "complete.json").is_file():
        load_checkpoint(found.weights, model)
    elif adapted:
        lora.load_lora(model.dit, found.weights)
    else:
        load_policy(model.dit, found.weights, device=device)


def load_checkpoint(path: Path, model: nn.Module) -> None:
    """Load the trained parameters of a training checkpoint, and nothing of its optimizer.

    Raises:
        CheckpointError: a stored parameter is none of the model's, or has another shape.
    """
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    own = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    wanted = {name: meta for name, meta in stored.items() if name.startswith("model.")}
    for name, meta in wanted.items():
        if name not in own or tuple(meta.size) != tuple(own[name].shape):
            here = tuple(own[name].shape) if name in own else "no such parameter"
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(meta.size)}, the model of its run.json has {here}"
            )
    if not wanted:
        raise CheckpointError(f"{path} holds no parameter of a model")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
        dcp.load({name: own[name] for name in wanted}, checkpoint_id=path, no_dist=True)
