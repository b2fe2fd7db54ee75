"""Output of a run for people: events, progress, report, comparison, tables, model card.

Everything here is made from the files of a run folder, by ``runs`` and ``base`` alone.
"""
