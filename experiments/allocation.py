"""The least noise for an ε by Poisson sampling and by random allocation, side by side."""

from tfdp_rec.core.claim.calibration import calibrate_noise
from tfdp_rec.data import PoissonSampling, RandomAllocation

_DELTA = 1e-6
_EPSILONS = (1.0, 3.0, 8.0)


def main() -> None:
    """Prints the table of docs/privacy-allocation.md."""
    print("| steps an epoch | epochs | " + " | ".join(f"ε = {epsilon:g}" for epsilon in _EPSILONS) + " |")
    print("|---" * (2 + len(_EPSILONS)) + "|")
    for steps in (10, 100, 1000):
        for epochs in (1, 10, 100):
            cells = []
            for epsilon in _EPSILONS:
                poisson, allocation = (
                    calibrate_noise(epsilon, _DELTA, sampling, steps * epochs)
                    for sampling in (PoissonSampling(steps * 1000, 1000), RandomAllocation(steps * 1000, steps))
                )
                cells.append(f"{poisson:.3f} / {allocation:.3f}")
            print(f"| {steps:,} | {epochs} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
