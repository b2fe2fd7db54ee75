"""The server's half of an exchange: cohort, reply checks, secure sums, sampling of clients."""
