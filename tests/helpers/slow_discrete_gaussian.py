"""Discrete Gaussian samples by the exact algorithm of the literature, in plain Python integers.

[CKS20] Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy",
Algorithms 1 to 3 (arXiv:2004.00010). It shares no code and no idea with the fast sampler.
"""

import random
from fractions import Fraction


class SlowDiscreteGaussian:
    """The oracle: thousands of samples a second, each from exact fractions."""

    def __init__(self, std: float, source: random.Random) -> None:
        self.variance = Fraction(std) ** 2
        self.scale = int(std) + 1
        self.source = source

    def sample(self) -> int:
        """Return one sample (Algorithm 3)."""
        while True:
            candidate = self._laplace()
            excess = abs(candidate) - self.variance / self.scale
            if self._bernoulli_exp(excess**2 / (2 * self.variance)):
                return candidate

    def _laplace(self) -> int:
        """Discrete Laplace of scale ``self.scale`` (Algorithm 2)."""
        while True:
            low = self.source.randrange(self.scale)
            if not self._bernoulli_exp(Fraction(low, self.scale)):
                continue
            high = 0
            while self._bernoulli_exp(Fraction(1)):
                high += 1
            magnitude = low + self.scale * high
            negative = self.source.randrange(2) == 1
            if not (negative and magnitude == 0):
                return -magnitude if negative else magnitude

    def _bernoulli_exp(self, gamma: Fraction) -> bool:
        """True with probability exp(-gamma), gamma >= 0 (Algorithm 1)."""
        while gamma > 1:
            if not self._bernoulli_exp(Fraction(1)):
                return False
            gamma -= 1
        count = 1
        while self._bernoulli(gamma / count):
            count += 1
        return count % 2 == 1

    def _bernoulli(self, probability: Fraction) -> bool:
        return self.source.randrange(probability.denominator) < probability.numerator
