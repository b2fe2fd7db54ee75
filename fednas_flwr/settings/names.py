"""Names and ranges that packages beside each other share, each written once.

A name with one user, or whose users stand above one another, belongs to the lowest of them; here
stands what is in conf/, in a request and in a report alike. Free of torch, to load at once.
"""

from typing import Literal, get_args

SPLITS = ("train", "validation", "test")  # the parts of a client's records

Unit = Literal["record", "person", "client"]  # what privacy protects one of
UNITS: tuple[Unit, Unit, Unit] = get_args(Unit)
RECORD, PERSON, CLIENT = UNITS

Norm = Literal["batch", "group", "none"]  # how a network normalises; a supernet by one of two
NORMS: tuple[Norm, Norm, Norm] = get_args(Norm)
BATCH, GROUP, NO_NORM = NORMS

# What plain gradients are computed in.
FLOAT32, BFLOAT16 = PRECISIONS = ("float32", "bfloat16")
AUTO = "auto"

# How the clients of a round are drawn.
UNIFORM, ROUND_ROBIN = SAMPLINGS = ("uniform", "round_robin")

CORRUPT_RULES = ("refuse", "skip")  # what becomes of records that cannot be read
TORCHVISION_SETS = {  # torchvision's class, and the folder below root in which it keeps its files
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".data", ".xlsx", ".parquet", ".dta")
POOLED, _ = OUTPUTS = ("pooled", "map")  # of a backbone
DECIMALS = ("point", "comma")  # sign before the fraction of a table's numbers
THOUSANDS = ("none", "comma", "point", "blank", "apostrophe")  # between groups of three digits
DATE_ORDERS = ("day_first", "month_first")  # of dates such as 31/5/2024
MISSING_WORDS = tuple(  # cells that are missing, as pandas has them
    "#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,"
    "null".split(",")
)
MISSING_RULES = ("mean", "indicator")  # what becomes of missing numbers and dates of a table

# How epsilon is computed from a schedule: numerically, by Renyi divergences, by a central limit.
PRV, RDP, GDP = ACCOUNTANTS = ("prv", "rdp", "gdp")

# Scores by which networks are compared and one is delivered.
ACCURACY, AUROC, LOG_LOSS = "accuracy", "auroc", "log_loss"
CLASS_METRICS = (ACCURACY, AUROC, "average_precision", "f1", LOG_LOSS)
DECIDED = (ACCURACY, "f1")  # of the most probable class; by others labels get a threshold
R2, RMSE, MAE = NUMBER_METRICS = ("r2", "rmse", "mae")  # of targets that are numbers
LOSSES = (LOG_LOSS, RMSE, MAE)  # of which less is better
METRICS = CLASS_METRICS + NUMBER_METRICS
CLOSENESS = "closeness"  # of predicted numbers, from 0 to 1, in the place of accuracy
CLASSIFICATION, REGRESSION = TASKS = ("classification", "regression")
SQUARED, ABSOLUTE, HUBER = NUMBER_LOSSES = ("squared", "absolute", "huber")
FOUND, BEST = DELIVERIES = ("found", "best")  # the network that a run delivers

MOST_SHOWN = 100  # clients of which each is told by itself; of more there are quantiles
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

FEWEST_VOTES = 3  # clients of which most can be right
MOST_SITES = 1000  # of a secure sum

LEAST_EPSILON, LARGEST_EPSILON = 1e-3, 1e6  # of a budget and of a target
LEAST_NOISE_MULTIPLIER, LARGEST_NOISE_MULTIPLIER = 1e-3, 1e6
LEAST_CALIBRATED = 0.1  # noise multiplier: simulated sites accept no less, and less hides nothing
LARGEST_MICRO_BATCH = 1024  # records whose gradients are held at a time

# What networks add to their logits: nothing, or what a linear model of their input says.
NO_SKIP, LINEAR = SKIPS = ("none", "linear")
