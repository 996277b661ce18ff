"""Deep and cross network: products of features, made by a layer that is there for it.

Public original: keras-rs, examples/dcn.py (lookups, a table a feature, `FeatureCross`, dense layers, AdamW).
Lines changed besides the data: -2 +3.
"""

import keras
import keras_rs
import numpy as np

import tfdp_rec  # new

# A rating from 0 to 1: how good a movie is, and which occupation likes which kind.
MOVIES, OCCUPATIONS, AGES, ROWS = 40, 8, 6, 4_000
rng = np.random.default_rng(0)
x = {
    "movie_id": rng.integers(MOVIES, size=ROWS).astype("int32"),
    "occupation": rng.integers(OCCUPATIONS, size=ROWS).astype("int32"),
    "age": rng.integers(AGES, size=ROWS).astype("int32"),
}
genre, liking, quality = rng.integers(3, size=MOVIES), rng.normal(size=[OCCUPATIONS, 3]), rng.normal(size=MOVIES)
rating = 2 * quality[x["movie_id"]] + liking[x["occupation"], genre[x["movie_id"]]]
y = (1 / (1 + np.exp(-rating))).astype("float32")[:, None]
test_x, test_y = {name: column[:500] for name, column in x.items()}, y[:500]
SIZES = {"movie_id": MOVIES, "occupation": OCCUPATIONS, "age": AGES}


# was: class DCN(keras.Model):
class DCN(tfdp_rec.PrivateModel):
    """A row a feature, their cross, and layers upon it."""

    def __init__(self, sizes, width=8, projection_dim=None, **kwargs):
        super().__init__(**kwargs)
        self.sizes, self.width, self.projection_dim = dict(sizes), width, projection_dim
        self.tables = [keras.layers.Embedding(size, width) for size in sizes.values()]
        self.cross_layer = keras_rs.layers.FeatureCross(projection_dim=projection_dim)
        self.dense_layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(32, activation="relu")]
        self.output_layer = keras.layers.Dense(1)

    def call(self, inputs):
        x = keras.ops.concatenate([table(inputs[name]) for name, table in zip(self.sizes, self.tables)], axis=1)
        x = self.cross_layer(x)
        for dense_layer in self.dense_layers:
            x = dense_layer(x)
        return self.output_layer(x)

    def get_config(self):
        return {"sizes": self.sizes, "width": self.width, "projection_dim": self.projection_dim}


model = DCN(SIZES, projection_dim=4)
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=0.01),
    loss=keras.losses.MeanSquaredError(),
    metrics=[keras.metrics.RootMeanSquaredError()],
)
# was: model.fit(x, y, batch_size=200, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=5).fit()

predictions = model.predict({name: column[:3] for name, column in x.items()})
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"DCN": DCN})
model.export("servable")
