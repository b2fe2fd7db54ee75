"""The interval of a share of records, the same wherever a share is reported."""


def wilson(share: float, number: int | None) -> tuple[float, float]:
    """Return the 95 % interval of a share of records (Wilson 1927); [0, 1] if ``number`` is None.

    Unlike a bootstrap interval, it has a width even if the share is 0 or 1.

    Example:
        >>> [round(end, 3) for end in wilson(0.8, 10)]
        [0.49, 0.943]
    """
    from scipy.stats import binomtest  # type: ignore[import-untyped,unused-ignore]

    if not number:
        return 0.0, 1.0
    low, high = binomtest(round(share * number), int(number)).proportion_ci(method="wilson")
    return float(low), float(high)
