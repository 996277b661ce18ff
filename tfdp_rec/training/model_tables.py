"""The tables of a model: those of its trainable variables that are read by rows only, found by a trace of its loss."""

from __future__ import annotations

from typing import Any

import keras

from tfdp_rec.core.ground.keras_internals import layers_within, outside_scopes
from tfdp_rec.core.mechanism.weights import may_be_table, refuse_unlike_others
from tfdp_rec.training.adapted_layers import refuse_adapted
from tfdp_rec.training.lookahead import PrunedReader, TableReader, trace_reader


class ModelTables:
    """Which trainable variables of one model are tables, and the building of an optimizer that knows it."""

    def __init__(self, model: Any):
        self.model = model
        self._paths: dict[str, None] | None = None
        self._reader: TableReader | None = None  # the last that was traced

    @property
    def are_known(self) -> bool:
        """Whether a batch was seen, or the tables were told."""
        return self._paths is not None

    def find(self, spec: Any) -> TableReader:
        """A function from a batch of an element spec to the ids that it reads, by table; traces the loss once."""
        paths, reader = trace_reader(self.model, spec)
        self._paths = dict.fromkeys(paths)
        self._reader = reader
        return reader

    def find_ids_ahead(self, batch: Any) -> TableReader | None:
        """What gives the ids that a batch is going to read, by table; None if that is not known ahead."""
        reader = self._reader
        return reader if isinstance(reader, PrunedReader) and reader.gives_ids_of(batch) else None

    def __contains__(self, variable: keras.Variable) -> bool:
        return variable.path in (self._paths or {})

    @property
    def numbers(self) -> list[int] | None:
        """Places of the tables among the trainable variables; None if they are not known."""
        # By place, since a loaded model may have other names.
        if not self.are_known:
            return None
        return [number for number, variable in enumerate(self.model.trainable_variables) if variable in self]

    def build(self, numbers: list[int]) -> None:
        """Builds the optimizer without a batch, for a model whose `numbers` are known."""
        variables = self.model.trainable_variables
        if max(numbers, default=-1) >= len(variables):
            raise ValueError(
                f"{type(self.model).__name__} has fewer weights when it is loaded than when it was saved, and they "
                "would stay at their first values: let its build(input_shape) build all its layers."
            )
        self._paths = {variables[number].path: None for number in numbers}
        self.build_optimizer()

    def build_optimizer(self) -> None:
        """Builds the model's optimizer, which shares the owner of the weights and their history from now on."""
        model, optimizer = self.model, self.model.optimizer
        refuse_adapted(model)
        self.refuse_unlike_others()
        with outside_scopes():  # of a strategy, in which each of its variables would have several copies
            with model.private_weights.in_step():  # Keras looks at variables whose rows another model may withhold
                optimizer.build(model.trainable_variables, self._paths)
            optimizer.privacy_history.add_weights(model.weights)
            if optimizer.privacy_history.snapshot().uses:  # what the weights are made of goes with them
                model.open_history()
            model.private_weights.add(optimizer, model)

    def refuse_unlike_others(self) -> None:
        """Refuses the model's optimizer beside those of other models on its tables, if noise would not be right."""
        tables = [each for each in self.model.trainable_variables if each in self]
        refuse_unlike_others(self.model.optimizer, self.model, tables)

    def may_change_rows(self, variable: keras.Variable) -> bool:
        """Whether `grow_into` takes a model in which the variable has another number of rows."""
        if self.are_known and variable.trainable and variable not in self:
            return False
        by_row = (layer for layer in layers_within(self.model) if may_be_table(layer))
        return any(variable is own for layer in by_row for own in layer.variables)
