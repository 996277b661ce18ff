"""Requests and answers in the JSON of TensorFlow Serving's REST interface, for one SavedModel.

    {"instances": [...]}   one entry a row: a value, or an object with a value for each input
        -> {"predictions": [...]}   one entry a row: an object with each output, or the value if there is one output
    {"inputs": ...}        an object with a tensor for each input, or the tensor if there is one input
        -> {"outputs": ...}         an object with a tensor for each output, or the tensor if there is one output

`signature_name` selects the signature. Histories of a recommender may differ in length; other lists beside each other
may not.

Reference:
    TensorFlow Serving, RESTful API (predict, model status, model metadata).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from google.protobuf.json_format import MessageToDict
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from tfdp_rec.datasets.log import NO_ITEM
from tfdp_rec.serving.item_index import open_signatures

DEFAULT, _SAVED_MODEL = "serving_default", "saved_model.pb"
_MOST_DEPTH = 32  # of lists in lists
_MOST_CELLS = 2**22  # histories times the longest of them, or the items allowed
_ROWS_AT_ONCE, _CELLS_AT_ONCE = 64, 2**16  # that the model answers: the memory of an answer
_MOST_VALUES = 2**17  # of an answer, each some tens of bytes of JSON
_NO_ITEM = {tf.string: "", tf.int64: NO_ITEM}  # they fill up short histories
_KINDS = {tf.string: "texts", tf.int64: "whole numbers", tf.int32: "whole numbers", tf.float32: "numbers"}


class BadRequest(ValueError):
    """A request that cannot be answered; the message says why."""

    def __init__(self, words: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST):
        super().__init__(words)
        self.status = status


def parse(text: bytes | bytearray) -> Any:
    """A request as JSON, its lists not nested too deep for the recursive functions that read them."""
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise BadRequest(f"The request is not JSON: {_shorten(problem)}.") from None
    level = [found]
    for _ in range(_MOST_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [part for parts in inner for part in parts]
    if level:
        raise BadRequest(f"The request has lists more than {_MOST_DEPTH} deep.")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object has a name twice.")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number.")


class Served:
    """A SavedModel that answers requests in JSON.

    Args:
        folder: Folder of the SavedModel.
        most_rows: Largest number of histories in a request.
        most_answers: Largest number of items in an answer, where the request gives one.

    Raises:
        FileNotFoundError: The folder holds no SavedModel.
        ValueError: The index in the folder is broken, or another model's.
        ImportError: There is an index, and the extra `ann` is missing.
    """

    def __init__(self, folder: str | os.PathLike[str], most_rows: int = 1024, most_answers: int = 1000):
        if not (Path(folder) / _SAVED_MODEL).is_file():
            raise FileNotFoundError(f"{Path(folder).parent} holds no exported model (expected {folder}).")
        self._loaded = tf.saved_model.load(str(folder))
        self._described = _read_signatures(Path(folder) / _SAVED_MODEL)
        self._signatures = open_signatures(self._loaded, folder)
        self._recommends = "ragged" in self._signatures  # by `own_ids.py`
        self.most_rows, self.most_answers = most_rows, most_answers

    def predict(self, request: Any) -> dict[str, Any]:
        """The answer to a request.

        Args:
            request: Request as parsed JSON.

        Raises:
            BadRequest: The request has another form, or does not fit this model.
        """
        if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
            raise BadRequest('Send a JSON object with "instances" (a list of rows) or "inputs" (tensors), not both.')
        signature = self._signature(request.get("signature_name", DEFAULT))
        specs = inputs_of(signature)
        if "inputs" in request:
            outputs = self._answer(signature, specs, _columns(request["inputs"], specs))
            return {"outputs": next(iter(outputs.values())) if len(outputs) == 1 else outputs}
        rows = request["instances"]
        outputs = self._answer(signature, specs, _columns_of_rows(rows, specs))
        return {"predictions": _rows(outputs, len(rows))}

    def metadata(self) -> dict[str, Any]:
        """The signatures, as TensorFlow Serving lists them."""
        return {"signature_def": self._described}

    def _signature(self, name: Any) -> Any:
        if not isinstance(name, str) or name not in self._signatures:
            known = ", ".join(sorted(self._signatures))
            raise BadRequest(f"There is no signature {repr(name)[:60]}; there are {known}.")
        return self._signatures[name]

    def _answer(self, signature: Any, specs: Mapping[str, tf.TensorSpec], given: Mapping[str, Any]) -> dict[str, Any]:
        if set(given) != set(specs):
            got = ", ".join(given) or "nothing"
            raise BadRequest(f"This signature takes {', '.join(specs)}, got {got[:200]}.")
        tensors = {
            name: (_to_ragged if self._recommends and name == "history" else _tensor)(name, given[name], spec)
            for name, spec in specs.items()
        }
        self._refuse_too_much(tensors)
        try:
            found = [signature(**some) for some in (_slices(tensors) if self._recommends else [tensors])]
        except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as problem:
            raise BadRequest(f"The model refuses the request: {_shorten(problem)}.") from problem
        outputs = found[0]
        if len(found) > 1:
            outputs = {name: tf.concat([each[name] for each in found], axis=0) for name in outputs}
        if sum(int(tf.size(value)) for value in outputs.values()) > _MOST_VALUES:
            raise BadRequest("The answer is too long: ask for fewer rows at once.")
        return {name: _plain(value) for name, value in sorted(outputs.items())}

    def _refuse_too_much(self, tensors: Mapping[str, Any]) -> None:
        # Before the model runs: a request of few bytes may ask for an answer of gigabytes, by k or by lengths.
        if self._recommends:
            lengths = tensors["lengths"] if "lengths" in tensors else tensors["history"].row_lengths()
            sizes = [(len(lengths), max([*lengths.numpy().tolist(), len(tensors.get("allowed", [])), 1]))]
        else:
            sizes = [tuple(value.shape) for value in tensors.values() if value.shape.rank == 2] or [(0, 0)]
        rows, columns = map(max, zip(*sizes))
        if rows > self.most_rows:
            raise BadRequest(f"{rows} histories in one request; at most {self.most_rows} are answered.")
        if rows * columns > _MOST_CELLS:
            raise BadRequest(f"{rows} histories of {columns} items are too much for one request: send several.")
        k = int(tensors.get("k", 1)) if self._recommends else 1
        if not 1 <= k <= self.most_answers:
            raise BadRequest(f"k must be between 1 and {self.most_answers}, got {k}.")
        if 3 * rows * k > _MOST_VALUES:
            raise BadRequest(f"{rows} times {k} items are too much for one answer: send several.")


def _slices(tensors: Mapping[str, Any]) -> Iterator[dict[str, tf.Tensor]]:
    """The same question of some histories at a time, to bound memory: they are filled up to the longest of them."""
    flat = "lengths" in tensors
    rows = tf.RaggedTensor.from_row_lengths(tensors["items"], tensors["lengths"]) if flat else tensors["history"]
    widths, start = np.maximum(rows.row_lengths(), len(tensors.get("allowed", []))), 0
    while start < max(1, len(widths)):
        widest = np.maximum.accumulate(widths[start : start + _ROWS_AT_ONCE])
        cells = widest * np.arange(1, len(widest) + 1)
        stop = start + max(1, int(np.searchsorted(cells, _CELLS_AT_ONCE, "right")))
        some, start = rows if stop - start >= len(widths) else rows[start:stop], stop  # a slice of all takes its time
        if flat:
            yield {**tensors, "items": some.values, "lengths": tf.cast(some.row_lengths(), tf.int32)}
        else:
            yield {**tensors, "history": some.to_tensor(_NO_ITEM[some.dtype])}


def inputs_of(signature: Any) -> dict[str, tf.TensorSpec]:
    """The inputs of a signature, by name."""
    return dict(sorted(signature.structured_input_signature[1].items()))


def _columns(given: Any, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    return {next(iter(specs)): given} if len(specs) == 1 else {}


def _columns_of_rows(rows: Any, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise BadRequest('"instances" must be a list of at least one row.')
    if not all(spec.shape.rank for spec in specs.values()):
        raise BadRequest(f'This signature takes {", ".join(specs)}, some of them not by row: send "inputs".')
    if len(specs) == 1 and not isinstance(rows[0], dict):
        return {next(iter(specs)): rows}
    if not all(isinstance(row, dict) and set(row) == set(specs) for row in rows):
        raise BadRequest(f"Each of the instances must be an object with {', '.join(specs)}.")
    return {name: [row[name] for row in rows] for name in specs}


def _to_ragged(name: str, histories: Any, spec: tf.TensorSpec) -> Any:
    """A ragged tensor from lists of different lengths."""
    if not isinstance(histories, list) or not all(isinstance(each, list) for each in histories):
        return _tensor(name, histories, spec)
    entries = _tensor(name, [entry for each in histories for entry in each], tf.TensorSpec([None], spec.dtype))
    return tf.RaggedTensor.from_row_lengths(entries, tf.constant([len(each) for each in histories], tf.int64))


def _tensor(name: str, value: Any, spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor from the lists of JSON."""
    shape: list[int] = []
    leaves = [value]
    for depth in range(spec.shape.rank):
        if not all(isinstance(each, list) for each in leaves):
            bare = json.dumps(next(each for each in leaves if not isinstance(each, list)))[:80]
            lacking = spec.shape.rank - depth
            raise BadRequest(
                f"{name} must be lists {spec.shape.rank} deep, got {depth} deep: {'[' * lacking}{bare}{']' * lacking} "
                f"in place of {bare}."
            )
        lengths = {len(each) for each in leaves} or {0}  # [] for no rows: JSON does not give the number of columns
        if len(lengths) > 1:
            raise BadRequest(
                f'{name} has lists of different lengths. Pad them as the model was trained: often with "" for texts, '
                "0 for whole numbers."
            )
        shape, leaves = [*shape, *lengths], [leaf for each in leaves for leaf in each]
    values = [_value(name, each, spec.dtype) for each in leaves]
    try:
        return tf.constant(values, spec.dtype, shape)
    except (ValueError, TypeError, OverflowError) as problem:
        kind = _KINDS.get(spec.dtype, spec.dtype.name)
        raise BadRequest(f"{name} must hold {kind}: {_shorten(problem)}.") from None


