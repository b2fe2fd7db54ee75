"""Clip, sample, add noise, and account for it."""
