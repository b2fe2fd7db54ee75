"""Real data from its source to normalised batches, in the order a run uses it.

`readers` lists the data sets there are (read by `images`, `labelled_images`, `npz`, `tables`),
`datasets` prepares one and keeps tensors on disk (`cache`), `partitioners` divides the training
records over clients, `splits` fixes the part of each record (train, validation, test) by a keyed
hash, and `loaders` makes and augments batches.
"""
