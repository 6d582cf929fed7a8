"""`wamlab converge`: the same learning in less time, shown on the toy world.

One model is trained from the same seeds, on the same samples with the same noise, by `official` and
by the optimised configuration; both read latents and prompts that were encoded beforehand. Every so
many steps the clock is stopped and the model acts. What comes out is one record of scope
`closed_loop` a seed and a configuration: losses, success over training seconds, the seconds to
80 %, and the success of the trained model over many episodes. Seeds may be run on different days:
records are appended, and each names its seed.
"""

import argparse
import dataclasses
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from wamlab.config import (
    ConfigError,
    config_hash,
    find_recipe,
    from_dict,
    load_json,
    natural,
    positive_int,
    replace,
    save_json,
    to_dict,
)
from wamlab.data.corpus import Corpus, CorpusLoader
from wamlab.data.toy_play import ToyPlayConfig
from wamlab.dist import device as pick_device
from wamlab.dist import print0
from wamlab.evaluate.closed_loop import (
    ClosedLoopConfig,
    ClosedLoopResult,
    closed_loop,
    worker_pool,
)
from wamlab.evaluate.load import ACTING, Acting, prepare_to_act
from wamlab.evaluate.policy import ModelPolicy, PolicyConfig
from wamlab.evaluate.toy_corpus import make_corpus
from wamlab.measure import Record, append_jsonl, read_records, stamp, synchronize
from wamlab.model.dit import WorldActionDiT
from wamlab.model.frozen import seeded
from wamlab.model.wam import WorldActionModel, latent_meta
from wamlab.train.build import build_model, export
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.trainer import Trainer

