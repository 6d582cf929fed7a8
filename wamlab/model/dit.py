"""The world action model: one diffusion transformer that denoises video and actions together.

Read top to bottom: sizes, registers, one block, the whole network. A training call takes the clean
latents of a clip and a noisy copy, noisy actions and clean robot states, and predicts the
flow-matching velocity of video and actions:

    patches + registers -> [clean | noisy video, actions, states of each block] -> N blocks -> heads

The mask (`attention`) lets each block of frames and its actions see the clean past and themselves,
so one call trains every block of the clip as if it were generated on its own.

Shapes: B batch, C channels, F latent frames, Y X latent height and width, S video tokens of one
stream, A action tokens, Z state tokens, T all tokens, Q the tokens that leave a block, D width,
H heads, K head width, P = K/2 pairs, G distinct times, I image rows, L text rows.
"""

import dataclasses
from collections import OrderedDict
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wamlab.config import ConfigError
from wamlab.model import attention, reference
from wamlab.model.init import init_dit
from wamlab.model.plan import PUBLIC as PUBLIC
from wamlab.model.plan import SHORTCUTS as SHORTCUTS
from wamlab.model.plan import Cache, ModelOptions, Plan, Plans, exact_times, save_matmuls


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """The network's sizes, under their public names; everything else follows from them."""

    dim: int
    num_heads: int
    num_layers: int
    ffn_dim: int
    out_dim: int = 48  # latent channels
    concat_first_frame_latent: bool = False  # "i2v": a mask and the first frame join the input
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    clip_dim: int = 1280
    action_dim: int = 32
    max_state_dim: int = 64
    hidden_size: int = 1024
    num_frame_per_block: int = 2
    num_action_per_block: int = 24
    num_state_per_block: int = 1
    max_chunk_size: int = 4  # blocks in the window of the clean stream; -1: no window
    eps: float = 1e-6

    @property
    def in_dim(self) -> int:
        """Channels that enter the patch embedding: latents, and for "i2v" 4 mask + first frame."""
        return self.out_dim + (4 + self.out_dim if self.concat_first_frame_latent else 0)

    @property
    def window(self) -> int:
        """Latent frames that a clean block sees, or -1."""
        return -1 if self.max_chunk_size < 0 else self.max_chunk_size * self.num_frame_per_block + 1


MODEL_SIZES: dict[str, DiTConfig] = {
    "tiny": DiTConfig(
        dim=128, num_heads=4, num_layers=4, ffn_dim=512, text_dim=64, clip_dim=64, hidden_size=64
    ),
    "small": DiTConfig(
        dim=512, num_heads=8, num_layers=10, ffn_dim=2048, text_dim=64, clip_dim=64, hidden_size=256
    ),
    "dreamzero-5b": DiTConfig(dim=3072, num_heads=24, num_layers=30, ffn_dim=14336),
    "dreamzero-14b": DiTConfig(
        dim=5120,
        num_heads=40,
        num_layers=40,
        ffn_dim=13824,
        out_dim=16,
        concat_first_frame_latent=True,
    ),
}


class CategoryLinear(nn.Module):
    """A linear map stored as [1, in, out]: publicly one a robot, of which only the first exists."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(1, inputs, outputs))
        self.b = nn.Parameter(torch.empty(1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.W[0].T, self.b[0])


class CategoryMLP(nn.Module):
    """Linear, ReLU, linear: encodes the state, decodes the action."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(inputs, hidden)
        self.layer2 = CategoryLinear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.layer2(F.relu(self.layer1(x)))


