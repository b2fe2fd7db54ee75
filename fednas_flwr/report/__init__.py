"""Output of a run for people: events, progress, report, comparison, tables, model card.

Everything here is made from the files of a run folder and imports nothing of the package but its
errors.
"""