GOAL = 0.8  # the success rate whose time is the headline
LOOK_SEED, LAST_SEED = 1_000_000, 2_000_000  # tables of the looks, and of the final evaluation
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "wamlab" / "evaluate" / "recipes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvergeConfig:
    """The proof: what is played, trained and evaluated.

    Args:
        name: of the recipe.
        play: the training data.
        train: the optimised run; its steps, batch and learning rate are those of `official` too.
            `train.data` is not read.
        official: what the official run is given; the public code, too, sets the samples that a
            device computes at once.
        policy: how the model acts.
        execute: steps of a chunk carried out before the next.
        evaluate_every: optimizer steps between two looks at the success rate.
        evaluate_episodes: of such a look; the episodes are the same every time.
        episodes: of the trained model, other ones.
        max_steps: control steps an episode may take.
        workers: processes that play and draw.
    """

    name: str
    play: ToyPlayConfig = dataclasses.field(default_factory=ToyPlayConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    official: tuple[str | dict[str, Any], ...] = ()
    policy: PolicyConfig = dataclasses.field(default_factory=lambda: PolicyConfig(context_chunks=1))
    execute: int | None = None
    evaluate_every: int = 200
    evaluate_episodes: int = 50
    episodes: int = 200
    max_steps: int = 200
    workers: int = 1

    def __post_init__(self) -> None:
        if self.train.model is None:
            raise ConfigError("a convergence run needs `train.model`")
        if self.evaluate_every < 1:
            raise ConfigError(f"evaluate_every must be 1 or more, got {self.evaluate_every}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab converge`."""
    known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.json")))
    parser.add_argument("run", help=f"a ConvergeConfig as JSON, or one of {known}")
    parser.add_argument(
        "--seeds", type=natural, nargs="+", default=[0], help="one run each (default 0)"
    )
    parser.add_argument(
        "--only", choices=("official", "optimised"), help="one of the two, as on another day"
    )
    parser.add_argument("--steps", type=positive_int, help="optimizer steps")
    parser.add_argument("--workers", type=positive_int, help="processes that play and draw")
    parser.add_argument("--out", type=Path, default=Path("runs/converge"), help="folder of results")


def run(args: argparse.Namespace) -> int:
    """Train and evaluate each seed twice; print a line a run and append its record."""
    config = load_recipe(args.run)
    changes = {"train.steps": args.steps, "workers": args.workers}
    config = replace(config, {k: v for k, v in changes.items() if v is not None})
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for which in ("official", "optimised"):
            if args.only in (None, which):
                record = converge(config, seed=seed, which=which, out=args.out)
                print0(line(record))
    return 0


def load_recipe(name: str) -> ConvergeConfig:
    """Return a recipe by its name or its file; weights of the repository are found from anywhere.

    Args:
        name: of a file in wamlab/evaluate/recipes, or the path of another one.
    """
    config = load_json(ConvergeConfig, find_recipe(RECIPES, name))
    weights = config.train.model.vae_weights
    if weights and not Path(weights).exists() and (ROOT / weights).exists():
        config = replace(config, {"train.model.vae_weights": str(ROOT / weights)})
    return config


def converge(config: ConvergeConfig, *, seed: int, which: str, out: Path) -> Record:
    """Train one seed one way, look at its success on the way, and append its record.

    Args:
        config: the proof.
        seed: of the training run: initial weights, order of samples, noise.
        which: "official" or "optimised".
        out: folder of corpora, runs and records; a run whose record is there is not repeated.

    Returns:
        The record, also appended to `out`/records.jsonl.
    """
    train = replace(config.train, name=which, seed=seed, out=None, data=None, warmup_steps=0)
    if which == "official":
        train = replace(train, optimizations=config.official)
    key = config_hash([to_dict(config), seed, which])
    kept = _kept(out, key)
    if kept:
        return kept
    device = pick_device(train.device)
    with training_group(device, train.timeout_s):
        corpus = open_corpus(config, device, out).to(device)
        result = _train(config, train, corpus, device=device, folder=out / f"{which}_{seed}")
    record = stamp(replace(result, {"data": "toy corpus", "encoders": "cached"}))
    record = replace(record, extra=record.extra | {"seed": seed, "recipe": config.name, "key": key})
    append_jsonl(out / "records.jsonl", [record])
    return record


def target(values: Mapping[str, Any]) -> Record:
    """Run `converge` as the target of `launch`.

    Args:
        values: `config` as JSON, `seed`, `which`, `out`.
    """
    config = from_dict(ConvergeConfig, values["config"])
    out = Path(values["out"])
    return converge(config, seed=values["seed"], which=values["which"], out=out)


def _kept(out: Path, key: str) -> Record | None:
    if not (out / "records.jsonl").is_file():
        return None
    found = [r for r in read_records(out / "records.jsonl") if r.extra.get("key") == key]
    return found[-1] if found else None


def open_corpus(config: ConvergeConfig, device: torch.device, out: Path) -> Corpus:
    """Return the training data, made on the first use; every seed trains on the same."""
    with device:
        model = WorldActionModel(config.train.model, dit_device="meta")
    for option in ("batched_encoders", "skip_unused_y"):
        model.set_option(option, True)
    made_from = {"play": to_dict(config.play), "encoders": latent_meta(model.config)}
    folder = out / f"corpus_{config_hash(made_from)}"
    if not (folder / "corpus.json").is_file():
        batch = 64 if device.type == "cuda" else 16
        make_corpus(model, config.play, workers=config.workers, batch=batch).save(folder)
    return Corpus.load(folder)


def _train(
    config: ConvergeConfig,
    train: TrainConfig,
    corpus: Corpus,
    *,
    device: torch.device,
    folder: Path,
) -> Record:
    start = time.perf_counter()
    trainer = Trainer(train, _fresh(train, device), partial(_load, corpus))
    synchronize(device)
    built_s = time.perf_counter() - start
    looker = _Looker(config, trainer, corpus)
    curve, first_step_s = _learn(config, trainer, looker, built_s)
    result = looker.look(final=True)
    looker.close()
    _save(trainer, looker.policy, config, folder)
    reached = [point["train_s"] for point in curve if point["success_rate"] >= GOAL]
    return Record(
        name=train.name,
        scope="closed_loop",
        model=train.model.size,
        layers=train.model.layers,
        device=device.type,
        world_size=1,
        micro_batch=trainer.micro_batch,
        precision=train.precision,
        global_batch=train.global_batch,
        optimizations=tuple(o.name for o in trainer.optimizations),
        first_step_s=first_step_s,
        losses=tuple(r.loss for r in trainer.log.records),
        extra={
            **result.to_json(),
            "parameters": sum(p.numel() for p in trainer.stepper.parameters.values()),
            "curve": curve,
            "train_s": curve[-1]["train_s"],
            "seconds_to_80": reached[0] if reached else None,
        },
    )


def _fresh(train: TrainConfig, device: torch.device) -> WorldActionModel:
    """Return the model with a DiT of the run's seed; the encoders stay those of the corpus."""
    model = build_model(train, device)
    with seeded(train.seed), device:
        model.dit = WorldActionDiT(model.dit.config, model.dit.options)
    return model


def _learn(
    config: ConvergeConfig, trainer: Trainer, looker: "_Looker", built_s: float
) -> tuple[list[dict[str, Any]], float]:
    """Train to the end; return the success rate over training seconds, and the first step's."""
    curve: list[dict[str, Any]] = []
    train, spent, first_step_s, start = trainer.config, built_s, 0.0, time.perf_counter()
    while trainer.step_count < train.steps:
        trainer.step()
        done = trainer.step_count
        if done == 1:
            synchronize(trainer.device)
            first_step_s = time.perf_counter() - start
        if done % config.evaluate_every and done < train.steps:
            continue
        synchronize(trainer.device)
        spent += time.perf_counter() - start
        trainer.log.flush()
        point = {"step": done, "train_s": spent, **looker.look().to_json()}
        curve.append(point)
        where = f"{train.name} seed {train.seed} step {done}, {spent:.0f} s"
        print0(f"{where}: loss {trainer.log.records[-1].loss:.4f}, {point['success_rate']:.0%}")
        trainer.log.restart()
        start = time.perf_counter()
    trainer.loader.close()
    return curve, first_step_s


def _load(corpus: Corpus, data: None, *, device: torch.device, **how: Any) -> CorpusLoader:
    return CorpusLoader(corpus, **how)


class _Looker:
    """Lets the model act as it now is; its own copy of the weights, so that training sees nothing
    of it."""

    def __init__(self, config: ConvergeConfig, trainer: Trainer, corpus: Corpus) -> None:
        self.config, self.trainer = config, trainer
        with trainer.device:
            model = WorldActionModel(trainer.config.model)
        prepare_to_act(model, trainer.device.type == "cuda" and trainer.config.precision == "bf16")
        self.policy = ModelPolicy(model, corpus.codec, config.policy)
        self.pool = worker_pool(config.workers) if config.workers > 1 else None

    @torch.no_grad()
    def look(self, *, final: bool = False) -> ClosedLoopResult:
        """Play with the weights of this moment; at the end other and more episodes."""
        parameters = dict(self.policy.model.named_parameters())
        for name, trained in self.trainer.stepper.parameters.items():
            whole = trained.full_tensor() if isinstance(trained, DTensor) else trained
            parameters[name].copy_(whole)
        config = self.config
        episodes = config.episodes if final else config.evaluate_episodes
        play = ClosedLoopConfig(
            world=config.play.world,
            episodes=episodes,
            seed=LAST_SEED if final else LOOK_SEED,
            batch=min(episodes, 100),
            max_steps=config.max_steps,
            execute=config.execute,
        )
        return closed_loop(self.policy, play, pool=self.pool)

    def close(self) -> None:
        """End the processes that play."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()


def _save(trainer: Trainer, policy: ModelPolicy, config: ConvergeConfig, folder: Path) -> None:
    """Leave a run's folder that `wamlab evaluate` and `wamlab serve` take."""
    shutil.rmtree(folder, ignore_errors=True)
    export(trainer.model, folder / "weights")
    codec = policy.codec
    acting = Acting(
        embodiment=codec.embodiment.name,
        blocks=codec.embodiment.blocks,
        statistics=codec.to_json(),
        policy=config.policy,
        execute=config.execute,
        world=config.play.world,
    )
    save_json(acting, folder / ACTING)
    append_jsonl(folder / "steps.jsonl", trainer.log.records)
    save_json(trainer.config, folder / "run.json")


def line(record: Record) -> str:
    """Return one line that says how a run went."""
    extra = record.extra
    reached = extra["seconds_to_80"]
    return (
        f"{record.name:<10} seed {extra['seed']}  success {extra['success_rate']:.1%} "
        f"({extra['success_low']:.1%} to {extra['success_high']:.1%}) of {extra['episodes']}  "
        f"trained {extra['train_s']:.0f} s  "
        + (f"80 % after {reached:.0f} s" if reached is not None else "80 % not reached")
    )
