"""The examples of an evaluation, in a random order that a seed names."""

import random


def select(examples: int, most: int, seed: int) -> list[int]:
    """Numbers of at most so many of the examples, in a random order that is the same with every version of Python."""
    # Only `random()` and the seeding by an integer are promised to stay; so the shuffle is written here.
    dice = random.Random(seed)  # noqa: S311 - no secret
    moved: dict[int, int] = {}
    chosen: list[int] = []
    for place in range(min(examples, most)):
        other = place + int(dice.random() * (examples - place))
        chosen.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return chosen
