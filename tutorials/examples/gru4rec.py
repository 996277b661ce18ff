"""GRU4Rec: clicks in order, as one-hot vectors through a GRU, tell which click is next.

Public original: KerasGRU4Rec, model/gru4rec.py (a functional model: a GRU that carries its state from batch to batch,
dropout, a softmax over all items; categorical cross-entropy, Adam, a loop of `train_on_batch`). Mended for Keras 3:
`lr` is `learning_rate`, and an optimizer has no `decay`.
Lines changed besides the data: -9 +6: batches of one click of many sessions, whose state goes on from the batch before,
give no example a loss of its own; here an example is a whole session, and its GRU begins anew.
"""

import keras
import numpy as np
from keras.layers import GRU, Dense, Dropout, Input
from keras.utils import to_categorical

import tfdp_rec  # new

# Sessions of items 0 to 79 of one of eight kinds each; popular ones come more often.
KINDS, ITEMS, ROWS, TESTS, LENGTH, BATCH = 8, 80, 12_800, 512, 8, 256
rng = np.random.default_rng(0)
position = (ITEMS // KINDS * rng.random([ROWS, LENGTH + 1]) ** 1.5).astype("int64")
sessions = rng.integers(KINDS, size=[ROWS, 1]) + KINDS * position
x, y = to_categorical(sessions[:, :-1], ITEMS), to_categorical(sessions[:, 1:], ITEMS)
test_x, test_y, x, y = x[:TESTS], y[:TESTS], x[TESTS:], y[TESTS:]


def create_model(train_n_items, hidden_units=100):
    # was: inputs = Input(batch_shape=(BATCH, 1, train_n_items))
    inputs = Input(shape=(LENGTH, train_n_items))
    # was: gru, gru_states = GRU(hidden_units, stateful=True, return_state=True, name="GRU")(inputs)
    gru = GRU(hidden_units, return_sequences=True, name="GRU")(inputs)
    drop2 = Dropout(0.25)(gru)
    predictions = Dense(train_n_items, activation="softmax")(drop2)
    # was: return keras.Model(inputs=inputs, outputs=[predictions])
    return tfdp_rec.PrivateModel(inputs=inputs, outputs=[predictions])


model = create_model(ITEMS)
model.compile(loss=keras.losses.CategoricalCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
# was: for start in [*range(0, len(x), BATCH)] * 5:
# was:     model.get_layer("GRU").reset_states()
# was:     for t in range(LENGTH):
# was:         model.train_on_batch(x[start : start + BATCH, t : t + 1], y[start : start + BATCH, t])
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=256, epochs=5).fit()

# was: model.get_layer("GRU").reset_states()
# was: predictions = [model.predict(test_x[:BATCH, t : t + 1], BATCH) for t in range(LENGTH)][-1]
predictions = model.predict(test_x[:BATCH])[:, -1]
wanted, popular = test_y[:BATCH, -1].argmax(-1), y.sum((0, 1)).argsort()
scores = {"recall@10": np.mean((predictions.argsort()[:, -10:] == wanted[:, None]).any(1))}
scores["trivial"] = np.mean(np.isin(wanted, popular[-10:]))
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
model.export("servable")
