"""The frozen UMT5 text encoder: cleaning, tokens, embeddings that are zero past the prompt.

Shapes: B prompts, L token positions, D the encoder's width.
"""

import dataclasses
import hashlib
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ftfy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wamlab.config import ConfigError
from wamlab.model.frozen import Part, fingerprint, freeze, load_frozen, seeded, sizes_of

PREFIX = "action_head.text_encoder."
_PROBE = ("Pick up the red cup & put it down.", "schön, 12.5 cm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The sizes of a UMT5 encoder, and its tokenizer: a Hugging Face name, a folder, or "bytes"."""

    vocab: int
    dim: int
    heads: int
    head_dim: int
    ffn_dim: int
    layers: int
    tokenizer: str
    text_len: int = 512
    buckets: int = 32
    max_distance: int = 128


TEXT_SIZES: dict[str, TextConfig] = {
    "umt5-xxl": TextConfig(
        vocab=256384,
        dim=4096,
        heads=64,
        head_dim=64,
        ffn_dim=10240,
        layers=24,
        tokenizer="google/umt5-xxl",
    ),
    "tiny": TextConfig(
        vocab=384, dim=64, heads=4, head_dim=16, ffn_dim=128, layers=2, tokenizer="bytes"
    ),
}


def clean(text: str) -> str:
    """Return a prompt as the tokenizer must see it: repaired, unescaped, single spaces."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split())


class TextEncoder(nn.Module):
    """A frozen UMT5 encoder with its tokenizer.

    Args:
        size: a name in TEXT_SIZES, or a TextConfig.
        weights: a public checkpoint (stand-alone, or a full policy's); None = random ones.
        seed: of the random weights.
        tokenizer: instead of the config's: a Hugging Face name, a folder, "bytes", or an object
            with the Hugging Face call. Random weights know no words: for them "bytes" is taken.
        device: where the weights go.
        dtype: their dtype; embeddings are bf16 whatever it is.

    Source: UMT5 (arXiv 2304.09151); public keys of models_t5_umt5-xxl-enc-bf16.pth.
    """

    def __init__(
        self,
        size: str | TextConfig = "tiny",
        weights: str | Path | None = None,
        *,
        seed: int = 0,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config = sizes_of(TEXT_SIZES, size, "text encoder size")
        self.fingerprint = text_fingerprint(config, weights, seed)
        self._tokenizer = tokenizer or (config.tokenizer if weights else "bytes")
        with seeded(seed), torch.device("meta" if weights else device):
            self.network = _build(config)
        if weights:
            load_frozen(
                self.network,
                weights,
                _parts(self.network),
                prefix=PREFIX,
                unused=lambda name: False,
                dtype=dtype,
                device=device,
            )
        self.network.to(dtype)
        freeze(self)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, fetched at the first use."""
        if isinstance(self._tokenizer, str):
            self._tokenizer = build_tokenizer(self._tokenizer)
        return self._tokenizer

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden states [B, L, D] of tokens int64 [B, L] under a mask [B, L]."""
        return self.network(input_ids=ids, attention_mask=mask).last_hidden_state

    def tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids int64 [B, text_len] and mask int64 [B, text_len] of cleaned prompts."""
        out = self.tokenizer(
            [clean(prompt) for prompt in prompts],
            padding="max_length",
            truncation=True,
            max_length=self.config.text_len,
            add_special_tokens=True,
            return_tensors="pt",
        )
        return out["input_ids"], out["attention_mask"]

    @torch.no_grad()
    def encode(
        self,
        prompts: Sequence[str],
        *,
        crop: bool = True,
        zero_from: Literal["sample", "batch"] = "sample",
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of prompts, zero past each prompt's end.

        Args:
            prompts: the full prompt texts.
            crop: leave out positions that are padding in every prompt; exact, masked as they are.
            zero_from: "sample" zeroes past each prompt's own end; "batch" past the shortest one's,
                as the public code does (tokens of longer prompts are lost).

        Returns:
            bf16 [B, text_len, D], and the valid lengths int64 [B] on the CPU, where reading them
            makes no GPU wait.
        """
        return self.embed(*self.tokens(prompts), crop=crop, zero_from=zero_from)

    @torch.no_grad()
    def embed(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        crop: bool = True,
        zero_from: Literal["sample", "batch"] = "sample",
    ) -> tuple[Tensor, Tensor]:
        """As `encode`, from tokens int64 [B, L] and their mask [B, L] on the CPU."""
        device = next(self.network.parameters()).device
        length_B = mask.sum(1)
        longest = int(length_B.max()) if crop else mask.shape[1]
        hidden = self(ids[:, :longest].to(device), mask[:, :longest].to(device))
        valid_B = length_B if zero_from == "sample" else length_B.min().expand_as(length_B)
        keep = torch.arange(longest)[None] < valid_B[:, None]
        hidden = hidden.to(torch.bfloat16) * keep[..., None].to(device)
        return F.pad(hidden, (0, 0, 0, mask.shape[1] - longest)), valid_B


def build_tokenizer(name: str) -> Any:
    """Return a tokenizer by its Hugging Face name or folder; "bytes" needs no file.

    Raises:
        ConfigError: no such tokenizer.
    """
    from transformers import AutoTokenizer, ByT5Tokenizer  # 2 s to import: only where text is read

    if name == "bytes":
        return ByT5Tokenizer()
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer {name!r} is neither a folder here nor readable from the hub: {error}"
        ) from error


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 16 hexadecimal digits that change with what a tokenizer makes of a text."""
    probe = [tokenizer(text)["input_ids"] for text in _PROBE]
    return hashlib.sha256(repr((len(tokenizer), probe)).encode()).hexdigest()[:16]


def text_fingerprint(size: str | TextConfig, weights: str | Path | None, seed: int = 0) -> str:
    """Return the fingerprint of a text encoder without building it, see `frozen.fingerprint`."""
    config = sizes_of(TEXT_SIZES, size, "text encoder size")
    return fingerprint("text", config, seed=seed, weights=weights, prefix=PREFIX)


def _build(config: TextConfig) -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=config.vocab,
            d_model=config.dim,
            d_kv=config.head_dim,
            d_ff=config.ffn_dim,
            num_layers=config.layers,
            num_heads=config.heads,
            relative_attention_num_buckets=config.buckets,
            relative_attention_max_distance=config.max_distance,
            feed_forward_proj="gated-gelu",
            layer_norm_epsilon=1e-6,
            dropout_rate=0.0,
        )
    )


def _parts(network: nn.Module) -> dict[str, Part]:
    """Map transformers' names to the public ones; the tied embedding has two of the former."""
    inner = {
        "layer.0.layer_norm": "norm1",
        "layer.1.layer_norm": "norm2",
        "layer.0.SelfAttention.q": "attn.q",
        "layer.0.SelfAttention.k": "attn.k",
        "layer.0.SelfAttention.v": "attn.v",
        "layer.0.SelfAttention.o": "attn.o",
        "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
        "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
        "layer.1.DenseReluDense.wi_1": "ffn.fc1",
        "layer.1.DenseReluDense.wo": "ffn.fc2",
    }
    outer = {
        "shared": "token_embedding",
        "encoder.embed_tokens": "token_embedding",
        "encoder.final_layer_norm": "norm",
    }

    def public(name: str) -> str:
        stem = name.removesuffix(".weight")
        if stem in outer:
            return f"{outer[stem]}.weight"
        _, _, index, rest = stem.split(".", 3)
        return f"blocks.{index}.{inner[rest]}.weight"

    return {name: Part(name=public(name)) for name in network.state_dict()}
