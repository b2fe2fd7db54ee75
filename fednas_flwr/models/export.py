"""Exports a trained model to self-contained files: safetensors, and ONNX, which is run as a check.

Both take raw records. The safetensors file holds the network's tensors and, as JSON metadata, the
descriptions of the network and of its inputs. The ONNX file holds normalisation, categories,
classes and softmax as operators.
"""

import json
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import Tensor

from fednas_flwr.base.files import replacing
from fednas_flwr.data import notation, table_files
from fednas_flwr.data.notation import Cells, number_of
from fednas_flwr.data.records import CATEGORY, NUMBER, Column, Inputs, feature_names
from fednas_flwr.data.table_files import BLANK
from fednas_flwr.models.prediction import METADATA_KEY, MODEL_FILE, TRANSFORM, Model
from fednas_flwr.settings.data_settings import TableForm
from fednas_flwr.settings.names import MISSING_WORDS

ONNX_FILE = "model.onnx"
INPUTS_KEY = "fednas_inputs"
TOLERANCE = 1e-4  # of probabilities, absolute; float32 kernels differ by their order of sums
OPSETS = {"": 17, "ai.onnx.ml": 3}


def export_safetensors(model: Model, folder: Path) -> Path:
    """Write all tensors of the network and, as metadata, its description and its inputs."""
    path = folder / MODEL_FILE
    state = model.network.state_dict()
    if model.transform is not None:
        state |= model.transform.state_dict(prefix=TRANSFORM)  # empty for scattering
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    # One entry, since safetensors writes several in an order that changes between processes.
    about = {"network": model.description, "inputs": json.loads(model.inputs.to_json())}
    metadata = {METADATA_KEY: json.dumps(about)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    return path


def export_onnx(model: Model, folder: Path) -> tuple[Path, float]:
    """Write the model as ONNX with a free batch size, and run it.

    Images are one input ``images``, uint8 ``[N, C, H, W]``. A table has one input ``[N, 1]`` per
    column, named after it: numbers as float32, NaN where missing; dates as float32 days since 1970;
    categories as text, empty where missing. Codes for missing numbers, other spellings
    (``dataset.map``) and units (``dataset.scale``) are read as in training, except those of real
    sites, which each have their own. The outputs are, in this order, ``label``, a text ``[N]`` (at
    the model's threshold if it has one), and ``probabilities``, float32 ``[N, classes]``. If a
    record can have several labels, ``labels`` replaces ``label``: int64 ``[N, L]`` of 0 and 1 in
    the order of the metadata's ``class_names``. A model that predicts numbers has one output,
    ``prediction``, float32 ``[N]``, in the target's unit. If a column has the name of an output,
    the output's name gets a final ``_``.

    torch's older exporter is used on purpose: on a small network it takes a second, the newer one
    half a minute, and these networks have no control flow.

    Returns:
        The file, and the largest difference between onnxruntime's and torch's probabilities on 4
        random records; for predicted numbers, in standard deviations of the target.

    Raises:
        RuntimeError: ONNX lacks a layer, or the probabilities differ by more than rounding.
    """
    import onnxruntime

    path = folder / ONNX_FILE
    model = model.cpu().eval()
    inputs, example = model.inputs, _examples(model.inputs)
    taken = "features" if inputs.is_table else "images"
    with replacing(path) as temporary:
        with warnings.catch_warnings(), _without_fast_path():
            warnings.simplefilter("ignore")  # the exporter warns of its age and of constant shapes
            try:
                torch.onnx.export(
                    model,
                    (example[:2],),
                    str(temporary),
                    dynamo=False,
                    opset_version=OPSETS[""],
                    input_names=[taken],
                    output_names=["probabilities"],
                    dynamic_axes={taken: {0: "batch"}, "probabilities": {0: "batch"}},
                )
            except Exception as error:
                reason = textwrap.shorten(str(error), 150)
                raise RuntimeError(
                    f"the network {model.description.get('name', '')} cannot be exported as ONNX "
                    f"({reason}): replace that layer."
                ) from error
        graph = onnx.load(str(temporary))
        _add_columns(graph, inputs)
        _add_label(graph, inputs)
        _rename(graph.graph, [column.name for column in inputs.schema])
        graph.opset_import.append(helper.make_opsetid("ai.onnx.ml", OPSETS["ai.onnx.ml"]))
        metadata = {INPUTS_KEY: inputs.to_json(), "class_names": json.dumps(inputs.class_names)}
        helper.set_model_props(graph, metadata)
        onnx.checker.check_model(graph)
        onnx.save(graph, str(temporary))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(temporary), options)
        *_, answer = session.run(None, onnx_inputs(example, inputs))
        with torch.no_grad():
            expected = model(example)
        difference = float((torch.from_numpy(answer).view_as(expected) - expected).abs().max())
        difference /= inputs.target[1] if inputs.target else 1.0
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"ONNX differs from torch by {difference}; not exported: a network of your own "
                "must keep no state between records, and be the same each time."
            )
    return path, difference


