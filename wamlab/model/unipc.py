"""UniPC: from noise to a sample in few velocity evaluations.

Order 2, `bh2`, data prediction, corrector on, over the rectified-flow path x = (1-σ) x0 + σ ε.
Source: Zhao et al., "UniPC: A Unified Predictor-Corrector Framework", NeurIPS 2023, in the form
that DreamZero samples with.
"""

import math

from torch import Tensor

from wamlab.model.flow_matching import SHIFT, STEPS


def shifted_sigmas(steps: int, *, last_sigma: float = 0.0) -> list[float]:
    """Return the noise levels σ_0 > ... > σ_steps of a sampling schedule.

    Args:
        steps: number of UniPC steps.
        last_sigma: where the schedule ends; above 0 the levels are mapped affinely from
            [σ_0, 0] to [σ_0, last_sigma], as decoupled inference does for the video.
    """
    levels = [0.999 * (1.0 - i / steps) for i in range(steps)]
    sigmas = [SHIFT * u / (1.0 + (SHIFT - 1.0) * u) for u in levels] + [0.0]
    top = sigmas[0]
    return [top - (top - s) * (top - last_sigma) / top for s in sigmas]


class UniPC:
    """One sampling run over one schedule; `step` is called once a level, in order.

    Args:
        sigmas: noise levels, falling; one more than there are steps.
    """

    def __init__(self, sigmas: list[float]) -> None:
        self.sigmas = sigmas
        self.timesteps = [math.floor(STEPS * s) for s in sigmas[:-1]]
        self._lambdas = [_log_ratio(s) for s in sigmas]
        self._clean: list[Tensor] = []  # m_i, the predicted clean sample of each step so far
        self._corrected: Tensor | None = None
        self._order = 1

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Return the sample at the next level.

        Args:
            x: fp32, the sample at this level, as the last call returned it (first: noise).
            velocity: the model's velocity (noise minus data) at x, same shape.
        """
        i = len(self._clean)
        self._clean.append(x - self.sigmas[i] * velocity)
        if i > 0:
            x = self._correct(i)
        self._corrected = x
        self._order = min(2, i + 1, len(self.timesteps) - i)
        return self._predict(i, x)

    def _predict(self, i: int, x: Tensor) -> Tensor:
        m, lam, sigma = self._clean, self._lambdas, self.sigmas
        h = lam[i + 1] - lam[i]
        pull = (1.0 - sigma[i + 1]) * math.expm1(-h)
        new = (sigma[i + 1] / sigma[i]) * x - pull * m[i]
        if self._order == 2:
            r = (lam[i - 1] - lam[i]) / h
            new = new - pull * 0.5 * (m[i - 1] - m[i]) / r
        return new

    def _correct(self, i: int) -> Tensor:
        m, lam, sigma = self._clean, self._lambdas, self.sigmas
        h = lam[i] - lam[i - 1]
        phi = math.expm1(-h)
        change = m[i] - m[i - 1]
        if self._order == 1:
            slope = 0.5 * change
        else:
            r = (lam[i - 2] - lam[i - 1]) / h
            k = phi / -h - 1.0
            b1, b2 = k / phi, 2.0 * (k / -h - 0.5) / phi
            rho1 = (b1 - b2) / (1.0 - r)
            slope = rho1 * (m[i - 2] - m[i - 1]) / r + (b1 - rho1) * change
        pull = (1.0 - sigma[i]) * phi
        return (sigma[i] / sigma[i - 1]) * self._corrected - pull * (m[i - 1] + slope)


def _log_ratio(sigma: float) -> float:
    return math.inf if sigma == 0.0 else math.log((1.0 - sigma) / sigma)
