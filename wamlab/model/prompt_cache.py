"""Prompt embeddings that are computed once: kept in memory, or in one safetensors file.

A file holds, for each distinct prompt, the valid rows of its embedding in bf16 under a hash of the
prompt; its metadata hold the fingerprints of the encoder and the tokenizer. Training that reads a
file needs neither of the two.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wamlab.config import UserError
from wamlab.model.frozen import sizes_of
from wamlab.model.text import (
    TEXT_SIZES,
    TextConfig,
    TextEncoder,
    clean,
    text_fingerprint,
    tokenizer_fingerprint,
)

FORMAT = "wamlab-prompts-1"
FLUSH = 256  # prompts between two writes of a long build


class PromptCacheError(UserError):
    """A prompt cache of another encoder, a broken one, or a prompt that it lacks."""


def prompt_key(prompt: str) -> str:
    """Return the name of a prompt in a cache: a hash of its cleaned text."""
    return hashlib.sha256(clean(prompt).encode()).hexdigest()[:32]


class PromptCache:
    """Embeddings by prompt.

    Args:
        meta: what the file's metadata must hold, see `encoder_meta`.
        path: a file to read from; None starts empty.

    Raises:
        PromptCacheError: the file is missing, broken or of another encoder.
    """

    def __init__(self, meta: dict[str, str], path: str | Path | None = None) -> None:
        self.meta = meta
        self.path = path
        self._rows: dict[str, Tensor] = {}
        self._file = None
        self._keys: frozenset[str] = frozenset()
        if path is not None:
            self._file = _open(Path(path), meta)
            self._keys = frozenset(self._file.keys())

    def __contains__(self, prompt: str) -> bool:
        key = prompt_key(prompt)
        return key in self._rows or key in self._keys

    def __len__(self) -> int:
        return len(self._keys | self._rows.keys())

    def rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (key, valid rows bf16 [n, D]) of every prompt."""
        for key in self._keys - self._rows.keys():
            yield key, self._file.get_tensor(key)
        yield from self._rows.items()

    def add(self, prompts: Sequence[str], embedding_BLD: Tensor, length_B: Tensor) -> None:
        """Keep the valid rows of encoded prompts, see `TextEncoder.encode`."""
        for prompt, rows, length in zip(prompts, embedding_BLD, length_B.tolist(), strict=True):
            self._rows[prompt_key(prompt)] = rows[:length].to("cpu", torch.bfloat16, copy=True)

    def lookup(self, prompts: Sequence[str], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return embeddings as `TextEncoder.encode` does, on `device`.

        Raises:
            PromptCacheError: a prompt is not in the cache.
        """
        rows = [self._get(prompt) for prompt in prompts]
        padded = pad_sequence(rows, batch_first=True).to(device, non_blocking=True)
        length_B = torch.tensor([len(r) for r in rows])
        missing = int(self.meta["text_len"]) - padded.shape[1]
        return F.pad(padded, (0, 0, 0, missing)), length_B

    def _get(self, prompt: str) -> Tensor:
        key = prompt_key(prompt)
        if key in self._rows:
            return self._rows[key]
        if key in self._keys:
            return self._file.get_tensor(key)
        where = f"prompt cache {self.path}" if self.path else "the prompt cache"
        raise PromptCacheError(
            f"{where} lacks the prompt {prompt[:120]!r}; add it with `wamlab encode-prompts`"
        )

    def save(self, path: str | Path) -> None:
        """Write every row to one file, which appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        tensors = {key: rows.contiguous() for key, rows in self.rows()}
        save_file(tensors, partial, metadata={"format": FORMAT, **self.meta})
        partial.replace(path)


def encoder_meta(
    size: str | TextConfig, weights: str | Path | None, seed: int = 0
) -> dict[str, str]:
    """Return what a cache must say of the text encoder, without building it."""
    config = sizes_of(TEXT_SIZES, size, "text encoder size")
    return {
        "encoder": text_fingerprint(config, weights, seed),
        "text_len": str(config.text_len),
        "dim": str(config.dim),
    }


def _open(path: Path, meta: dict[str, str]) -> safe_open:
    if not path.is_file():
        raise PromptCacheError(
            f"no such prompt cache: {path}; make it with `wamlab encode-prompts`"
        )
    try:
        file = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise PromptCacheError(f"{path} is no whole safetensors file: {error}") from error
    found = file.metadata() or {}
    if found.get("format") != FORMAT:
        raise PromptCacheError(f"{path} is not a prompt cache ({FORMAT}): {sorted(found)}")
    for name, value in meta.items():
        if found.get(name) != value:
            raise PromptCacheError(
                f"{path} was made by another text encoder: its {name} is {found.get(name)}, "
                f"wanted is {value}; encode the prompts again into another file"
            )
    return file


def cache_meta(encoder: TextEncoder) -> dict[str, str]:
    """Return the metadata of a cache made by this encoder and its tokenizer."""
    return {
        "encoder": encoder.fingerprint,
        "text_len": str(encoder.config.text_len),
        "dim": str(encoder.config.dim),
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
    }


@torch.no_grad()
def build_prompt_cache(
    path: str | Path,
    prompts: Iterable[str],
    encoder: TextEncoder,
    *,
    batch: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PromptCache:
    """Encode each distinct prompt that the file lacks, and write the file.

    After every 256 prompts, and when it is interrupted, what is done is written to a folder
    beside the file; the next call continues from there.

    Args:
        path: the cache, new or to be extended.
        prompts: full prompt texts; repetitions cost nothing.
        encoder: the text encoder, on the device it shall use.
        batch: prompts encoded at once, of similar length.
        progress: called with (prompts done, prompts to do).

    Raises:
        PromptCacheError: the file, or the folder of an interrupted build, is of another encoder.
    """
    path, meta = Path(path), cache_meta(encoder)
    parts = path.with_name(path.name + ".parts")
    done = [
        PromptCache(meta, p) for p in [path, *sorted(parts.glob("*.safetensors"))] if p.exists()
    ]
    distinct = {prompt_key(p): p for p in prompts}
    todo = [p for p in distinct.values() if not any(p in cache for cache in done)]
    todo.sort(key=len)
    for start in range(0, len(todo), FLUSH):
        part = PromptCache(meta)
        try:
            for at in range(start, min(start + FLUSH, len(todo)), batch):
                some = todo[at : min(at + batch, start + FLUSH)]
                part.add(some, *encoder.encode(some))
                progress(at + len(some), len(todo))
        finally:
            if len(part):
                part.save(parts / f"{len(list(parts.glob('*.safetensors'))):05d}.safetensors")
        done.append(part)
    whole = PromptCache(meta)
    whole._rows = {key: rows for cache in done for key, rows in cache.rows()}
    whole.save(path)
    shutil.rmtree(parts, ignore_errors=True)
    return PromptCache(meta, path)
