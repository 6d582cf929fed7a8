"""The blocks' large matrix products in float8, by torchao."""

import dataclasses
from collections.abc import Iterable

from torch import nn

from wamlab.config import ConfigError

# those that run over the tokens of the sequence; keys and values of prompt and image are few
LARGE = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
         "cross_attn.q", "cross_attn.o", "ffn.0", "ffn.2")  # fmt: skip


def convert(blocks: Iterable[nn.Module], recipe: str, *, emulate: bool = False) -> None:
    """Replace the large linears of each block by torchao's, in place; parameters keep their names.

    Weights stay in their dtype and are rounded in every forward. Products whose inner length is no
    multiple of 16 are padded, as float8 kernels ask.

    Args:
        blocks: of the DiT, not yet compiled or sharded.
        recipe: "tensorwise" (one scale a tensor) or "rowwise" (one a row).
        emulate: round to float8 and multiply in the original dtype, on any device.

    Raises:
        ConfigError: torchao is missing, a block lacks one of the large linears, or a kernel could
            not take its widths: what stays in bf16 would be measured as float8.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("float8 needs torchao: pip install torchao") from error

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, pad_inner_dim=True, emulate=emulate)
    for block in blocks:
        check_widths(block)
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda module, name: name in LARGE
        )


def check_widths(block: nn.Module) -> None:
    """Refuse a block whose large linears are not all there in multiples of 16, see `convert`."""
    found = {name: module for name, module in block.named_modules() if name in LARGE}
    if missing := [name for name in LARGE if name not in found]:
        raise ConfigError(
            f"float8 is for the DiT's blocks: {type(block).__name__} has no {', '.join(missing)}"
        )
    for name, module in found.items():
        if module.in_features % 16 or module.out_features % 16:
            raise ConfigError(
                f"float8 needs widths that are multiples of 16, {name} maps {module.in_features} "
                f"to {module.out_features}"
            )
