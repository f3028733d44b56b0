"""Which groups get more siblings: a few pilots first, more where they tell that there is something to learn.

A group whose pilots' returns differ is always extended; one whose pilots agree with probability `explore`. The probability is known, so what
the extension adds is weighed by its inverse and the expected gradient stays what it is without the choice (Horvitz and Thompson, 1952).
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def chance_of_more(returns: Sequence[float], explore: float) -> float:
    """Probability that a group is extended whose pilots had these returns [n]."""
    return 1.0 if any(value != returns[0] for value in returns) else explore


def is_extended(returns: Sequence[float], explore: float, seed: int) -> bool:
    """Whether it is; the same for the same seed."""
    return random.Random(seed).random() < chance_of_more(returns, explore)
