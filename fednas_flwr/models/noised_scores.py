"""AUROC and a threshold from one noised release: counts of scores by class.

A private client counts its records by class and by bin of the log odds that the network gives the
positive class. Each record is in one bin, so the counts have a norm of 1 per record. Bins are fixed
beforehand, equally wide by the inverse hyperbolic sine: narrow where unsure models rank records,
wide where few private steps have made a model too sure. Bins at both ends that show only noise are
left out, which reads no record, except the nearest two: these often have the few records that a
model is surest of, and without them the AUROC is too small.

Tensor suffixes: N records, B bins.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BINS, LARGEST = 64, 32.0  # of log odds from -32 to 32; the last bins have all that lies beyond
SEEN = 4.0  # standard deviations of noise above which a count is more than noise
BEYOND = 2  # bins at either end that count beside those in which records are seen
LARGEST_ERROR = 0.03  # with a larger error, no AUROC is reported
USUAL_BINS = 16  # number of bins that hold nearly all records


@dataclass(frozen=True)
class NoisedScores:
    """Scores that follow from noised counts.

    Attributes:
        auroc: AUROC from 0 to 1; None if its error is above ``LARGEST_ERROR``.
        error: Standard deviation that noise gives the AUROC.
        prevalence: Share of positive records.
        threshold: Probability from which on a record counts as positive, in (0, 1): the edge of a
            bin with the largest sensitivity + specificity (Youden 1950).
    """

    auroc: float | None
    error: float
    prevalence: float
    threshold: float


def one_hot(log_odds_N: Tensor, positive_N: Tensor) -> Tensor:
    """Return each record's count, float64 [N, 2 B], 1 in its bin; negative records' bins are first.

    Args:
        log_odds_N: Log odds of being positive; non-finite ones count as 0.
        positive_N: True for positive records.
    """
    finite_N = log_odds_N.double().nan_to_num(0.0, 0.0, 0.0)
    scaled_N = (finite_N.asinh() / math.asinh(LARGEST) + 1) / 2 * BINS
    bins_N = scaled_N.floor().clamp(0, BINS - 1).long()
    return functional.one_hot(bins_N + BINS * positive_N.long(), 2 * BINS).double()


def scores_of_counts(counts: Tensor, *, noise: float) -> NoisedScores | None:
    """Return the scores of noised counts; None if they are hardly more than noise.

    Args:
        counts: Sum over all clients [2 B], in the order of :func:`one_hot`.
        noise: Standard deviation of the noise in each count, 0 or more.
    """
    negative_B, positive_B = counts.double().view(2, BINS)
    seen = torch.nonzero(negative_B + positive_B > SEEN * noise * math.sqrt(2)).flatten()
    if len(seen) < 2:
        return None
    first, last = max(int(seen[0]) - BEYOND, 0), int(seen[-1]) + 1 + BEYOND
    negative_B, positive_B = negative_B[first:last], positive_B[first:last]
    negatives, positives = negative_B.sum(), positive_B.sum()
    if min(negatives, positives) <= SEEN * noise * math.sqrt(len(negative_B)):
        return None
    below_B = (negative_B.cumsum(0) - negative_B / 2) / negatives  # share of records; ties half
    above_B = 1 - (positive_B.cumsum(0) - positive_B / 2) / positives
    auroc = float((positive_B * below_B).sum() / positives)
    moves = torch.cat([(below_B - auroc) / positives, (above_B - auroc) / negatives])
    error = noise * float(torch.linalg.vector_norm(moves))
    youden_B = negative_B.cumsum(0) / negatives - positive_B.cumsum(0) / positives
    edge = first + 1 + int(youden_B[:-1].argmax())
    return NoisedScores(
        auroc=min(max(auroc, 0.0), 1.0) if error <= LARGEST_ERROR else None,
        error=error,
        prevalence=float(positives / (positives + negatives)),
        threshold=1 / (1 + math.exp(-math.sinh(math.asinh(LARGEST) * (2 * edge / BINS - 1)))),
    )


def planned_noise(error: float, *, records: float, rarer: float) -> float:
    """Return the noise of a sum of counts with which an AUROC near 1/2 has a given standard error.

    It is ``error r N sqrt(12 / 16)``: with 16 bins and r N records of the rarer class, each bin
    moves the AUROC by a number spread evenly over a range of ``1 / (r N)``.

    Args:
        error: The standard error, above 0.
        records: N, the records of all clients.
        rarer: r, the share of the rarer class, above 0.
    """
    return error * rarer * records * math.sqrt(12 / USUAL_BINS)
