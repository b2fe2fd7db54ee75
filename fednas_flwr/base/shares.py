"""The interval of a share of records, the same wherever a share is told."""


def wilson(share: float, number: int | None) -> tuple[float, float]:
    """The 95 % interval of a share of ``number`` records (Wilson 1927); all of [0, 1] of unknown.

    It has a width where no record or every one counts, which the bootstrap does not give it.

    Example:
        >>> [round(end, 3) for end in wilson(0.8, 10)]
        [0.49, 0.943]
    """
    from scipy.stats import binomtest  # type: ignore[import-untyped,unused-ignore]

    if not number:
        return 0.0, 1.0
    low, high = binomtest(round(share * number), int(number)).proportion_ci(method="wilson")
    return float(low), float(high)