def onnx_inputs(x: Tensor, inputs: Inputs) -> dict[str, np.ndarray]:
    """Return the ONNX file's inputs for raw records in the form of :meth:`Model.forward`."""
    if not inputs.is_table:
        return {"images": x.numpy()}
    values = dict(zip(feature_names(inputs.schema), x.numpy().T, strict=True))
    return {c.name: _onnx_column(values, c, inputs.form)[:, None] for c in inputs.schema}


def _onnx_column(features: dict[str, np.ndarray], column: Column, form: TableForm) -> np.ndarray:
    if column.kind != CATEGORY:
        return np.asarray(features[column.name] / form.scale.get(column.name, 1.0), np.float32)
    # A blank is no category; an empty text may be spelled otherwise
    texts = np.array([" "] * len(next(iter(features.values()))), dtype=object)
    for text, place in reversed(_spelled(column, form).items()):
        texts[features[f"{column.name}={column.categories[place]}"] == 1] = text
    return texts


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Compute attention op by op, so that ONNX has all ops."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _examples(inputs: Inputs) -> Tensor:
    """Return 4 random raw records; in a table, some numbers and categories are missing."""
    generator = torch.Generator().manual_seed(0)
    if not inputs.is_table:
        return torch.randint(0, 256, (4, *inputs.shape), generator=generator, dtype=torch.uint8)
    values: dict[str, Tensor] = {}
    positions = iter(zip(inputs.mean, inputs.std, strict=True))
    for column in (c for c in inputs.schema if c.kind != CATEGORY):
        mean, std = next(positions)
        values[column.name] = mean + std * torch.randn(4, generator=generator)
        if BLANK not in inputs.form.map.get(column.name, {}):
            values[column.name][3] = torch.nan
    for column in (c for c in inputs.schema if c.indicator):
        values[f"{column.name} is missing"] = values[column.name].isnan().float()
    for column in (c for c in inputs.schema if c.kind == CATEGORY):
        chosen = torch.randint(0, len(column.categories) + 1, (4,), generator=generator)
        spelled = {*_spelled(column, inputs.form).values()}  # all others are read like these
        for i, value in enumerate(column.categories):
            values[f"{column.name}={value}"] = (chosen == (i if i in spelled else -1)).float()
    return torch.stack(list(values.values()), dim=1)