def _value(name: str, value: Any, kind: tf.DType) -> Any:
    wanted = (str,) if kind == tf.string else (int,) if kind.is_integer else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise BadRequest(f"{name} must hold {_KINDS.get(kind, kind.name)}, got {json.dumps(value)[:60]}.")
    if kind.is_integer and not kind.min <= value <= kind.max:  # TensorFlow would cut off the higher bits
        raise BadRequest(f"{name} must hold {_KINDS[kind]} of at most {8 * kind.size} bits, got {str(value)[:30]}.")
    return value


def _rows(outputs: Mapping[str, Any], count: int) -> list[Any]:
    if len(outputs) == 1:
        return list(next(iter(outputs.values())))
    return [{name: values[row] for name, values in outputs.items()} for row in range(count)]


def _plain(value: tf.Tensor) -> Any:
    found = value.numpy().tolist()
    return _text(found) if value.dtype == tf.string else found


def _text(value: Any) -> Any:
    return [_text(each) for each in value] if isinstance(value, list) else value.decode("utf-8", "replace")


def _shorten(problem: Exception) -> str:
    said = getattr(problem, "message", str(problem))
    said = said.replace("StringToNumberOp could not correctly convert string: ", "")
    return " ".join(said.split())[:160].rstrip(". ")


def _read_signatures(file: Path) -> dict[str, Any]:
    (graph,) = SavedModel.FromString(file.read_bytes()).meta_graphs
    found = sorted(graph.signature_def.items())
    plain = dict(preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {name: MessageToDict(signature, **plain) for name, signature in found}


def describe_status(is_ending: bool) -> dict[str, Any]:
    """Whether the one version of the model is there, as TensorFlow Serving says it."""
    state, code, words = "AVAILABLE", "OK", ""
    if is_ending:
        state, code, words = "UNLOADING", "UNAVAILABLE", "The server ends."
    status = {"error_code": code, "error_message": words}
    return {"model_version_status": [{"version": "1", "state": state, "status": status}]}
