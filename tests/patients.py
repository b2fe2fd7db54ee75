"""A table of patients as hospitals have it: decimal commas, missing cells, texts and dates."""

import numpy as np
import pandas as pd


def patients():
    """Return 800 rows of ``age``, ``ward`` and ``seen``, by which ``outcome`` can be predicted."""
    rng = np.random.default_rng(0)
    age, ward = rng.normal(60, 12, 800).round(1), rng.choice(["north", "south", "west"], 800)
    day = rng.integers(0, 700, 800)
    risk = (age - 60) / 12 + 1.5 * (ward == "north") + (day - 350) / 300
    ill = risk + 0.5 * rng.normal(size=800) > 0.4
    ages = [str(a).replace(".", ",") for a in age]
    seen = (pd.Timestamp("2022-01-01") + pd.to_timedelta(day, "D")).strftime("%d.%m.%Y")
    table = pd.DataFrame({"age": ages, "ward": ward, "seen": seen})
    table["outcome"] = np.where(ill, "died", "left")
    table.loc[rng.random(800) < 0.1, "age"] = None
    table.loc[rng.random(800) < 0.1, "ward"] = None
    return table
