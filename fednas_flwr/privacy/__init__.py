"""Privacy of a client's records: clipping, noise, accounting, the ledger and the policy.

The package uses plain torch and numbers. Nothing here depends on Flower, Hydra or a run's
configuration, so all of it can be used from a notebook. Neighbouring data sets differ by one record
of one client, added or removed.
"""
