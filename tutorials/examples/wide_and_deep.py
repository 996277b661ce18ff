"""Wide, deep and cross: a linear part, a deep part and products of features, of records with names and numbers.

Public original: keras.io, structured_data/wide_deep_cross_networks.py (a functional model: lookups, tables, batch
normalisation, Adam).
Lines changed besides the data: -3 +4: batch normalisation mixes the examples of a batch and is refused.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp_rec  # new

# Patches of forest: numbers, names, and one of three kinds of tree.
AREAS, SOILS, ROWS = ["Rawah", "Neota", "Comanche"], [f"soil_{n}" for n in range(12)], 4_000
rng = np.random.default_rng(0)
area, soil, numbers = rng.integers(3, size=ROWS), rng.integers(12, size=ROWS), rng.normal(size=[ROWS, 4])
x = {"area": np.array(AREAS)[area], "soil": np.array(SOILS)[soil], "numbers": numbers.astype("float32")}
y = (numbers @ rng.normal(size=[4, 3]) + 2 * rng.normal(size=[3, 3])[area] + rng.normal(size=[12, 3])[soil]).argmax(1)
train = tf.data.Dataset.from_tensor_slices((x, y)).batch(265)
test = train.take(2)


def create_model(units=(32, 32), dropout=0.1):
    inputs = {
        "area": layers.Input([], dtype="string", name="area"),
        "soil": layers.Input([], dtype="string", name="soil"),
        "numbers": layers.Input([4], dtype="float32", name="numbers"),
    }
    one_hot, rows = [], []
    for name, known in {"area": AREAS, "soil": SOILS}.items():
        index = layers.StringLookup(vocabulary=known, num_oov_indices=0)(inputs[name])
        one_hot.append(layers.CategoryEncoding(len(known), output_mode="one_hot")(index))
        rows.append(layers.Embedding(len(known), 4)(index))

    wide = layers.Concatenate()([*one_hot, inputs["numbers"]])
    # was: wide = layers.BatchNormalization()(wide)
    wide = layers.LayerNormalization()(wide)

    crossed = first = deep = layers.Concatenate()([*rows, inputs["numbers"]])
    for _ in units:
        crossed = first * layers.Dense(first.shape[-1])(crossed) + crossed
    for width in units:
        deep = layers.Dropout(dropout)(layers.ReLU()(layers.Dense(width)(deep)))
    outputs = layers.Dense(3, activation="softmax")(layers.Concatenate()([wide, crossed, deep]))
    # was: return keras.Model(inputs=inputs, outputs=outputs)
    return tfdp_rec.PrivateModel(inputs=inputs, outputs=outputs)


model = create_model()
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.001),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
)
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=265, epochs=5).fit()

predictions = model.predict({name: tf.constant(column[:3]) for name, column in x.items()})
scores = model.evaluate(test, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
model.export("servable")
