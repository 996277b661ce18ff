"""Requests and answers held against TensorFlow Serving's published protocol: its protos, and its rules for JSON.

TensorFlow Serving itself is not run. The protos are those of the package tensorflow-serving-api; the rules (its page of
the RESTful API, and util/json_tensor.cc) are written here once more, slowly: from a response proto to the JSON of it.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import json_format, text_format
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow_serving.apis.get_model_metadata_pb2 import SignatureDefMap
from tensorflow_serving.apis.get_model_status_pb2 import GetModelStatusResponse, ModelVersionStatus
from tensorflow_serving.apis.model_pb2 import ModelSpec
from tensorflow_serving.apis.predict_pb2 import PredictResponse
from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

from tfdp_rec.serving import Served, Server
from tfdp_rec.serving.rest import describe_status

from .test_http import call

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def served(exported):
    return Served(exported / "servable")


@pytest.fixture(scope="module")
def server(served):
    with Server(served, "recommender", port=0) as server:
        yield server


def as_sent(message, **options):
    return json_format.MessageToDict(message, always_print_fields_with_no_presence=True, **options)


# Status and metadata.


@pytest.mark.parametrize("path", ["", "/versions/1"])
def test_the_status_is_a_status_response(server, path):
    _, found = call(server, "GET", f"/v1/models/recommender{path}")
    response = GetModelStatusResponse()
    version = response.model_version_status.add(version=1, state=ModelVersionStatus.AVAILABLE)
    version.status.error_code = 0
    assert found == as_sent(response)


def test_the_status_of_a_server_that_ends_has_states_of_the_protocol():
    response = json_format.ParseDict(describe_status(True), GetModelStatusResponse())
    (version,) = response.model_version_status
    assert version.state == ModelVersionStatus.UNLOADING and version.status.error_code == 14
    assert as_sent(response) == describe_status(True)


def test_the_metadata_are_the_signatures_of_the_file(server, exported):
    _, found = call(server, "GET", "/v1/models/recommender/metadata")
    (graph,) = SavedModel.FromString((exported / "servable" / "saved_model.pb").read_bytes()).meta_graphs
    signatures, spec = SignatureDefMap(signature_def=graph.signature_def), ModelSpec(name="recommender")
    spec.version.value = 1
    signatures = as_sent(signatures, preserving_proto_field_name=True)
    spec = as_sent(spec, preserving_proto_field_name=True)
    assert found == {"model_spec": spec, "metadata": {"signature_def": signatures}}
    history = found["metadata"]["signature_def"]["signature_def"]["top_k"]["inputs"]["history"]
    assert history["dtype"] == "DT_STRING" and [d["size"] for d in history["tensor_shape"]["dim"]] == ["-1", "-1"]


# Predictions.


def values(tensor, dims, flat):
    if not dims:
        value = flat.pop(0)
        return value.decode() if tensor.dtype == tf.string else value
    return [values(tensor, dims[1:], flat) for _ in range(dims[0])]


def nested(proto):
    """The values of a tensor proto in JSON's lists, as AddTensorValues writes them."""
    tensor = tf.constant(tf.make_ndarray(proto))
    return values(tensor, [d.size for d in proto.tensor_shape.dim], tensor.numpy().ravel().tolist())


def row_format(response):
    """MakeRowFormatJsonFromTensors."""
    (size,) = {proto.tensor_shape.dim[0].size for proto in response.outputs.values()}
    columns = {name: nested(proto) for name, proto in response.outputs.items()}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(size)]
    return {"predictions": rows if len(columns) > 1 else [value for row in rows for value in row.values()]}


def columnar_format(response):
    """MakeColumnarFormatJsonFromTensors."""
    columns = {name: nested(proto) for name, proto in response.outputs.items()}
    return {"outputs": columns if len(columns) > 1 else next(iter(columns.values()))}


def respond(served, signature, **inputs):
    """What the model gives, in the proto that TensorFlow Serving writes as JSON."""
    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    found = served._signatures[signature](**tensors)
    return PredictResponse(outputs={name: tf.make_tensor_proto(value.numpy()) for name, value in found.items()})


HISTORIES = [["item 1", "item 2", "item 7"], ["item 3", "", "nowhere"]]


