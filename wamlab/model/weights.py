"""Public DiT checkpoints in and out: a DreamZero policy, a plain Wan backbone, our own.

Order of every load: open and check the files (`stored.py`), compare all names, shapes and dtypes
with the model, and only then give a meta model its memory and fill it, tensor by tensor, each rank
keeping its own shard. Whatever is refused, is refused before the first parameter changes.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from wamlab import dist
from wamlab.model.frozen import seeded
from wamlab.model.init import init_parameter
from wamlab.model.stored import Checkpoint, CheckpointError, StoredTensor, open_checkpoint, some

PREFIX = "action_head.model."
PEFT_PREFIX = "base_model.model."
SHARD_BYTES = 5 * 10**9
_LOADABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ACTION_MODULES = ("action_encoder.", "state_encoder.", "action_decoder.")
IMAGE_MODULES = ("img_emb.", "cross_attn.k_img.", "cross_attn.v_img.", "cross_attn.norm_k_img.")
_TEMPLATE_KEYS = ("prompt_template", "language_template", "instruction_template")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    Args:
        loaded: parameters that came from the checkpoint.
        fresh: parameters that the checkpoint lacks and that start from their initialisation.
        kept: parameters that the checkpoint lacks and that stay as they were.
        ignored: stored tensors that were not used (a policy's encoders, blocks beyond the model's).
    """

    loaded: tuple[str, ...]
    fresh: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def load_policy(
    model: nn.Module,
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device | None = None,
    fewer_layers: bool = False,
) -> LoadReport:
    """Load every parameter of a DiT from a DreamZero policy checkpoint.

    Args:
        model: a WorldActionDiT, on the meta device, in memory or sharded by FSDP2; keeps its dtype
            and its adapters, if it has any.
        source: as in `open_checkpoint`; names may carry "action_head.model." and ".base_layer".
        device: where a meta model gets its memory; None: the CPU, or the mesh's if it is sharded.
        fewer_layers: let a model of fewer blocks ignore the checkpoint's further ones.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; the model is then unchanged.
    """
    return _load(model, source, device=device, fewer_layers=fewer_layers)


def load_backbone(
    model: nn.Module,
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device | None = None,
    seed: int = 0,
    fewer_layers: bool = False,
) -> LoadReport:
    """Cold-start a DiT from a plain Wan2.1 or Wan2.2 backbone.

    Args:
        model: as in `load_policy`.
        source: as in `open_checkpoint`.
        device: as in `load_policy`.
        seed: of the parameters that start fresh.
        fewer_layers: as in `load_policy`.

    Returns:
        The report; `fresh` names the parameters that the backbone lacks.

    Raises:
        CheckpointError: as in `load_policy`; but the action and state modules, and the CLIP branch,
            may be missing, each as a whole.
    """
    report = _load(
        model,
        source,
        device=device,
        fewer_layers=fewer_layers,
        seed=seed,
        optional=(ACTION_MODULES, IMAGE_MODULES),
    )
    if model.options.zero_init_img_branch:
        for name in report.fresh:
            if ".v_img." in name:
                nn.init.zeros_(model.get_parameter(name))
    return report


def _load(
    model: nn.Module,
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device | None,
    fewer_layers: bool,
    seed: int = 0,
    optional: tuple[tuple[str, ...], ...] = (),
) -> LoadReport:
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    stored = dit_names(checkpoint)
    if any(".lora_" in name for name in stored):
        raise CheckpointError(f"{checkpoint.root} holds LoRA adapters: load it with `load_lora`")
    parameters = {plain_name(n): p for n, p in model.state_dict(keep_vars=True).items()}
    wanted = {n: p for n, p in parameters.items() if ".lora_" not in n}
    beyond = _blocks_beyond(stored, wanted) if fewer_layers else set()
    stored = {name: at for name, at in stored.items() if name not in beyond}
    groups = [{n for n in wanted if any(part in n for part in parts)} for parts in optional]
    missing = wholly_missing(groups, stored)
    check_fit({n: p for n, p in wanted.items() if n not in missing}, stored, checkpoint)
    kept = {n for n, p in parameters.items() if n not in wanted and not p.is_meta}
    fill(model, checkpoint, stored, device=device, kept=kept, seed=seed)
    used = set(stored.values())
    return LoadReport(
        loaded=tuple(stored),
        fresh=tuple(n for n in parameters if n not in stored and n not in kept),
        kept=tuple(n for n in parameters if n in kept),
        ignored=tuple(n for n in checkpoint.tensors if n not in used),
    )


def dit_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return {plain name: stored name} of the DiT's tensors in a checkpoint.

    Raises:
        CheckpointError: two stored tensors have one plain name.
    """
    names: dict[str, str] = {}
    for name, stored in (checkpoint.under(PREFIX) or checkpoint.under("")).items():
        plain = plain_name(name)
        if plain in names:
            raise CheckpointError(
                f"{checkpoint.root}: {names[plain]} and {stored} are both {plain}; keep one of them"
            )
        names[plain] = stored
    return names


def plain_name(name: str) -> str:
    """Return a parameter's name without what PEFT puts into it."""
    name = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
    return re.sub(r"(\.lora_[AB])\.default\.", r"\1.", name)


def _blocks_beyond(stored: Iterable[str], wanted: Iterable[str]) -> set[str]:
    def index(name: str) -> int:
        return int(name.split(".")[1]) if name.startswith("blocks.") else -1

    last = max(index(name) for name in wanted)
    return {name for name in stored if index(name) > last}


def wholly_missing(groups: Iterable[set[str]], stored: Mapping[str, str]) -> set[str]:
    """Return the names of the groups of which the checkpoint holds nothing at all."""
    return set().union(*(group for group in groups if group.isdisjoint(stored)))


