"""A SuperNode starts a process for every message: it must import little but torch and Flower."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from fednas_flwr.builders import make_data
from fednas_flwr.config import Config, LocalSearch, dump_config

# What takes long to import and has no part in a step on prepared data.
HEAVY = {
    *("datasets", "dp_accounting", "flwr_datasets", "hydra", "onnx", "onnxruntime", "opacus"),
    *("pandas", "plotly", "ray", "scipy", "sklearn", "tensorboard", "torchvision"),
}
PROCESS = """
import json, sys
from fednas_flwr.exchange.messages import Header, encode_request
from fednas_flwr.federation.client_app import make_client_app
from fednas_flwr.federation.grids import InProcessGrid

grid = InProcessGrid(make_client_app(sys.argv[1]), 3)
assert "torch.utils.flop_counter" not in sys.modules  # imports triton
content = encode_request(Header("run", "search", 1, 1, 0, "n"), json.loads(sys.argv[2]), {})
(reply,) = grid.send_and_receive([grid.create_message(content, "train.search", 2, "")])
assert reply.has_content(), reply.error.reason
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_a_process_that_searches_on_prepared_data_imports_little(
    compose_config: Callable[..., Config],
) -> None:
    config = compose_config()
    make_data(config)  # prepared on disk, as from the second message on
    algorithm = config.algorithm
    assert isinstance(algorithm, LocalSearch)
    settings = asdict(algorithm) | {"local_epochs": 1}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, dump_config(config), json.dumps(settings)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stdout.splitlines()[-1]))
