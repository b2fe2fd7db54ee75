"""Privacy of a client's records: clipping, noise, accounting, the ledger and the policy.

Plain torch and numbers: nothing here knows Flower, Hydra or a run's configuration, so all of it can
be used from a notebook. Neighbouring data sets differ by one record of one client, more or less.
"""
