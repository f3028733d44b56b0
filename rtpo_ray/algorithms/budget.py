"""Which groups get more siblings: a few pilots first, more where they tell that there is something to learn.

A group whose pilots' returns differ is always extended; one whose pilots agree with probability `explore`. A group that is not extended
has equal returns, so its advantages are 0 and it adds nothing. One that is adds what the fixed allocation would have added, divided by
the probability with which such pilots are extended: the expected update is exactly that of the fixed allocation, whatever the returns'
distribution (Horvitz and Thompson, 1952), and only its variance and its cost are others.

    E[1{extended} / chance(pilots) x F(all)] = E[F(all)]      since the coin is thrown before, and apart from, what the others return
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rtpo_ray.types import Group


def chance_of_more(returns: Sequence[float], explore: float) -> float:
    """Probability that a group is extended whose pilots had these returns [n]."""
    return 1.0 if any(value != returns[0] for value in returns) else explore


def is_extended(returns: Sequence[float], explore: float, seed: int) -> bool:
    """Whether it is; the same for the same seed."""
    return random.Random(seed).random() < chance_of_more(returns, explore)


def share_of(group: Group) -> float:
    """What the group weighs: 1 for a fixed allocation, 1 / chance for pilots that were extended, 0 for those that were not."""
    if len(group.siblings) <= group.pilots:
        return 0.0
    return 1.0 / group.chance
