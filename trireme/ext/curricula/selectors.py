"""Selectors: give rows by their difficulty, fixed beforehand or learned from pass rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MISJUDGED = 0.25
"""Mean error of the interpolation at which `adaptive_rho` halves its weight."""


def offline_easy2hard(
    rows: int, epoch: int, seed: int, *, features: Sequence[Sequence[float]]
) -> Sequence[int]:
    """Return the highest features (pass rates, for example) first, the first column before the
    second; of equal rows the later one first.
    """
    return sorted(range(rows), key=lambda row: (*features[row], row), reverse=True)


class DifficultyBased:
    """Draws rows by softmax(-|target_reward - expected pass rate| / tau); tau 0: the best ones.

    Each row has a Beta(a, b) belief about its pass rate. Two columns of the data set hold pass
    rates of two reference models, a weak and a strong one; the model's position between the two on
    the rows just tried predicts its rate on all others (BOTS, arXiv:2510.26374).

    After a step, with p the pass rates of the rows tried (p~ elsewhere: interpolated),

        a' = (1 - lamb) a + lamb + (1 - rho) m p [tried] + rho m p~
        b' = (1 - lamb) b + lamb + (1 - rho) m (1 - p) [tried] + rho m (1 - p~)

    where p~ = clip(weak + c (strong - weak), 0, 1), and c is the moving average of the model's
    standing (mean p - mean weak) / (mean strong - mean weak).
    """

    def __init__(
        self,
        rows: int,
        seed: int,
        features: Sequence[Sequence[float]],
        *,
        m: int = 16,
        lamb: float = 0.2,
        rho: float = 0.2,
        adaptive_rho: bool = False,
        target_reward: float = 1.0,
        tau: float = 1.0,
        do_sample: bool = False,
        cap_coef_update_discount: float = 0.9,
    ) -> None:
        """`m` is the weight of one step's pass rate in rollouts, `lamb` the rate of forgetting old
        ones, `rho` the weight of the interpolation. `do_sample` draws each expected rate from its
        belief. Raises ValueError for features that are not two pass rates.
        """
        import numpy as np

        if rows and len(features[0]) != 2:
            raise ValueError(
                f"data_selector 'difficulty_based' got {len(features[0])} feature_keys: expected "
                "two, the pass rates of a weak and of a strong model"
            )
        for name, value in (("lamb", lamb), ("rho", rho)):
            if not 0 <= value <= 1:
                raise ValueError(
                    f"data_selector 'difficulty_based': {name} is {value}: expected 0 to 1"
                )
        if tau < 0 or m <= 0:
            raise ValueError(
                f"data_selector 'difficulty_based': tau is {tau} and m {m}: expected tau at least "
                "0 and m above 0"
            )
        self._weak, self._strong = np.array(features, dtype=float).T
        self._seed, self._m, self._lamb, self._rho = seed, m, lamb, rho
        self._adaptive_rho, self._do_sample = adaptive_rho, do_sample
        self._target, self._tau, self._discount = target_reward, tau, cap_coef_update_discount
        self._alphas, self._betas = np.ones(rows), np.ones(rows)
        self._standing: float | None = None
        self._draws = 0

    def select(self, count: int) -> list[int]:
        """Choose rows by difficulty. No row occurs twice unless more are requested than exist."""
        import numpy as np

        generator = np.random.default_rng([self._seed, self._draws])
        self._draws += 1
        means = self._alphas / (self._alphas + self._betas)
        rates = generator.beta(self._alphas, self._betas) if self._do_sample else means
        scores = -np.abs(self._target - rates)
        if self._tau > 0:  # the largest scores with Gumbel noise are samples of their softmax
            scores = scores / self._tau + generator.gumbel(size=len(scores))
        best = np.argsort(-scores, kind="stable")
        return [int(row) for row in np.resize(best, count)]

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """Update the estimates with the pass rates of rows that were tried."""
        import numpy as np

        if not pass_rates:
            return
        tried = np.array(list(pass_rates))
        rates = np.array([float(rate) for rate in pass_rates.values()])
        self._stand(float(rates.mean()), self._weak[tried].mean(), self._strong[tried].mean())
        standing = 0.5 if self._standing is None else self._standing
        expected = np.clip(self._weak + standing * (self._strong - self._weak), 0, 1)
        if self._adaptive_rho and np.abs(expected[tried] - rates).mean() >= _MISJUDGED:
            self._rho *= 0.5
        expected[tried] = rates
        seen = np.zeros(len(expected))
        seen[tried] = 1 - self._rho
        weight = (seen + self._rho) * self._m
        self._alphas = (1 - self._lamb) * self._alphas + self._lamb + weight * expected
        self._betas = (1 - self._lamb) * self._betas + self._lamb + weight * (1 - expected)

    def _stand(self, rate: float, weak: float, strong: float) -> None:
        """Update the model's rating. Rows that both references solve equally do not change it."""
        if abs(strong - weak) < 1e-6:
            return
        standing = float((rate - weak) / (strong - weak))
        if self._standing is not None:
            standing = self._discount * self._standing + (1 - self._discount) * standing
        self._standing = standing

    def state(self) -> dict[str, Any]:
        """Return the draws so far and the estimates."""
        return {
            "draws": self._draws,
            "rho": self._rho,
            "standing": self._standing,
            "alphas": self._alphas.tolist(),
            "betas": self._betas.tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore draws and estimates. Raises ValueError for a state of other rows."""
        import numpy as np

        if len(state["alphas"]) != len(self._alphas):
            raise ValueError(
                f"data_selector 'difficulty_based': the checkpoint knows {len(state['alphas'])} "
                f"rows and the taskset has {len(self._alphas)}: it has changed"
            )
        self._draws, self._rho = int(state["draws"]), float(state["rho"])
        self._standing = state["standing"]
        self._alphas, self._betas = np.array(state["alphas"]), np.array(state["betas"])