def _add_columns(model: onnx.ModelProto, inputs: Inputs) -> None:
    """Replace a table's features by one input per column."""
    if not inputs.is_table:
        return
    graph, node = model.graph, helper.make_node
    numbers, indicators, categories = [], [], []
    nodes, columns = list[onnx.NodeProto](), []
    for i, column in enumerate(inputs.schema):
        name, is_text, places = _place(i), column.kind == CATEGORY, _spelled(column, inputs.form)
        kind = TensorProto.STRING if is_text else TensorProto.FLOAT
        columns.append(helper.make_tensor_value_info(name, kind, ["batch", 1]))
        if column.kind == NUMBER:
            name = _add_number(graph, nodes, name, column, inputs.form)
        if not is_text:
            numbers.append(name)
        elif column.categories:  # an unknown or missing text has zeros everywhere
            places = places or {"\0": 0}  # a text that no cell has
            texts: dict[str, Any] = {"cats_strings": [*places], "zeros": 1, "domain": "ai.onnx.ml"}
            nodes.append(node("OneHotEncoder", [name], [f"encoded_{i}"], **texts))
            shape = np.array([-1, len(places)], dtype=np.int64)
            one_hot = np.eye(len(column.categories), dtype=np.float32)[[*places.values()]]
            graph.initializer.append(numpy_helper.from_array(shape, f"shape_{i}"))
            graph.initializer.append(numpy_helper.from_array(one_hot, f"spelled_{i}"))
            nodes.append(node("Reshape", [f"encoded_{i}", f"shape_{i}"], [f"spellings_{i}"]))
            nodes.append(node("MatMul", [f"spellings_{i}", f"spelled_{i}"], [f"one_hot_{i}"]))
            categories.append(f"one_hot_{i}")
        if column.indicator:
            nodes.append(node("IsNaN", [name], [f"is_nan_{i}"]))
            nodes.append(node("Cast", [f"is_nan_{i}"], [f"indicator_{i}"], to=TensorProto.FLOAT))
            indicators.append(f"indicator_{i}")
    nodes.append(node("Concat", [*numbers, *indicators, *categories], ["features"], axis=1))
    old = list(graph.node)
    del graph.node[:], graph.input[:]
    graph.input.extend(columns)
    graph.node.extend([*nodes, *old])


def _read(texts: Sequence[str], column: Column, form: TableForm) -> Cells:
    """Return the cells of a column in the form in which training has read them."""
    cells, _ = table_files.without_missing({column.name: Cells(texts)}, replace(form, rename={}))
    numbers = [column.name] if column.kind == NUMBER else []
    read, *_ = table_files.in_common_form(cells, form, numbers, None, "", where="model.onnx")
    return read[column.name]


def _spelled(column: Column, form: TableForm) -> dict[str, int]:
    """Return the usual texts of a column's cells, with the position of the category of each.

    Usual are categories, spellings in ``map``, and texts for missing cells; for numbers also 1 and
    1.0; for words also those in small letters, in capitals and with a capital first; and all of
    these with a blank on either side.
    """
    texts = [*column.categories, *form.map.get(column.name, {}), *MISSING_WORDS]
    texts += [*form.missing_values, *form.missing_in.get(column.name, ())]
    numbers = [x for x in map(number_of, texts) if not math.isnan(x)]
    forms = [repr(x) for x in numbers] + [str(int(x)) for x in numbers if x.is_integer()]
    cased = [f(text) for text in texts for f in (str.lower, str.title, str.upper)]
    every = (*texts, *forms, *cased)  # training strips the cells before it looks at them
    known = dict.fromkeys(text for text in every if text != BLANK and text == text.strip())
    if column.name in form.scale:
        known = dict.fromkeys(text for text in known if not math.isnan(number_of(text)))
    usual = [*known, ""]
    places = notation.places_among(_read(usual, column, form), column.categories).tolist()
    read = {text: place for text, place in zip(usual, places, strict=True) if place >= 0}
    blanks = ("{} ", " {}", " {} ")  # which training strips
    return read | {b.format(text): place for b in blanks for text, place in read.items() if text}


