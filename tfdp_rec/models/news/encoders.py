"""News encoders: from the public features of news to vectors.

    NRMS     self-attention over the title's words, pooled (Wu et al., EMNLP 2019)
    NAML     title and body by convolution and pooling, category and subcategory by a dense layer; the four
             views pooled (Wu et al., IJCAI 2019)
    PLM-NR   a text encoder of the caller's, pooled and projected (Wu et al., SIGIR 2021)

Each takes a dict of integer features, one row per news, and reads those it needs: `title` [N, T], `body`
[N, T'], `category` [N], `subcategory` [N]. 0 is padding everywhere.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.models.news.layers import AdditiveAttention, SelfAttentionPooling, token_mask, unit_table


@keras.saving.register_keras_serializable(package="tfdp_rec")
class NRMSEncoder(SavedByArguments, keras.layers.Layer):
    """Title words, multi-head self-attention, additive attention.

    Args:
        vocabulary_size: Number of token ids, padding included.
        embedding_dim: Width of a word vector.
        dim: Width of a news vector.
        num_heads: Attention heads.
        attention_units: Width of the pooling's hidden layer.
        dropout: Share dropped in training.

    Example:
        >>> import numpy as np
        >>> NRMSEncoder(50, 16, 8)({"title": np.ones((4, 6), "int32")}).shape
        TensorShape([4, 8])
    """

    reads = ("title",)

    def __init__(
        self,
        vocabulary_size: int,
        embedding_dim: int = 300,
        dim: int = 400,
        num_heads: int = 4,
        attention_units: int = 64,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.embedding_dim, self.dim = embedding_dim, dim
        self.words = unit_table(vocabulary_size, embedding_dim, "words")
        self.text = SelfAttentionPooling(
            num_heads, max(1, dim // num_heads), attention_units, dim, dropout, name="text"
        )

    def build(self, input_shape: Any) -> None:
        self.words.build(input_shape["title"])
        self.text.build((*input_shape["title"], self.embedding_dim))

    def call(self, inputs: dict[str, Any], training: bool = False) -> Any:
        """Features of N news -> [N, dim]."""
        title = inputs["title"]
        return self.text(self.words(title), mask=token_mask(title), training=training)


@keras.saving.register_keras_serializable(package="tfdp_rec")
class NAMLEncoder(SavedByArguments, keras.layers.Layer):
    """Four views of a news (title, body, category, subcategory), pooled by attention.

    Args:
        vocabulary_size: Number of token ids, padding included.
        num_categories: Number of category ids, padding included.
        num_subcategories: Number of subcategory ids, padding included.
        embedding_dim: Width of a word vector.
        dim: Width of a news vector; the number of convolution filters.
        category_dim: Width of a category vector.
        kernel_size: Words a filter sees.
        attention_units: Width of each pooling's hidden layer.
        dropout: Share dropped in training.

    Example:
        >>> import numpy as np
        >>> news = {"title": np.ones((4, 6), "int32"), "body": np.ones((4, 9), "int32"),
        ...         "category": np.ones(4, "int32"), "subcategory": np.ones(4, "int32")}
        >>> NAMLEncoder(50, 5, 9, embedding_dim=16, dim=8)(news).shape
        TensorShape([4, 8])
    """

    reads = ("title", "body", "category", "subcategory")

    def __init__(
        self,
        vocabulary_size: int,
        num_categories: int,
        num_subcategories: int,
        embedding_dim: int = 300,
        dim: int = 400,
        category_dim: int = 100,
        kernel_size: int = 3,
        attention_units: int = 64,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.embedding_dim, self.dim, self.category_dim = embedding_dim, dim, category_dim
        self.words = unit_table(vocabulary_size, embedding_dim, "words")
        self.convolutions = {
            view: keras.layers.Conv1D(dim, kernel_size, padding="same", activation="relu", name=f"{view}_cnn")
            for view in ("title", "body")
        }
        self.pools = {view: AdditiveAttention(attention_units, name=f"{view}_pool") for view in ("title", "body")}
        sizes = {"category": num_categories, "subcategory": num_subcategories}
        self.tables = {view: unit_table(size, category_dim, f"{view}_table") for view, size in sizes.items()}
        self.projections = {view: keras.layers.Dense(dim, activation="relu", name=f"{view}_dense") for view in sizes}
        self.views = AdditiveAttention(attention_units, name="views")
        self.drop = keras.layers.Dropout(dropout)

    def build(self, input_shape: Any) -> None:
        self.words.build(input_shape["title"])
        for view, convolution in self.convolutions.items():
            convolution.build((*input_shape[view], self.embedding_dim))
            self.pools[view].build((*input_shape[view], self.dim))
        for view, table in self.tables.items():
            table.build(input_shape[view])
            self.projections[view].build((*input_shape[view], self.category_dim))
        self.views.build((input_shape["category"][0], 4, self.dim))

    def _text(self, tokens: Any, view: str, training: bool) -> Any:
        mask = token_mask(tokens)
        # masked words are zeroed before the convolution, so its windows see no padding embedding
        words = self.drop(self.words(tokens), training=training) * ops.cast(mask[..., None], "float32")
        return self.pools[view](self.convolutions[view](words), mask=mask)

    def call(self, inputs: dict[str, Any], training: bool = False) -> Any:
        """Features of N news -> [N, dim]."""
        views = [self._text(inputs[view], view, training) for view in self.convolutions]
        views += [self.projections[view](table(inputs[view])) for view, table in self.tables.items()]
        return self.views(ops.stack(views, axis=1))


@keras.saving.register_keras_serializable(package="tfdp_rec")
class PLMEncoder(SavedByArguments, keras.layers.Layer):
    """A text encoder of the caller's over the title, additive attention, a projection.

    Args:
        backbone: A Keras model or layer that maps {"token_ids": [N, T], "padding_mask": [N, T]} to
            [N, T, h], as the backbones of keras-hub do; a dict with "sequence_output" will do too.
        dim: Width of a news vector.
        attention_units: Width of the pooling's hidden layer.

    Example:
        >>> import numpy as np
        >>> from tfdp_rec.models.news import tiny_transformer
        >>> encoder = PLMEncoder(tiny_transformer(vocabulary_size=50, max_length=6, width=16), dim=8)
        >>> encoder({"title": np.ones((4, 6), "int32")}).shape
        TensorShape([4, 8])
    """

    reads = ("title",)

    def __init__(self, backbone: keras.layers.Layer, dim: int = 400, attention_units: int = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(backbone, keras.layers.Layer):
            raise TypeError(f"backbone must be a Keras model or layer, got {type(backbone).__name__}.")
        self.backbone, self.dim = backbone, dim
        self.pool = AdditiveAttention(attention_units, name="pool")
        self.project = keras.layers.Dense(dim, name="project")

    def build(self, input_shape: Any) -> None:
        title = tuple(input_shape["title"])
        inputs = {
            "token_ids": keras.KerasTensor(title, dtype="int32"),
            "padding_mask": keras.KerasTensor(title, dtype="bool"),
        }
        states = _states(self.backbone(inputs))
        self.pool.build(states.shape)
        self.project.build((states.shape[0], states.shape[-1]))

    def call(self, inputs: dict[str, Any], training: bool = False) -> Any:
        """Features of N news -> [N, dim]."""
        mask = token_mask(inputs["title"])
        read = self.backbone({"token_ids": inputs["title"], "padding_mask": mask}, training=training)
        return self.project(self.pool(_states(read), mask=mask))


def _states(output: Any) -> Any:
    return output["sequence_output"] if isinstance(output, dict) else output
