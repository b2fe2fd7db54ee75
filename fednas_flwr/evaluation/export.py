"""A trained network as files: safetensors with its own building plan, and ONNX checked by use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fednas_flwr.files import replacing

MODEL_FILE = "model.safetensors"
ONNX_FILE = "model.onnx"
METADATA_KEY = "fednas_network"
TOLERANCE = 1e-3  # of logits, absolute plus relative; float32 kernels differ by their order of sums


def export_safetensors(network: nn.Module, description: Mapping[str, Any], folder: Path) -> Path:
    """Write all tensors and, as metadata, the description that ``builders.make_network`` takes."""
    path = folder / MODEL_FILE
    tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(description)})
    return path


def export_onnx(
    network: nn.Module, input_shape: tuple[int, ...], folder: Path
) -> tuple[Path, float]:
    """Write the network in evaluation mode as ONNX with a free batch size, and run it.

    torch's older exporter is used on purpose: it takes a second where the newer takes half a
    minute on a small network, and these networks have no control flow.

    Returns:
        The file, and the largest difference of onnxruntime's logits from torch's over 4 random
        inputs.

    Raises:
        RuntimeError: The logits differ by more than rounding.
    """
    import onnxruntime

    path = folder / ONNX_FILE
    network = network.cpu().eval()
    example = torch.randn(4, *input_shape, generator=torch.Generator().manual_seed(0))
    with replacing(path) as temporary:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter announces its age and constant shapes
            torch.onnx.export(
                network,
                (example[:2],),
                str(temporary),
                dynamo=False,
                input_names=["input"],
                output_names=["logits"],
                dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(temporary), options)
        (answer,) = session.run(None, {"input": example.numpy()})
        with torch.no_grad():
            expected = network(example)
        difference = (torch.from_numpy(answer) - expected).abs()
        if not bool((difference <= TOLERANCE * (1 + expected.abs())).all()):
            raise RuntimeError(
                f"ONNX differs from torch by {float(difference.max())}; not exported."
            )
    return path, float(difference.max())
