"""AUROC, a threshold and probabilities from one noised release: counts of scores by class.

A private client counts its records by class and by bin of the log odds that the network gives the
positive class. Each record is in one bin, so the counts have a norm of 1 per record. Bins are fixed
beforehand, equally wide by the inverse hyperbolic sine: narrow where unsure models rank records,
wide where few private steps have made a model too sure. Bins at both ends that show only noise are
left out, which reads no record, except the nearest two: these often have the few records that a
model is surest of, and without them the AUROC is too small. Where all bins show only noise, wider
ones are made of them, which reads no record, either.

The noise of private training makes a model too sure. A line through its log odds, fitted to the
same counts (Platt 1999), mends its probabilities and costs no epsilon.

Tensor suffixes: N records, B bins.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BINS, LARGEST = 64, 32.0  # of log odds from -32 to 32; the last bins have all that lies beyond
SEEN = 4.0  # standard deviations of noise above which a count is more than noise
SEEN_CLASS = 3.0  # the same for the sum of a class
LEAST_SLOPE = 1e-3  # of a line, for scores that tell nothing
BEYOND = 2  # bins at either end that count beside those in which records are seen
WIDTHS = (1, 2, 4, 8)  # bins that are one together, if narrower ones are hardly more than noise
LARGEST_ERROR = 0.03  # with a larger error, no AUROC is reported
USUAL_BINS = 16  # number of bins that hold nearly all records


@dataclass(frozen=True)
class NoisedScores:
    """Scores that follow from noised counts.

    Attributes:
        auroc: AUROC from 0 to 1; None if its error is above ``LARGEST_ERROR``.
        error: Standard deviation that noise gives the AUROC.
        prevalence: Share of positive records.
        edge: Log odds from which on a record counts as positive: the edge of a bin with the largest
            sensitivity + specificity (Youden 1950).
        slope: Factor of the log odds for probabilities as often right as they say; above 0.
        offset: What is added to them for it.
    """

    auroc: float | None
    error: float
    prevalence: float
    edge: float
    slope: float
    offset: float

    @property
    def threshold(self) -> float:
        """Probability of the edge, in (0, 1), for a network of corrected log odds."""
        odds = torch.tensor(self.slope * self.edge + self.offset).double()
        return odds.clamp(-LARGEST, LARGEST).sigmoid().item()


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
    sums = (counts.double().view(2, BINS // width, width).sum(2) for width in WIDTHS)
    scores = (_scores(of, noise * math.sqrt(BINS / of.shape[1])) for of in sums)
    return next((one for one in scores if one is not None), None)


def _scores(counts_2B: Tensor, noise: float) -> NoisedScores | None:
    """Return the scores of counts in bins of one width; None if they are hardly more than noise."""
    negative_B, positive_B = counts_2B
    of_all = counts_2B.sum(1).clamp(min=0)  # of a class in all bins, so that no record is left out
    seen = torch.nonzero(negative_B + positive_B > SEEN * noise * math.sqrt(2)).flatten()
    if len(seen) < 2:
        return None
    bins = len(negative_B)
    edges = _log_odds(torch.arange(bins + 1) / bins)
    centres_B = _log_odds((torch.arange(bins) + 0.5) / bins)
    beyond = max(BEYOND * bins // BINS, 1)
    first, last = max(int(seen[0]) - beyond, 0), int(seen[-1]) + 1 + beyond
    negative_B, positive_B = negative_B[first:last], positive_B[first:last]
    negatives, positives = negative_B.sum(), positive_B.sum()
    if min(negatives, positives) <= SEEN_CLASS * noise * math.sqrt(len(negative_B)):
        return None
    below_B = (negative_B.cumsum(0) - negative_B / 2) / negatives  # share of records; ties half
    above_B = 1 - (positive_B.cumsum(0) - positive_B / 2) / positives
    auroc = float((positive_B * below_B).sum() / positives)
    moves = torch.cat([(below_B - auroc) / positives, (above_B - auroc) / negatives])
    error = noise * float(torch.linalg.vector_norm(moves))
    youden_B = negative_B.cumsum(0) / negatives - positive_B.cumsum(0) / positives
    slope, offset = _line(centres_B[first:last], negative_B, positive_B)
    return NoisedScores(
        auroc=min(max(auroc, 0.0), 1.0) if error <= LARGEST_ERROR else None,
        error=error,
        prevalence=float(of_all[1] / of_all.sum()),
        edge=float(edges[first + 1 + youden_B[:-1].argmax()]),
        slope=slope,
        offset=offset,
    )


def _log_odds(places: Tensor) -> Tensor:
    """Return the log odds at places from 0 to 1 among bins of equal width by their asinh."""
    return (math.asinh(LARGEST) * (2 * places.double() - 1)).sinh()


def _line(odds_B: Tensor, negative_B: Tensor, positive_B: Tensor) -> tuple[float, float]:
    """Return the slope and the offset of Platt's line; those of useless scores give shares.

    As in Platt (1999), of N records of a class (N + 1) / (N + 2) count for it and the rest for the
    other, so that classes that are told apart wholly have a finite slope.

    Args:
        odds_B: Log odds of the bins.
        negative_B: Noised counts of negative records, whose sum is above 0.
        positive_B: The same of positive ones.
    """
    from sklearn.linear_model import LogisticRegression

    counts_2B = torch.stack([negative_B, positive_B]).clamp(min=0)
    moved_2B = counts_2B / (counts_2B.sum(1, keepdim=True) + 2)
    counts_2B = counts_2B - moved_2B + moved_2B.flip(0)
    labels = torch.tensor([0, 1]).repeat_interleave(len(odds_B))
    line = LogisticRegression(C=1e6, solver="newton-cholesky")
    line.fit(odds_B.repeat(2)[:, None], labels, sample_weight=counts_2B.flatten())
    slope, offset = float(line.coef_[0, 0]), float(line.intercept_[0])
    if slope < LEAST_SLOPE:
        return LEAST_SLOPE, math.log(counts_2B[1].sum() / counts_2B[0].sum())
    return slope, offset


@torch.no_grad()
def corrected(network: nn.Module, line: NoisedScores, *, positive: int, x: Tensor) -> nn.Module:
    """Return a copy whose log odds of one of two classes are on the line; else the network itself.

    The line goes into the weights of the last layers: linear ones with two outputs, whose sum the
    logits are. Where the logits of ``x`` show otherwise, the network stays as it is.

    Args:
        network: The network.
        line: Slope and offset.
        positive: The class, 0 or 1.
        x: A batch of any inputs.
    """
    made = copy.deepcopy(network).eval()
    shift_2 = line.offset * functional.one_hot(torch.tensor(positive), 2)
    expected = line.slope * made(x) + shift_2
    last = [m for m in made.modules() if isinstance(m, nn.Linear) and m.out_features == 2]
    for parameter in {id(p): p for layer in last for p in layer.parameters()}.values():
        parameter.mul_(line.slope)
    for layer in [layer for layer in last if layer.bias is not None][:1]:
        layer.bias.add_(shift_2)
    return made if torch.allclose(made(x), expected, rtol=1e-3, atol=1e-3 * line.slope) else network


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
