from typing import Literal

NSCoeffT = Literal["quintic"]


def newton_schulz_tp(x, steps, coefficient_type, tp_group=None, partition_dim=None, tp_mode=""):
    """Orthogonalize `x`; of the ways with tensor parallelism only that which does not talk."""
    x = x / (x.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x
