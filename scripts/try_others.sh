#!/usr/bin/env bash
# Install other frameworks from the package index, each into an environment of its own, and print
# what importing them and two of their functions give: scripts/try_others.sh <new folder>
set -uo pipefail
folder=${1:?a new folder for the environments, some 20 GB}
mkdir "$folder" || exit 1
date -u +%F

tried() { # <environment> <Python code>: what the code prints, or the last line of its error
    printf '%s: ' "$1"
    PYTHONWARNINGS=ignore "$folder/$1/bin/python" -c "$2" 2>&1 | tail -n 1
}

for package in nvflare fedml nni naslib; do
    python3 -m venv "$folder/$package"
    if "$folder/$package/bin/pip" install --quiet --no-cache-dir "$package" 2>"$folder/$package.log"
    then tried "$package" "import $package; print('imported', $package.__version__)"
    else echo "$package: not installed, $(grep -m 1 ERROR "$folder/$package.log")"
    fi
done

echo "FedML with setuptools<81, and its average of the alphas (0, 0) and (1, 1) of two clients:"
"$folder/fedml/bin/pip" install --quiet --no-cache-dir 'setuptools<81' 2>>"$folder/fedml.log"
tried fedml "import fedml; print('imported', fedml.__version__)"
tried fedml '
from types import SimpleNamespace
import torch
from fedml.simulation.mpi.fednas.FedNASAggregator import FedNASAggregator

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.alphas = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
    def arch_parameters(self):
        return [self.alphas]

server = FedNASAggregator.__new__(FedNASAggregator)
vars(server).update(
    model=Network(), args=SimpleNamespace(stage="search"), client_num=2, all_train_data_num=2,
    sample_num_dict={0: 1, 1: 1},
    arch_dict={client: [torch.full((2,), float(client))] for client in (0, 1)},
    model_dict={client: {"weight": torch.full((2,), float(client))} for client in (0, 1)},
)
weights, alphas = server.aggregate()
print("weights", weights["weight"].tolist(), "alphas", alphas[0].tolist())'

echo "NVFlare's SVTPrivacy with its defaults: epsilon after 1 and after 1000 calls:"
tried nvflare '
import logging
import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
logging.disable()
svt, spent = SVTPrivacy(), []
for _ in range(1000):
    difference = {"w": np.ones(1000, dtype=np.float32)}
    svt.process_dxo(DXO(DataKind.WEIGHT_DIFF, data=difference), Shareable(), FLContext())
    spent.append(svt.get_privacy_spent())
print(round(spent[0], 1), round(spent[-1], 1))'

echo "NNI's search strategies, before and after pip install torch pytorch_lightning:"
tried nni "import nni.nas.strategy; print('imported')"
"$folder/nni/bin/pip" install --quiet --no-cache-dir torch pytorch_lightning 2>>"$folder/nni.log"
tried nni "import nni.nas.strategy; print('imported')"
