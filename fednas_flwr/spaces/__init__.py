"""Search spaces: what can be searched, its relaxation, its discrete networks, and genotypes.

A space is a frozen dataclass of its sizes (``darts.DARTSSpace``, ``nasbench201.NASBench201Space``,
``mbconv.MBConvSpace``, ``dp_cells.DPCellSpace``, for tables ``mlp.MLPSpace``) that fulfils
``space.SearchSpace``. Plain torch: nothing here knows of training, privacy or clients.
"""
