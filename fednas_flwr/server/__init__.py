"""The server's half of an exchange: cohort, reply checks, averages, sampling of clients."""