class ActionEncoder(nn.Module):
    """Noisy action and its time -> one token."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(action_dim, dim)
        self.W2 = CategoryLinear(2 * dim, dim)
        self.W3 = CategoryLinear(dim, dim)

    def forward(self, action_BAC: Tensor, time_BA: Tensor) -> Tensor:
        """[B, A, action_dim] and times [B, A] -> [B, A, D]."""
        token = self.W1(action_BAC)
        time = reference.action_sinusoid(time_BA, token.shape[-1]).to(token.dtype)
        return self.W3(F.silu(self.W2(torch.cat([token, time], dim=-1))))


class SelfAttention(nn.Module):
    """q, k normalised over the full width and rotated; who sees whom is the plan's matter."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads, self.eps = config.num_heads, config.eps
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps=config.eps) for _ in range(2))

    def forward(self, x_BTD: Tensor, plan: Plan, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, Q, D]."""
        first, turn = plan.first, plan.rotation
        q, k = self.q(x_BTD[:, first:]), self.k(x_BTD)
        turn_q, size = turn[..., first:, :], {"heads": self.heads, "eps": self.eps}
        q = plan.ops.norm_rope(q, self.norm_q.weight, turn_q, **size)
        k = plan.ops.norm_rope(k, self.norm_k.weight, turn, **size)
        v = self.v(x_BTD).unflatten(-1, (self.heads, -1))
        if cache is not None:
            k, v = cache(k, v)
        return self.o(plan.attention(q, k, v).flatten(2))


class CrossAttention(nn.Module):
    """Every token looks at image and prompt, by a softmax each; the two results are added."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads, self.eps = config.num_heads, config.eps
        self.q, self.k, self.v, self.o, self.k_img, self.v_img = (
            nn.Linear(dim, dim) for _ in range(6)
        )
        self.norm_q, self.norm_k, self.norm_k_img = (
            nn.RMSNorm(dim, eps=config.eps) for _ in range(3)
        )

    def forward(self, x_BQD: Tensor, image_BID: Tensor, text_BLD: Tensor, plan: Plan) -> Tensor:
        """[B, Q, D] -> [B, Q, D]."""

        def heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
            x = x if norm is None else plan.ops.rms_norm(x, norm.weight, self.eps)
            return x.unflatten(-1, (self.heads, -1))

        q, bias_L = heads(self.q(x_BQD), self.norm_q), plan.text_bias
        bias = None if bias_L is None else bias_L.to(q.dtype)[None, None, None]
        k_text, v_text = heads(self.k(text_BLD), self.norm_k), heads(self.v(text_BLD))
        k_img, v_img = heads(self.k_img(image_BID), self.norm_k_img), heads(self.v_img(image_BID))
        seen = attention.full(q, k_text, v_text, bias) + attention.full(q, k_img, v_img)
        return self.o(seen.flatten(2))


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward; time modulates the first and the last.

    `recompute` is read in the block's own forward, so that compiling and sharding wrap around it:
    recompute inside, then compile, then `fully_shard`.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.eps = config.eps
        self.recompute: Literal["none", "full", "selective"] = "none"
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))
        self.self_attn = SelfAttention(config)
        self.norm3 = nn.LayerNorm(dim, eps=config.eps)
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(
            nn.Linear(dim, config.ffn_dim), nn.GELU("tanh"), nn.Linear(config.ffn_dim, dim)
        )

    def forward(
        self,
        x_BTD: Tensor,
        time_BG6D: Tensor,
        image_BID: Tensor,
        text_BLD: Tensor,
        *,
        plan: Plan,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run the block: [B, T, D] -> [B, Q, D], Q = T - plan.first."""
        args = (x_BTD, time_BG6D, image_BID, text_BLD, plan, cache)
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.compute(*args)
        extra = {"context_fn": save_matmuls} if self.recompute == "selective" else {}
        return checkpoint(
            self.compute, *args, use_reentrant=False, preserve_rng_state=False, **extra
        )

    def compute(self, x, time_BG6D, image_BID, text_BLD, plan, cache) -> Tensor:
        """Run the block without regard to recompute, which calls this once more."""
        ops, eps, segment, first = plan.ops, self.eps, plan.segment, plan.first
        assert segment is not None or time_BG6D.shape[1] == x.shape[1], "one time row a token"
        rows = (self.modulation + time_BG6D).unbind(2)
        normed = ops.norm_modulate(x, rows[0], rows[1], segment, eps=eps)
        update = self.self_attn(normed, plan, cache)
        if first:
            x = x[:, first:]
            rows = rows if segment is not None else [row[:, first:] for row in rows]
            segment = None if segment is None else segment[first:]
        x = ops.gated_residual(x, update, rows[2], segment)
        x = x + self.cross_attn(self.norm3(x), image_BID, text_BLD, plan)
        hidden = self.ffn[0](ops.norm_modulate(x, rows[3], rows[4], segment, eps=eps))
        return ops.gated_residual(x, self.ffn[2](ops.gelu_tanh(hidden)), rows[5], segment)


class Head(nn.Module):
    """The last norm and the projection of each video token to its 2x2 patch of velocities."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim))
        self.head = nn.Linear(config.dim, 4 * config.out_dim)

    def forward(
        self, x_BSD: Tensor, time_BGD: Tensor, segment_S: Tensor | None, ops: ModuleType
    ) -> Tensor:
        """[B, S, D] -> [B, S, 4C]."""
        shift, scale = (self.modulation + time_BGD[:, :, None]).unbind(2)
        return self.head(ops.norm_modulate(x_BSD, shift, scale, segment_S, eps=self.eps))


class BlockList(nn.ModuleList):
    """The blocks under their public name; trainers call it."""

    def forward(self) -> list[nn.Module]:
        """Return the blocks as a plain list."""
        return list(self)


class WorldActionDiT(nn.Module):
    """The whole network; parameters carry the public names, and there are no buffers.

    Args:
        config: sizes.
        options: how to compute; `set_options` changes them later.
    """

    def __init__(self, config: DiTConfig, options: ModelOptions | None = None) -> None:
        super().__init__()
        dim, hidden, clip = config.dim, config.hidden_size, config.clip_dim
        self.config = config
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, (1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = _mlp(config.text_dim, nn.GELU("tanh"), dim)
        self.time_embedding = _mlp(config.freq_dim, nn.SiLU(), dim)
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        layers = nn.LayerNorm(clip), nn.Linear(clip, clip), nn.GELU(), nn.Linear(clip, dim)
        self.img_emb = nn.Sequential(OrderedDict(proj=nn.Sequential(*layers, nn.LayerNorm(dim))))
        self.action_encoder = ActionEncoder(config.action_dim, dim)
        self.state_encoder = CategoryMLP(config.max_state_dim, hidden, dim)
        self.action_decoder = CategoryMLP(dim, hidden, config.action_dim)
        self.blocks = BlockList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.set_options(options or ModelOptions())
        init_dit(self, silent_image=self.options.zero_init_img_branch)

    def set_options(self, options: ModelOptions) -> None:
        """Change how the network computes; parameters stay as they are."""
        self.options = options
        self._plans = Plans(self.config, options)

    def forward(
        self,
        x: Tensor,
        clean_x: Tensor,
        timestep: Tensor,
        action: Tensor | None,
        timestep_action: Tensor | None,
        state: Tensor | None,
        context: Tensor,
        clip_feature: Tensor,
        y: Tensor | None = None,
        *,
        context_length: Tensor | None = None,
        coupled_times: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities of video and actions.

        Args:
            x: noisy latents [B, C, F, Y, X], F = 1 + blocks * frames per block.
            clean_x: clean latents, same shape.
            timestep: [B, F], 0..1000; fp32 whatever the weights are.
            action: noisy actions [B, A, action_dim]; None for clips without actions.
            timestep_action: [B, A], as `timestep`.
            state: clean states [B, Z, max_state_dim].
            context: prompt embedding [B, up to text_len, text_dim], zero past each prompt.
            clip_feature: image tokens of frame 0 [B, I, clip_dim].
            y: [B, 4+C, F, Y, X], mask and first-frame latent; read with concat_first_frame_latent.
            context_length: int64 [B], rows of each prompt; without it the padding shortcut is off
                (on a GPU, reading it synchronises unless options.longest_prompt is set).
            coupled_times: a promise that the frames and actions of a block share one time.

        Returns:
            Velocity of video [B, C, F, 2*(Y//2), 2*(X//2)] and of actions [B, A, action_dim].

        Raises:
            ConfigError: shapes that do not fit each other or the configuration.
        """
        config, patch, dtype = self.config, self.patch_embedding, self.patch_embedding.weight.dtype
        if action is None:
            action = x.new_zeros(len(x), 0, config.action_dim)
            state = x.new_zeros(len(x), 0, config.max_state_dim)
            timestep_action = timestep[:, :0]
        timestep, timestep_action = exact_times(self.options, timestep, timestep_action)
        plan = self._plans.get(x, action, state, lengths=context_length, coupled=coupled_times)

        if config.concat_first_frame_latent:
            if y is None:
                raise ConfigError("this size is given the first frame: pass y [B, 4+C, F, Y, X]")
            x, clean_x = torch.cat([x, y], 1), torch.cat([clean_x, y], 1)
        x, clean_x = x.to(dtype), clean_x.to(dtype)
        noisy, clean = (plan.ops.patchify(v, patch.weight, patch.bias) for v in (x, clean_x))
        actions = self.action_encoder(action.to(dtype), timestep_action)
        states = self.state_encoder(state.to(dtype))
        tokens = plan.layout.braid(clean, noisy, actions, states)

        time_BGD, time_BG6D = self.embed_times(plan.times(timestep, timestep_action))
        image, text = self.embed_context(clip_feature, context, plan.text_rows)
        for block, block_plan in zip(self.blocks, plan.of_blocks(len(self.blocks)), strict=True):
            tokens = block(tokens, time_BG6D, image, text, plan=block_plan)

        video, action_tokens, _ = plan.layout.unbraid(tokens[:, -plan.tail :])
        patches = self.head(video, *plan.of_video(time_BGD), plan.ops)
        velocity = unpatchify(patches, x.shape[3] // 2, x.shape[4] // 2)
        return velocity, self.action_decoder(action_tokens)

    def embed_times(self, time_BG: Tensor) -> tuple[Tensor, Tensor]:
        """Embed times 0..1000 [B, G]: for the head [B, G, D], for the blocks [B, G, 6, D]."""
        waves = reference.time_sinusoid(time_BG, self.config.freq_dim)
        time_BGD = self.time_embedding(waves.to(self.patch_embedding.weight.dtype))
        return time_BGD, self.time_projection(time_BGD).unflatten(-1, (6, -1))

    def embed_context(
        self, clip_feature: Tensor, context: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Embed image tokens [B, I, clip_dim] and `rows` rows of the prompt, cut or padded."""
        dtype = self.patch_embedding.weight.dtype
        text = F.pad(context[:, :rows], (0, 0, 0, max(rows - context.shape[1], 0)))
        return self.img_emb(clip_feature.to(dtype)), self.text_embedding(text.to(dtype))


def unpatchify(patches_BSE: Tensor, rows: int, cols: int) -> Tensor:
    """[B, F*rows*cols, 4C] -> [B, C, F, 2*rows, 2*cols]; a patch is (row, column, channel)."""
    x = patches_BSE.unflatten(1, (-1, rows, cols)).unflatten(-1, (2, 2, -1))
    return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def _mlp(inputs: int, activation: nn.Module, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), activation, nn.Linear(outputs, outputs))