@pytest.mark.parametrize(
    "request_body, signature, inputs",
    [
        ({"instances": HISTORIES}, "serving_default", {"history": HISTORIES}),
        ({"instances": [{"history": h} for h in HISTORIES]}, "serving_default", {"history": HISTORIES}),
        ({"inputs": HISTORIES}, "serving_default", {"history": HISTORIES}),
        ({"inputs": {"history": HISTORIES}}, "serving_default", {"history": HISTORIES}),
        (
            {"signature_name": "top_k", "inputs": {"history": HISTORIES, "k": 3}},
            "top_k",
            {"history": HISTORIES, "k": 3},
        ),
        (
            {"signature_name": "among", "inputs": {"history": HISTORIES, "k": 2, "allowed": ["item 4", "item 9"]}},
            "among",
            {"history": HISTORIES, "k": 2, "allowed": ["item 4", "item 9"]},
        ),
        (
            {"signature_name": "ragged", "inputs": {"items": ["item 1", "item 2"], "lengths": [2, 0], "k": 2}},
            "ragged",
            {"items": ["item 1", "item 2"], "lengths": [2, 0], "k": 2},
        ),
    ],
)
def test_answers_are_those_that_the_rules_write(served, server, request_body, signature, inputs):
    """All values to the last bit of their types: float32 is written with fewer digits there."""
    status, found = call(server, "POST", "/v1/models/recommender:predict", request_body)
    response = respond(served, signature, **inputs)
    assert status == 200 and found == (row_format if "instances" in request_body else columnar_format)(response)


class HalfPlusThree(tf.Module):
    """The model of the published page."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    def one(self, x):
        return {"y": x / 2 + 3}

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.string, "tag"),
            tf.TensorSpec([None, 5], tf.int64, "signal"),
            tf.TensorSpec([None, 2, 2], tf.int64, "sensor"),
        ]
    )
    def several(self, tag, signal, sensor):
        return {"tag": tag, "sums": tf.reduce_sum(signal, 1), "sensor": sensor}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("published") / "servable", HalfPlusThree()
    tf.saved_model.save(model, str(folder), {"serving_default": model.one, "several": model.several})
    with Server(Served(folder), "half_plus_three", port=0) as server:
        yield server


def test_the_example_of_the_page_is_answered_as_on_the_page(published):
    path = "/v1/models/half_plus_three:predict"
    assert call(published, "POST", path, {"instances": [1.0, 2.0, 5.0]}) == (200, {"predictions": [3.5, 4.0, 5.5]})
    assert call(published, "POST", path, {"inputs": [1.0, 2.0, 5.0]}) == (200, {"outputs": [3.5, 4.0, 5.5]})


def test_rows_and_columns_of_several_inputs_are_those_of_the_page(published):
    path, name = "/v1/models/half_plus_three:predict", {"signature_name": "several"}
    rows = [
        {"tag": "foo", "signal": [1, 2, 3, 4, 5], "sensor": [[1, 2], [3, 4]]},
        {"tag": "bar", "signal": [3, 4, 1, 2, 5], "sensor": [[4, 5], [6, 8]]},
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    response = respond(published.served, "several", **{n: np.array(v) if n != "tag" else v for n, v in columns.items()})
    assert call(published, "POST", path, {**name, "instances": rows}) == (200, row_format(response))
    assert call(published, "POST", path, {**name, "inputs": columns}) == (200, columnar_format(response))


@pytest.mark.parametrize("what, body", [("recommender:predict", {}), ("half:predict", {"instances": [1.0]})])
def test_an_error_is_an_object_with_its_words(server, what, body):
    status, found = call(server, "POST", f"/v1/models/{what}", body)
    assert status in (400, 404) and list(found) == ["error"] and isinstance(found["error"], str)


# The recipe.


def test_the_model_config_of_the_page_is_one_and_fits_its_command():
    (text,) = re.findall(r"```proto\n(.*?)```", PAGE, re.S)
    (model,) = text_format.Parse(text, ModelServerConfig()).model_config_list.config
    (command,) = re.findall(r"```bash\n(docker run .*?)```", PAGE, re.S)
    assert model.model_platform == "tensorflow" and model.name == "recommender"
    assert f"/release/servable:{model.base_path}/1:ro" in command and "-p 127.0.0.1:8501:8501" in command
    assert "/models.config:/models/models.config:ro" in command
    assert "--model_config_file=/models/models.config" in command
    (question,) = re.findall(r"curl -d '(.*?)' http://127.0.0.1:8501/v1/models/recommender:predict", PAGE)
    assert list(json.loads(question)) == ["instances"]