def check_fit(
    wanted: Mapping[str, Tensor], stored: Mapping[str, str], checkpoint: Checkpoint
) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes do not fit.

    Args:
        wanted: {name: parameter} that must all come from the checkpoint.
        stored: {our name: stored name} of what the checkpoint offers.
        checkpoint: where it lies.

    Raises:
        CheckpointError: everything that is wrong, in one message.
    """
    problems = []
    if missing := wanted.keys() - stored.keys():
        problems.append(f"{len(missing)} missing: {some(missing)}")
    if extra := [stored[name] for name in stored.keys() - wanted.keys()]:
        problems.append(f"{len(extra)} that the model does not have: {some(extra)}")
    for name in sorted(wanted.keys() & stored.keys()):
        entry = checkpoint.tensors[stored[name]]
        problem = _misfit(entry, wanted[name])
        if problem:
            problems.append(f"{stored[name]} in {entry.file.name} {problem}")
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{checkpoint.root} does not fit the model, which is unchanged: {shown}{more}"
        )


def _misfit(entry: StoredTensor, parameter: Tensor) -> str | None:
    if entry.shape != parameter.shape:
        return f"is {list(entry.shape)}, the model's is {list(parameter.shape)}"
    if parameter.dtype.is_floating_point and entry.dtype not in _LOADABLE:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _LOADABLE)
        return f"is {str(entry.dtype).removeprefix('torch.')}; allowed are {allowed}"
    return None


@torch.no_grad()
def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    *,
    device: str | torch.device | None = None,
    kept: Collection[str] = (),
    seed: int = 0,
) -> None:
    """Give a meta model its memory, then copy tensor by tensor; call `check_fit` first.

    Args:
        model: any module; parameters may be sharded (DTensor).
        checkpoint: where the values are.
        stored: {plain parameter name: stored name}.
        device: as in `load_policy`.
        kept: plain names of parameters that stay as they are; all others start fresh.
        seed: of those that start fresh.
    """
    parameters = list(model.parameters())
    if any(p.is_meta for p in parameters):
        meshes = {p.device_mesh.device_type for p in parameters if isinstance(p, DTensor)}
        model.to_empty(device=device or next(iter(meshes), "cpu"))
    for name, parameter in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        if plain in stored:
            _copy(parameter, checkpoint.read(stored[plain]))
        elif plain not in kept:
            _copy(parameter, initial_value(plain, parameter.shape, seed))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return where a parameter starts, in fp32: a function of seed and plain name alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    value = torch.zeros(shape)
    with seeded(int.from_bytes(digest[:7], "little")):
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
        elif ".lora_B." not in name:
            init_parameter(name, value)
    return value


def _copy(parameter: Tensor, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        # every rank reads the whole tensor and keeps its own part: no communication
        value = distribute_tensor(
            value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
        ).to_local()
        parameter = parameter.to_local()
    parameter.copy_(value)


def save_policy(
    model: nn.Module,
    folder: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a DiT's parameters under the public names, as safetensors shards with their index.

    Every rank of a sharded model calls it; rank 0 writes. One shard at a time is in host memory.

    Args:
        model: a WorldActionDiT.
        folder: made if need be; must hold no checkpoint yet.
        shard_bytes: the most bytes of tensors in one file.

    Raises:
        CheckpointError: the folder already holds safetensors files.
    """
    save_tensors({PREFIX + n: p for n, p in model.state_dict().items()}, folder, shard_bytes)


def save_tensors(
    tensors: Mapping[str, Tensor], folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write named tensors (sharded ones are gathered) as `save_policy` does, the index last.

    Raises:
        CheckpointError: the folder already holds safetensors files.
    """
    folder = Path(folder)
    if any(folder.glob("*.safetensors*")):
        raise CheckpointError(f"{folder} already holds safetensors files: name an empty folder")
    dist.barrier()  # rank 0 must not write before every rank has looked
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(tensors, shard_bytes)
    writer = dist.rank() == 0
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        values = {name: _whole(tensors[name], keep=writer) for name in names}
        if writer:
            save_file(values, folder / f"{file}.partial", metadata={"format": "pt"})
            (folder / f"{file}.partial").replace(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if writer and len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _whole(tensor: Tensor, *, keep: bool) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous() if keep else None


def prompt_template(checkpoint_dir: str | Path) -> str | None:
    """Return the prompt template that a checkpoint's experiment configuration names, or None.

    Args:
        checkpoint_dir: the folder that holds, or lies beside, experiment_cfg (a folder or a file).

    Raises:
        CheckpointError: a configuration file is not readable, or two of them disagree.
    """
    folder = Path(checkpoint_dir)
    found: dict[str, Path] = {}
    for place in (folder, folder.parent):
        for pattern in ("experiment_cfg.*", "experiment_cfg/*"):
            for path in sorted(place.glob(pattern)):
                if path.suffix in (".json", ".yaml", ".yml"):
                    found |= dict.fromkeys(_templates_in(_read_config(path)), path)
        if found:
            break
    if len(found) > 1:
        what = "; ".join(f"{path.name}: {text!r}" for text, path in found.items())
        raise CheckpointError(f"{folder} names more than one prompt template: {what}")
    return next(iter(found), None)


def _read_config(path: Path) -> object:
    import yaml  # comes with transformers

    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} is not valid {path.suffix[1:]}: {error}") from error


def _templates_in(value: object) -> Iterable[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in _TEMPLATE_KEYS and isinstance(inner, str):
                yield inner
            else:
                yield from _templates_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _templates_in(inner)
