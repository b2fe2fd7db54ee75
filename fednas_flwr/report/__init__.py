"""Output of a run for people: events, progress, report, comparison, tables, model card.

Everything here is made from the files of a run folder. Of the package it imports only ``runs``,
``base`` and names of settings.
"""
