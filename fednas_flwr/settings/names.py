"""Names and ranges that sibling packages share, each written once.

They appear in conf/, in requests and in reports alike. A name with one user, or with users in
layers above one another, belongs to the lowest of them instead. No torch, to load fast.
"""

from typing import Literal, get_args

SPLITS = ("train", "validation", "test")  # the parts of a client's records

Unit = Literal["record", "person", "client"]  # units of privacy: one of them is protected
UNITS: tuple[Unit, Unit, Unit] = get_args(Unit)
RECORD, PERSON, CLIENT = UNITS

Norm = Literal["batch", "group", "none"]  # normalisation of a network; a supernet has one
NORMS: tuple[Norm, Norm, Norm] = get_args(Norm)
BATCH, GROUP, NO_NORM = NORMS

# Number formats in which gradients without privacy are computed.
FLOAT32, BFLOAT16 = PRECISIONS = ("float32", "bfloat16")
AUTO = "auto"

# Ways in which the clients of a round are drawn.
UNIFORM, ROUND_ROBIN = SAMPLINGS = ("uniform", "round_robin")

CORRUPT_RULES = ("refuse", "skip")  # treatments of records that cannot be read
TORCHVISION_SETS = {  # torchvision's class, and the folder below root that has its files
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".data", ".xlsx", ".parquet", ".dta")
POOLED, _ = OUTPUTS = ("pooled", "map")  # outputs of a backbone
DECIMALS = ("point", "comma")  # sign before the fraction of a table's numbers
THOUSANDS = ("none", "comma", "point", "blank", "apostrophe")  # between groups of three digits
DATE_ORDERS = ("day_first", "month_first")  # orders of dates such as 31/5/2024
MISSING_WORDS = tuple(  # texts of missing cells, as in pandas
    "#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,"
    "null".split(",")
)
MISSING_RULES = ("mean", "indicator")  # replacements of missing numbers and dates in a table

# Ways to compute epsilon from a schedule: numerically, by Renyi divergences, by a central limit.
PRV, RDP, GDP = ACCOUNTANTS = ("prv", "rdp", "gdp")

# Scores by which networks are compared and one is delivered.
ACCURACY, AUROC, LOG_LOSS = "accuracy", "auroc", "log_loss"
CLASS_METRICS = (ACCURACY, AUROC, "average_precision", "f1", LOG_LOSS)
DECIDED = (ACCURACY, "f1")  # scores of the most probable class; the others use a threshold
R2, RMSE, MAE = NUMBER_METRICS = ("r2", "rmse", "mae")  # for targets that are numbers
LOSSES = (LOG_LOSS, RMSE, MAE)  # lower is better
METRICS = CLASS_METRICS + NUMBER_METRICS
CLOSENESS = "closeness"  # score of predicted numbers, from 0 to 1, in place of accuracy
CLASSIFICATION, REGRESSION = TASKS = ("classification", "regression")
SQUARED, ABSOLUTE, HUBER = NUMBER_LOSSES = ("squared", "absolute", "huber")
FOUND, BEST = DELIVERIES = ("found", "best")  # the network that a run delivers

MOST_SHOWN = 100  # clients that are shown one by one; for more, quantiles are shown
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

FEWEST_VOTES = 3  # clients among which there can be a majority
MOST_SITES = 1000  # in a secure sum

LEAST_EPSILON, LARGEST_EPSILON = 1e-3, 1e6  # for a budget and for a target
LEAST_NOISE_MULTIPLIER, LARGEST_NOISE_MULTIPLIER = 1e-3, 1e6
LEAST_CALIBRATED = 0.1  # least noise multiplier of simulated sites; a lower one hides nothing
LARGEST_MICRO_BATCH = 1024  # records whose gradients are held at a time

# Terms that networks add to their logits: nothing, or the logits of a linear model of their input.
NO_SKIP, LINEAR = SKIPS = ("none", "linear")
