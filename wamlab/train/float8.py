"""The blocks' large matrix products in float8, by torchao."""

import dataclasses
from collections.abc import Iterable

from torch import nn

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

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, pad_inner_dim=True, emulate=emulate)
    for block in blocks:
        convert_to_float8_training(
            block,
            config=config,
            module_filter_fn=lambda module, name: (
                name in LARGE and module.in_features % 16 == 0 and module.out_features % 16 == 0
            ),
        )
