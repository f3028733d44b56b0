"""Seeds of a batch's noise, against the same arithmetic on Python's integers."""

import random

import numpy as np

from rtpo_ray.engines.noise import row_seeds

MASK = 2**64 - 1


def by_hand(seed, position):
    def mixed(word):
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
        return word ^ word >> 31

    return mixed(mixed(seed + 1) + position * 0x9E3779B97F4A7C15 & MASK) >> 33


def test_a_row_depends_on_its_seed_and_position_alone():
    rng = random.Random(0)
    rows = [(rng.randrange(2**31), rng.randrange(100_000)) for _ in range(500)] + [(0, 0), (2**31 - 1, 2**31 - 1)]
    seeds, positions = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    assert row_seeds(seeds, positions).tolist() == [by_hand(*row) for row in rows]


def test_neighbours_in_seed_or_position_share_no_stream():
    """Of a million pairs about 230 collide in 31 bits by chance, and no bit leans to one side."""
    seeds, positions = (axis.ravel().astype(np.uint64) for axis in np.meshgrid(np.arange(1000), np.arange(1000)))
    drawn = row_seeds(seeds, positions)
    assert 999_600 < len(np.unique(drawn)) < 999_900 and 0 <= drawn.min() and drawn.max() < 2**31
    assert all(abs(int((drawn >> bit & 1).sum()) - 500_000) < 2_500 for bit in range(31))
    grid = drawn.reshape(1000, 1000) / 2**31
    for one, other in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.005
