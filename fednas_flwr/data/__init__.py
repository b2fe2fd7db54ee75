"""Real data from its source to normalised batches, in the order a run uses it.

`readers` lists the available data sets (read by `images`, `npz`, `tables`). `datasets` prepares one
and keeps its tensors on disk. `prepared` divides the training records over clients. `records` fixes
the part of each record (train, validation, test) by a keyed hash. `loaders` makes and augments
batches.
"""
