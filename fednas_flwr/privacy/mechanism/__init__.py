"""The mechanism of a release: clipping, sampling, noise and accounting."""