def _add_number(
    graph: onnx.GraphProto, nodes: list[onnx.NodeProto], place: str, column: Column, form: TableForm
) -> str:
    """Add nodes that read a column of numbers as in training; return the name of their result."""

    def constant(name: str, value: float) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    plain, name = table_files.notation_of(form).plain, place
    if column.name in form.scale:
        factor, name = constant(f"{place} factor", form.scale[column.name]), f"{place} scaled"
        nodes.append(helper.make_node("Mul", [place, factor], [name]))
    texts = [*form.missing_in.get(column.name, form.missing_values), *form.map.get(column.name, {})]
    texts = [text for text in texts if not math.isnan(number_of(plain(text)))]
    read = _read([*texts, ""], column, form).numbers.tolist()
    for i, (text, value) in enumerate(zip([*texts, ""], read, strict=True)):
        result = [f"{place} is {i}"]
        if text:
            code = constant(f"{place} code {i}", number_of(plain(text)))
            nodes.append(helper.make_node("Equal", [place, code], result))
        elif math.isnan(value):  # a missing number is missing
            continue
        else:
            nodes.append(helper.make_node("IsNaN", [place], result))
        other = constant(f"{place} value {i}", value)
        nodes.append(helper.make_node("Where", [*result, other, name], [f"{place} read {i}"]))
        name = f"{place} read {i}"
    return name


def _place(index: int) -> str:
    """Return the name of a column's input while the graph is built."""
    return f"<column {index}>"


def _rename(graph: onnx.GraphProto, columns: Sequence[str]) -> None:
    """Give the inputs their columns' names; anything else of such a name is renamed."""
    inputs = {_place(i): name for i, name in enumerate(columns)}

    def free(name: str) -> str:
        while name in columns:
            name += "_"
        return name

    for node in graph.node:
        node.input[:] = [inputs.get(name) or free(name) for name in node.input]
        node.output[:] = [free(name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = inputs.get(value.name) or free(value.name)


def _add_label(model: onnx.ModelProto, inputs: Inputs) -> None:
    """Add the class by name (at the threshold), or the labels, as the first output.

    A predicted number is the only output.
    """
    graph, node, names = model.graph, helper.make_node, list(inputs.class_names)
    if inputs.target:
        graph.node.append(
            node("ReduceMax", ["probabilities"], ["prediction"], axes=[1], keepdims=0)
        )
        del graph.output[:]
        name, kind = "prediction", TensorProto.FLOAT
    elif inputs.multi_label:
        graph.node.append(_reached(graph, 0.5))
        graph.node.append(node("Cast", ["reached"], ["labels"], to=TensorProto.INT64))
        name, kind = "labels", TensorProto.INT64
    else:
        name, kind = "label", TensorProto.STRING
        keys, decisive = list(range(len(names))), "probabilities"
        classes: dict[str, Any] = {"keys_int64s": keys, "values_strings": names}
        if inputs.threshold is not None:  # from it on, the positive class outweighs all others
            decisive, place = "decisive", 1 if inputs.positive is None else inputs.positive
            for name_of, values in (
                ("is_positive", [key == place for key in keys]),
                ("above", np.float32(2)),
                ("below", np.float32(-1)),
            ):
                graph.initializer.append(numpy_helper.from_array(np.array(values), name_of))
            graph.node.append(_reached(graph, inputs.threshold))
            graph.node.append(node("Where", ["reached", "above", "below"], ["decided"]))
            parts = ["is_positive", "decided", "probabilities"]
            graph.node.append(node("Where", parts, [decisive]))
        largest = node("ArgMax", [decisive], ["class_index"], axis=1, keepdims=0)
        named = node("LabelEncoder", ["class_index"], ["label"], domain="ai.onnx.ml", **classes)
        graph.node.extend([largest, named])
    shape: list[str | int | None] = ["batch", *([len(names)] if inputs.multi_label else [])]
    graph.output.insert(0, helper.make_tensor_value_info(name, kind, shape))


def _reached(graph: onnx.GraphProto, threshold: float) -> onnx.NodeProto:
    """Return the node ``reached``, which is true for probabilities at a threshold or above."""
    value = numpy_helper.from_array(np.array(threshold, dtype=np.float32), "threshold")
    graph.initializer.append(value)
    return helper.make_node("GreaterOrEqual", ["probabilities", "threshold"], ["reached"])
