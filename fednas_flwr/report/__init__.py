"""Output of a run for people: events, progress, report, comparison, tables, model card.

Everything here is made from the files of a run folder, and imports of the package ``runs``,
``base`` and names of settings alone.
"""
