"""Seeds: everything random in a step is a function of (seed, step)."""
import numpy as np


def seed_of(*numbers: int) -> int:
    """Combine whole numbers, such as (seed, step), into one seed in [0, 2^63)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
