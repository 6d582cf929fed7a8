"""A behaviour cloner in plain PyTorch: one picture and a state in, the next actions out.

It knows nothing of wamlab; bring_your_own.py beside it shows how such a model is brought in.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate


class Cloner(nn.Module):
    """A small transformer over the picture's patches and one token of state.

    Args:
        width: of a token.
        depth: transformer layers.
        horizon: actions that are predicted.
        state_width, action_width: channels of a state and of an action.
    """

    def __init__(
        self,
        width: int = 192,
        depth: int = 4,
        horizon: int = 24,
        state_width: int = 64,
        action_width: int = 32,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.places = nn.Parameter(torch.randn(1 + 8 * 16, width) * 0.02)
        self.state = nn.Linear(state_width, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.actions = nn.Linear(width, horizon * action_width)
        self.action_width = action_width

    def forward(self, pictures: Tensor, states: Tensor) -> Tensor:
        """Predict actions [N, horizon, action_width] from pictures [N, 3, H, W] in 0..1."""
        small = interpolate(pictures, (128, 256), mode="bilinear", align_corners=False)
        tokens = self.patches(small).flatten(2).transpose(1, 2)
        x = torch.cat([self.state(states)[:, None], tokens], dim=1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.actions(x[:, 0]).unflatten(-1, (-1, self.action_width))
