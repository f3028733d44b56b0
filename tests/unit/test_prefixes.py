"""What a prefix cache could have had."""

from rtpo_ray.engines.prefixes import Prefixes


def test_whole_leading_blocks_that_were_computed_before_and_never_the_last_token():
    made = Prefixes(block=4)
    assert made.shareable(range(12)) == 0
    made.add(range(12))
    assert [made.shareable(range(length)) for length in (3, 4, 5, 8, 9, 12, 13, 20)] == [0, 0, 4, 4, 8, 8, 12, 12]
    assert made.shareable([0, 1, 2, 3, 99, 5, 6, 7, 8]) == 4  # differs in its second block
    assert made.shareable([99, 1, 2, 3, 4, 5, 6, 7, 8]) == 0  # the same second block behind another first one
    made.add([*range(12), 50, 51, 52, 53])
    assert made.shareable([*range(12), 50, 51, 52, 53, 54]) == 16
    made.clear()
    assert made.shareable(range(20)) == 0
