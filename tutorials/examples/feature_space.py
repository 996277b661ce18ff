"""Structured data: numbers and names through Keras' `FeatureSpace`, then two dense layers.

Public original: keras.io, structured_data/structured_data_classification_with_feature_space.py (`FeatureSpace` with
one-hot names, buckets of age and crosses; Dense, Dropout, Dense; Adam).
Lines changed besides the data: -2 +3. What `adapt` learns it learns from data, without noise: adapt to public data,
or give the vocabularies and boundaries, as here.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

import tfdp_rec  # new

# Patients, and whether their heart is well.
THALS, ROWS = ["fixed", "normal", "reversible"], 4_000
rng = np.random.default_rng(0)
age, pressure, thal = rng.uniform(25, 80, ROWS), rng.normal(size=ROWS), rng.integers(3, size=ROWS)
raw = {"age": age.astype("float32"), "pressure": pressure.astype("float32"), "thal": np.array(THALS)[thal]}
y = (age / 20 + pressure + thal > 4).astype("float32")[:, None]
public = {"age": rng.uniform(25, 80, 200), "pressure": rng.normal(size=200), "thal": rng.choice(THALS, 200)}

space = FeatureSpace(
    features={
        "age": FeatureSpace.float_discretized(num_bins=8),
        "pressure": FeatureSpace.float_normalized(),
        "thal": FeatureSpace.string_categorical(num_oov_indices=0),
    },
    crosses=[FeatureSpace.cross(feature_names=("thal", "age"), crossing_dim=16)],
    output_mode="concat",
)
space.adapt(tf.data.Dataset.from_tensor_slices(public))
x = space(raw).numpy()
test_x, test_y = x[:500], y[:500]

encoded = keras.Input([x.shape[1]])
hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(32, activation="relu")(encoded))
# was: model = keras.Model(inputs=encoded, outputs=keras.layers.Dense(1, activation="sigmoid")(hidden))
model = tfdp_rec.PrivateModel(inputs=encoded, outputs=keras.layers.Dense(1, activation="sigmoid")(hidden))
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
# was: model.fit(x, y, batch_size=200, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=5).fit()

predictions = model.predict(x[:3])
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
model.export("servable")
