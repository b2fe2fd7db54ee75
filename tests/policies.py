"""The policy of a site, of which a test changes what it is about."""

import yaml

from fednas_flwr.privacy.policy import template


def policy_of(**changes):
    """Return a data set's section of the template, with some keys changed."""
    return yaml.safe_load(template())["data_sets"]["my-data"] | {"delta": 1e-5} | changes
