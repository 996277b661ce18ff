"""What the tests of the trainer run, each in a process of its own: a process that has been a coordinator stays one.

python scenarios.py NAME [ARGUMENTS]    prints one line of JSON at the end
"""

import functools
import glob
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tfdp_rec
from tfdp_rec.core.mechanism.lazy_dp_sgd import LazyDPSGD
from tfdp_rec.core.mechanism.tables import Table
from tfdp_rec.distribute import Cluster, LocalCluster, ParameterServerTrainer, sections, worker_step
from tfdp_rec.distribute.attempts import LEDGER
from tfdp_rec.distribute.parameter_server import ParameterServer
from tfdp_rec.noise import KeyedNoise

# A model with two tables, one of them divided, and a dense kernel as large as a table that is; a fixed sequence of
# batches, one of them empty.

ROWS, UNITS, BATCH = 300, 64, 16
SIZES = (16, 9, 0, 20, 16, 1, 16, 30, 12, 16, 5, 16)


def ordinary_model(l2=0.0, rows=ROWS):
    draw = functools.partial(keras.initializers.RandomUniform, -0.5, 0.5)
    ids = keras.Input([3], dtype="int32")
    penalty = keras.regularizers.L2(l2) if l2 else None
    many = keras.layers.Embedding(rows, 8, draw(seed=1), penalty, name="many")(ids)
    few = keras.layers.Embedding(5, 4, name="few", embeddings_initializer=draw(seed=2))(ids % 5)
    both = keras.layers.Concatenate()([keras.layers.Flatten()(many), keras.layers.Flatten()(few)])
    hidden = keras.layers.Dense(8, "relu", name="hidden", kernel_initializer=draw(seed=3))(both)
    return tfdp_rec.PrivateModel(ids, keras.layers.Dense(1, name="out", kernel_initializer=draw(seed=4))(hidden))


def fixed_batches():
    generator = np.random.default_rng(0)
    x = tf.RaggedTensor.from_row_lengths(generator.integers(0, ROWS, [sum(SIZES), 3]).astype("int32"), SIZES)
    y = tf.RaggedTensor.from_row_lengths(generator.normal(size=[sum(SIZES), 1]).astype("float32"), SIZES)
    batch = lambda k: (tf.ensure_shape(x[k], [None, 3]), tf.ensure_shape(y[k], [None, 1]))  # noqa: E731
    return tf.data.Dataset.range(len(SIZES)).map(batch)


MECHANISMS = {
    "lazy": ("LazyDPSGD", {}),
    "lazy, real noise": ("LazyDPSGD", {"noise": None}),
    "lazy, step by step": ("LazyDPSGD", {"aggregate_noise": False}),
    "lazy, momentum, step by step": ("LazyDPSGD", {"aggregate_noise": False, "momentum": 0.6}),
    "lazy, momentum": ("LazyDPSGD", {"momentum": 0.9}),
    "lazy, Nesterov": ("LazyDPSGD", {"momentum": 0.8, "nesterov": True}),
    "lazy, decay": ("LazyDPSGD", {"weight_decay": 0.1}),
    "lazy, regularized": ("LazyDPSGD", {"weight_decay": 0.1, "l2": 0.2}),
    "lazy, schedule and Adam": ("LazyDPSGD", {"dense_optimizer": "adam", "schedule": True}),
    "lazy, normalised": ("LazyDPSGD", {"l2_norm_clip": "auto"}),
    "eager": ("DPSGD", {}),
    "eager, momentum": ("DPSGD", {"momentum": 0.9}),
    "eager, decay": ("DPSGD", {"weight_decay": 0.1}),
    "eager, regularized": ("DPSGD", {"l2": 0.2}),
    "eana": ("EANA", {}),
    "eana, momentum": ("EANA", {"momentum": 0.9}),
}


def optimizer_of(name):
    kind, options = MECHANISMS[name][0], dict(MECHANISMS[name][1])
    options.pop("l2", None)  # the model's
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, 3, 0.7) if options.pop("schedule", False) else 0.3
    options = {"noise": KeyedNoise(7), "l2_norm_clip": 1.0, **options}
    return getattr(tfdp_rec, kind)(rate, noise_multiplier=0.7, expected_batch_size=BATCH, **options)


def model_for(name):
    return ordinary_model(MECHANISMS[name][1].get("l2", 0.0))


def trainer_of(cluster, name, directory=None, skip=0, make=None, **options):
    sampling = tfdp_rec.data.PoissonSampling(UNITS, BATCH)

    def batches():
        sampling.graph_streams += 1  # as if they were the sampling's: these tests need to know each batch
        return fixed_batches().skip(skip)

    return ParameterServerTrainer(
        make or (lambda: model_for(name)), lambda: optimizer_of(name), batches, cluster.resolver(), loss="mse",
        sampling=sampling, min_shard_bytes=400, seconds_without_progress=30, checkpoint_directory=directory, **options,
    )  # fmt: skip


def on_one_machine(name, weights):
    model = model_for(name)
    model.compile(optimizer_of(name), loss="mse")
    model.set_weights(weights)
    model.fit(fixed_batches(), verbose=0)
    return model.get_weights()


def distance(some, others):
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


def traced():
    """Names of the functions that this process has told all servers of."""
    return set(context.context().list_function_names())


def equal(cluster, names):
    """One worker, two servers, against one machine."""
    found = {}
    for name in names:
        trainer = trainer_of(cluster, name)
        before = trainer.model().get_weights()
        trainer.fit(len(SIZES), steps_per_report=5, verbose=0)
        found[name] = compared(trainer, name, before)
    return found


def compared(trainer, name, before):
    """A trained cluster's release against one machine's training from the same weights."""
    after, known = trainer.model().get_weights(), traced()
    trainer.model()
    new = len(traced() - known)
    shards = {path: len(table.shards) for path, table in trainer._served.tables.items()}
    off = distance(after, on_one_machine(name, before))
    return {"off": off, "moved": distance(before, after), "shards": shards, "traced in release": new}


def refusal(act):
    """The words with which something is refused."""
    try:
        act()
    except (ValueError, TypeError, TimeoutError, OSError, RuntimeError, tf.errors.ResourceExhaustedError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return "not refused"


def resumed(cluster, directory):
    """Interrupted and resumed, against one machine without an interruption."""
    name = "lazy, momentum, step by step"  # whose noise does not hang on when it is settled, as a checkpoint does
    first = trainer_of(cluster, name, directory)
    before = first.model().get_weights()
    first.fit(7, verbose=0)
    beside = refusal(lambda: trainer_of(cluster, name, directory))
    first.close()
    second = trainer_of(cluster, name, directory, skip=7)
    refused = [refusal(act) for act in (lambda: second.fit(1, verbose=0), second.model, second.save)]
    refused.append(refusal(lambda: second.export(directory + "servable", by_shards=True)))
    sampling = tfdp_rec.data.PoissonSampling(UNITS, BATCH)
    accountant = tfdp_rec.privacy.Accountant(optimizer_of(name).dp_event(), sampling, 0.01, "rdp")
    attempts = second.resume(accountant)
    second.fit(len(SIZES) - 7, verbose=0)
    second.export(directory + "servable", by_shards=True)
    found = compared(second, name, before)
    folders = {name: oct(os.stat(os.path.join(directory, name)).st_mode)[-3:] for name in os.listdir(directory)}
    modes = [mode for name, mode in folders.items() if name.endswith(".cluster-checkpoint")]
    counts = {"attempts": attempts, "in all": len(SIZES)}
    counts["counted"] = sum(entry.steps for entry in accountant.entries)  # 5 of them on batches that no sampling drew
    second.close()
    os.remove(os.path.join(directory, LEDGER))
    forgotten = refusal(lambda: trainer_of(cluster, name, directory))
    refusals = {"refused": refused, "beside": beside, "forgotten": forgotten}
    return {**refusals, **counts, **found, "modes": modes}


def grown(cluster, directory):
    """A second day in one ledger: a model of more rows goes on from a release, also after an interruption."""
    # Its noise does not hang on when it is settled: a release in the middle changes nothing.
    name, more = "lazy, step by step", lambda: ordinary_model(rows=ROWS + 50)
    with tfdp_rec.privacy.Ledger(directory + ".jsonl", "example", tfdp_rec.privacy.Snapshot(UNITS, "x, y")) as ledger:
        with trainer_of(cluster, name, directory + "1", ledger=ledger) as trainer:
            trainer.fit(len(SIZES), verbose=0)
            released = trainer.model()
        began = released.grow_into(more())
        begun, steps = began.get_weights(), ledger.steps
        options = {"make": more, "ledger": ledger, "earlier_steps": steps, "begin_with": began}
        other = refusal(lambda: trainer_of(cluster, name, directory + "2", **{**options, "begin_with": released}))
        with trainer_of(cluster, name, directory + "2", **options) as trainer:
            carried = trainer.cluster_model.optimizer.privacy_history.snapshot().steps
            first = distance(trainer.model().get_weights(), begun)
            trainer.fit(7, verbose=0)
            part = trainer.model()
        again = {**options, "begin_with": part}  # as a job that was cut off after it wrote its model
        with trainer_of(cluster, name, directory + "2", skip=7, **again) as trainer:
            resumed = trainer.resume()
            undescribed = trainer.cluster_model.optimizer.privacy_history.undescribed_steps
            trainer.fit(len(SIZES) - 7, verbose=0)
            after = trainer.model()
        del options["begin_with"]
        late = refusal(lambda: trainer_of(cluster, name, directory + "2", **{**options, "earlier_steps": ledger.steps}))
    with trainer_of(cluster, name, directory + "3", make=more, begin_with=began) as trainer:
        trainer.fit(1, verbose=0)
    with trainer_of(cluster, name, directory + "3", make=more) as trainer:
        trainer.resume()
        kept = [entry.steps for entry in trainer.model().saved_history()]
    alone = ordinary_model(rows=ROWS + 50)
    alone.compile(optimizer_of(name), loss="mse")
    alone.set_weights(begun)
    alone.fit(fixed_batches(), verbose=0)
    return {
        "first": first, "off": distance(after.get_weights(), alone.get_weights()), "resumed": resumed, "other": other,
        "moved": distance(after.get_weights(), begun), "paid": ledger.steps, "carried": carried,
        "undescribed": undescribed, "kept": kept, "late": late,
    }  # fmt: skip


def released_twice(cluster, directory):
    """A release, a crash, a release, the second from a checkpoint of before the first: with real noise."""
    first = linear_trainer(cluster, "real noise", 2, directory)
    first.fit(5, verbose=0)
    (older,) = glob.glob(f"{directory}/*.cluster-checkpoint")
    shutil.copytree(older, f"{directory}.backup")
    released = first.model()
    before = released.get_weights()
    first.close()
    for newer in glob.glob(f"{directory}/*.cluster-checkpoint"):
        shutil.rmtree(newer)
    shutil.copytree(f"{directory}.backup", older)
    again = linear_trainer(cluster, "real noise", 2, directory, begin_with=released)  # which has these steps already
    again.resume()
    history = again.cluster_model.optimizer.privacy_history
    drawn = np.delete(before[0], [touched for touched, _ in IDS], axis=0) / (RATE * SIGMA * CLIP / 2 * 5**0.5)
    alike = float(np.corrcoef(drawn[: SIDE - 1].ravel(), drawn[SIDE - 1 :].ravel())[0, 1])
    off = distance(before, again.model().get_weights())
    counts = {"undescribed": history.undescribed_steps, "steps": history.snapshot().steps}
    return {"off": off, "spread": float(drawn.std()), "alike": alike, **counts}


# By shards.


class TwoTables(tfdp_rec.PrivateTraining, keras.Model):
    """Its answers read one of its tables, its loss both."""

    def __init__(self):
        super().__init__()
        self.read, self.unread = (keras.layers.Embedding(ROWS, 8, name=name) for name in ("read", "unread"))

    def call(self, ids):
        return tf.reduce_sum(self.read(ids), axis=[1, 2])

    def per_example_loss(self, data, training=True):
        ids, _ = tf.keras.utils.unpack_x_y_sample_weight(data)[:2]
        return self(ids) + tf.reduce_sum(self.unread(ids), axis=[1, 2])


class OwnExport(tfdp_rec.PrivateModel):
    def export(self, filepath):
        """Nothing."""


class ReadsInCall(tfdp_rec.PrivateModel):
    def call(self, inputs, training=None, mask=None):
        with tf.init_scope():
            total = self.get_layer("many").embeddings.numpy().sum()
        return super().call(inputs, training=training, mask=mask) + total


def answers_of(folder):
    """What a SavedModel answers, loaded by TensorFlow alone, for every row; and the sizes of what it wrote."""
    loaded = tf.saved_model.load(folder)
    ((name, spec),) = loaded.signatures["serving_default"].structured_input_signature[1].items()
    ids = tf.reshape(tf.range(ROWS, dtype=spec.dtype), [-1, 3])
    (answer,) = loaded.signatures["serving_default"](**{name: ids}).values()
    sizes = [os.path.getsize(name) for name in glob.glob(f"{folder}/variables/*.data*")]
    return answer.numpy().ravel(), sizes


def rows_in(piece, key, place):
    """The rows in a file of a server's."""
    return tf.raw_ops.RestoreV2(prefix=piece, tensor_names=[key], shape_and_slices=[place], dtypes=[tf.float32])[0]


def by_shards(cluster, directory):
    """Releases by shards, one of them cut short, against the release of the whole model; with real noise."""
    os.makedirs(directory)
    folders = [os.path.join(directory, name) for name in ("shards", "whole")]
    write, save = ParameterServer.write, ParameterServerTrainer.save
    trainer = trainer_of(cluster, "lazy, real noise")  # and no checkpoint, which would settle before the release
    found, seen, there = {}, [], []

    def write_one_piece(server, rows, *place):
        if seen:
            raise RuntimeError("a server died")
        write(server, rows, *place)
        seen.append(rows_in(*place).numpy())

    def save_and_look(self):
        there.append(os.path.exists(folders[0]))
        save(self)

    trainer.fit(7, verbose=0)
    for name, act in {"cut short": write_one_piece, "not shared": lambda *_: None}.items():
        ParameterServer.write = act
        found[name] = [refusal(lambda: trainer.export(folders[0], by_shards=True)), os.listdir(directory)]
    ParameterServer.write, ParameterServerTrainer.save = write, save_and_look
    trainer.export(folders[0], by_shards=True)
    ParameterServer.write, ParameterServerTrainer.save = write, save
    trainer.export(folders[1])
    released = trainer.model().get_weights()[0]
    found["another noise"] = float(np.abs(released[: len(seen[0])] - seen[0]).max())
    (ours, sizes), (whole, _) = map(answers_of, folders)
    found |= {"off": float(np.abs(ours - whole).max()), "spread": float(whole.std()), "sizes": sizes, "there": there}
    ParameterServer.write = write_one_piece
    refusal(lambda: trainer.export(folders[0], by_shards=True))
    ParameterServer.write = write
    found["older stays"] = bool((answers_of(folders[0])[0] == ours).all())
    found["address"] = refusal(lambda: trainer.export("gs://somewhere/else", by_shards=True))
    trainer._model_fn = lambda: tfdp_rec.models.TwoTower(range(1, ROWS), 8)
    found["reads"] = refusal(lambda: trainer.export(folders[0], by_shards=True))
    trainer._model_fn = lambda: OwnExport(*(lambda m: (m.inputs, m.outputs))(ordinary_model()))
    found["own export"] = refusal(lambda: trainer.export(folders[0], by_shards=True))
    trainer._model_fn = lambda: ReadsInCall(*(lambda m: (m.inputs, m.outputs))(ordinary_model()))
    found["reads in call"] = refusal(lambda: trainer.export(folders[0], by_shards=True))
    trainer.close()
    return found | {"unread": unread(cluster, directory)}


def unread(cluster, directory):
    """A table that no answer reads is not in the SavedModel."""
    folders = [os.path.join(directory, name) for name in ("some", "all")]
    trainer = trainer_of(cluster, "lazy", make=TwoTables)
    trainer.fit(3, verbose=0)
    trainer.export(folders[0], by_shards=True)
    trainer.export(folders[1])
    (some, sizes), (whole, _) = map(answers_of, folders)
    found = {"off": float(np.abs(some - whole).max()), "spread": float(whole.std()), "sizes": sizes}
    trainer.fit(3, verbose=0)  # and no checkpoint, which would settle
    trainer._served.settle = lambda: None  # as if these steps landed after it
    trainer.export(folders[0], by_shards=True)
    del trainer._served.settle
    trainer.export(folders[1])
    some, later = [answers_of(folder)[0] for folder in folders]
    return found | {"late": float(np.abs(some - later).max()), "moved": float(np.abs(later - whole).max())}


def killed_while_it_writes(directory):
    """A server is killed between two pieces of a release by shards; the training goes on, and releases."""
    folders, name = [os.path.join(directory, each) for each in ("shards", "whole")], "lazy, real noise"
    write = ParameterServer.write

    def write_and_kill(server, *arguments):
        write(server, *arguments)
        if cluster.pid("ps:1") is not None:
            cluster.kill("ps:1")

    with LocalCluster(1, 2) as cluster:
        trainer = trainer_of(cluster, name, os.path.join(directory, "training"))
        trainer.fit(5, verbose=0)
        ParameterServer.write = write_and_kill
        lost = refusal(lambda: trainer.export(folders[0], by_shards=True))
        ParameterServer.write = write
        left = os.listdir(directory)
        trainer.close()
        cluster.restart("ps:1")
        with trainer_of(cluster, name, os.path.join(directory, "training")) as again:
            again.resume()
            again.export(folders[0], by_shards=True)
            again.export(folders[1])
    some, whole = [answers_of(folder)[0] for folder in folders]
    return {"lost": lost, "left": left, "off": float(np.abs(some - whole).max()), "spread": float(whole.std())}


def by_shards_under_a_limit(directory, megabytes=700):
    """A release of a table four times as large as all memory that the chief may take, from before its trainer is."""
    if resource.getrlimit(resource.RLIMIT_STACK)[0] != 1 << 20:  # of each thread; a process takes it when it begins
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        os.environ["MALLOC_ARENA_MAX"] = "2"
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv])
    rows, width, folder = 4 * megabytes * 2**20 // 256 + 1, 64, os.path.join(directory, "servable")

    def model():
        ids = keras.Input([3], dtype="int32")
        read = keras.layers.Embedding(rows, width, embeddings_initializer="zeros")(ids)
        return tfdp_rec.PrivateModel(ids, keras.layers.Dense(1, name="out")(keras.layers.Flatten()(read)))

    def fetch(units):
        ids = tf.cast(units, tf.int32)[:, None] * tf.constant([1, 7919, 104729]) % rows
        return ids, tf.cast(units % 2, tf.float32)[:, None]

    sampling = tfdp_rec.data.PoissonSampling(UNITS, BATCH)
    basics = {"l2_norm_clip": 1.0, "noise_multiplier": 0.7, "expected_batch_size": BATCH}
    with LocalCluster(1, 2) as cluster:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes * 2**20, resource.RLIM_INFINITY))
        trainer = ParameterServerTrainer(
            model, lambda: tfdp_rec.LazyDPSGD(0.3, **basics), lambda: sampling.graph_batches(fetch),
            cluster.resolver(), loss="mse", sampling=sampling,
        )  # fmt: skip
        trainer.fit(5, verbose=0)
        trainer.export(folder, by_shards=True)
        refused = refusal(trainer.model)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        ids = tf.constant(np.random.default_rng(0).integers(0, rows, [50_000, 3]), tf.int32)
        whole = trainer.model()(ids).numpy()
    loaded = tf.saved_model.load(folder)
    answers = loaded.serve(ids).numpy()
    bytes_written = sum(os.path.getsize(name) for name in glob.glob(f"{folder}/variables/*"))
    off, spread = float(np.abs(answers - whole).max()), float(whole.std())
    return {"off": off, "spread": spread, "refused": refused, "written": bytes_written / (megabytes * 2**20)}


# A linear model: the gradient of the first row of an example is DIRECTION, whatever the weights are; its second row is
# read and has none. What a read gave shows in the loss, which is then compared with all states there can be.

SIDE, WIDTH, RATE, SIGMA, CLIP = 200, 8, 0.5, 1.0, 1.0
DIRECTION = np.linspace(0.05, 0.15, WIDTH).astype("float32")
IDS = [[0, 1], [2 * SIDE - 2, 2 * SIDE - 1]]  # the two rows of each unit, a server's each


class Linear(tfdp_rec.PrivateTraining, keras.Model):
    def __init__(self):
        super().__init__()
        self.items = keras.layers.Embedding(2 * SIDE, WIDTH, embeddings_initializer="zeros", name="items")

    def per_example_loss(self, data, training=True):
        rows = self.items(data["ids"])
        return tf.reduce_sum(DIRECTION * rows[:, 0] + tf.stop_gradient(rows[:, 1]), axis=1)


LINEAR = {
    "lazy": ("LazyDPSGD", {"aggregate_noise": False}),
    "lazy, momentum": ("LazyDPSGD", {"aggregate_noise": False, "momentum": 0.5}),
    "lazy, decay": ("LazyDPSGD", {"aggregate_noise": False, "weight_decay": 0.1}),
    "eager": ("DPSGD", {}),
    "eana": ("EANA", {}),
}


def linear_trainer(cluster, name, expected_batch, directory=None, **given):
    sampling = tfdp_rec.data.PoissonSampling(2, expected_batch)
    kind, options = LINEAR.get(name, ("LazyDPSGD", {}))

    def optimizer():
        noise = None if name == "real noise" else KeyedNoise(3)
        return getattr(tfdp_rec, kind)(
            RATE, l2_norm_clip=CLIP, noise_multiplier=SIGMA, expected_batch_size=expected_batch, noise=noise, **options
        )

    return ParameterServerTrainer(
        Linear, optimizer, lambda: sampling.graph_batches(lambda i: {"ids": tf.gather(IDS, i), "unit": i}),
        cluster.resolver(), sampling=sampling, min_shard_bytes=1000, seconds_without_progress=30,
        checkpoint_directory=directory, **given,
    )  # fmt: skip


def noises(steps):
    """Of each step for each row, `[steps, rows, width]`."""
    one = lambda step: KeyedNoise(3).normal(0, tf.range(2 * SIDE, dtype=tf.int64), step, WIDTH)  # noqa: E731
    draw = tf.function(lambda n: tf.map_fn(one, n, fn_output_signature=tf.float64), autograph=False)
    return draw(tf.range(steps, dtype=tf.int64)).numpy()


def states(name, steps):
    """The table before each of some steps that all take both units, and at the end, one machine's."""
    options = LINEAR[name][1]
    momentum, keep = options.get("momentum", 0.0), 1 - RATE * options.get("weight_decay", 0.0)
    gradient = np.zeros([2 * SIDE, WIDTH])
    gradient[[touched for touched, _ in IDS]] = DIRECTION / 2
    noisy = np.isin(np.arange(2 * SIDE), IDS)[:, None] if name == "eana" else 1.0
    weight, velocity = np.zeros_like(gradient), np.zeros_like(gradient)
    found = [weight]
    for noise in noises(steps):
        velocity = momentum * velocity - RATE * (gradient + SIGMA * CLIP / 2 * noise * noisy)
        weight = keep * weight + velocity
        found.append(weight)
    return np.stack(found)


def reads(cluster, name, steps):
    """Every step takes both units. How many reads saw what no sequence of whole steps gives; the final state."""
    seen = []
    worker_step.finite_loss = lambda clipped: (clipped.losses[0], clipped.losses[1])  # of the units, not their sum
    trainer = linear_trainer(cluster, name, 2)
    trainer._rounds.progress.add = lambda losses, draw: seen.append(losses)
    trainer._rounds.progress.seconds = lambda: 0.0
    trainer.fit(steps, steps_per_report=steps, verbose=0)
    there, wrong = states(name, steps), 0
    for unit, (touched, read) in enumerate(IDS):
        losses = there[:, touched] @ DIRECTION + there[:, read].sum(axis=1)
        values = np.asarray(seen)[:, unit]
        off = np.abs(values[:, None] - losses[None]).min(axis=1)
        wrong += int((off > 1e-4 * (1 + np.abs(values))).sum())
    off = float(np.abs(trainer.model().get_weights()[0] - there[-1]).max())
    return {"reads": 2 * len(seen), "wrong": wrong, "final": off}


def sparse(cluster, steps):
    """LazyDPSGD on units that come by chance: many steps have nothing for a server, or nothing at all.

    How far the released table is from gradients times a whole number, and one noise for each step.
    """
    worker_step.finite_loss = _loss
    trainer = linear_trainer(cluster, "lazy", 1)
    trainer.fit(steps, steps_per_report=steps, verbose=0)
    clocks = [int(server.optimizer.step_number.numpy()) for server in trainer._served.servers]
    left = trainer.model().get_weights()[0] + RATE * SIGMA * CLIP * noises(steps).sum(axis=0)
    for row, _ in IDS:
        count = round(float(left[row] @ DIRECTION / (DIRECTION @ DIRECTION) / -RATE))
        left[row] += RATE * min(max(count, 0), steps) * DIRECTION
    return {"final": float(np.abs(left).max()), "clocks": clocks}


def budget(cluster):
    """Training stops at the last step that the budget has room for, between two reports or not."""
    trainer = linear_trainer(cluster, "real noise", 1)
    event = trainer.cluster_model.optimizer.dp_event()
    accountant = tfdp_rec.privacy.Accountant(event, trainer.sampling, 0.1, "rdp", allow_large_delta=True)
    most = accountant.max_steps(20.0)
    stop = tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=20.0)
    history = trainer.fit(10 * most, [stop], steps_per_report=4, verbose=0).history
    return {"attempts": trainer.attempts, "most": most, "counted": accountant.steps, "epsilon": history["epsilon"][-1]}


_loss, _land, _read = worker_step.finite_loss, ParameterServer._land, ParameterServer._read
_GRADIENTS = [(Table, "step"), (LazyDPSGD, "_step_rows")]  # where a server adds a gradient: eager mechanisms, lazy
_STEPS = [getattr(kind, name) for kind, name in _GRADIENTS]


def _gradients_wait(waiting):
    """From now on a server adds a gradient after the operations that `waiting()` makes."""

    def late(step):
        def waits(self, *arguments):
            with tf.control_dependencies(list(waiting())):
                return step(self, *arguments)

        return waits

    for (kind, name), step in zip(_GRADIENTS, _STEPS, strict=True):
        setattr(kind, name, late(step))


def _without_lock(self, body):
    return sections.on_server(self.device, body)


def _some_time(rounds=30):
    """Some milliseconds between a step's tick and its gradient, so that what can go wrong between them does."""
    square = tf.fill([200, 200], 1e-3)
    return tf.while_loop(lambda i, s: i < rounds, lambda i, s: (i + 1, s @ square), (0, square), parallel_iterations=1)


def _reads():
    """A queue on the server whose code asks: as long as the number of reads there."""
    return tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shapes=[[]], capacity=-1, shared_name="reads")


def _counted_read(self, rows):
    found = _read(self, rows)
    with tf.control_dependencies(list(found.values())):
        tf.raw_ops.QueueEnqueueV2(handle=_reads(), components=[0])
    return found


def _until_a_read(rounds=2000):
    """Waits for a read; two steps that wait for each other give up in time."""
    before, square = tf.raw_ops.QueueSizeV2(handle=_reads()), tf.fill([200, 200], 1e-3)

    def wait(i, size, square):
        return i + 1, tf.raw_ops.QueueSizeV2(handle=_reads()), square @ square

    return tf.while_loop(lambda i, size, _: (i < rounds) & (size == before), wait, (0, before, square))


def _tick_if_touched(self, gradients, settings, regularization):
    size = tf.add_n([tf.size(rows) for _, rows in gradients.values()])
    tf.cond(size > 0, lambda: _land(self, gradients, settings, regularization) or 0, lambda: 0)


def two_workers():
    """Invariants of the release, and a budget."""
    _gradients_wait(_some_time)
    with LocalCluster(2, 2) as cluster:
        return {"sparse": sparse(cluster, 40), "budget": budget(cluster)}


def broken():
    """The invariants where a server counts only steps that touch it, and where it has no lock."""
    _gradients_wait(_some_time)
    with LocalCluster(2, 2) as cluster:
        ParameterServer._land = _tick_if_touched
        found = {"tick if touched": sparse(cluster, 40)}
        ParameterServer._land, sections.Lock.section = _land, _without_lock
        ParameterServer._read = _counted_read
        _gradients_wait(_until_a_read)
        return found | {"no lock": reads(cluster, "lazy", 20)}


def two_workers_every_mechanism(steps):
    """The invariant of reads for each mechanism."""
    _gradients_wait(_some_time)
    with LocalCluster(2, 2) as cluster:
        return {name: reads(cluster, name, int(steps)) for name in LINEAR}


def absent():
    """A worker that is dead and stays dead, one that is back, and one that is frozen."""
    with LocalCluster(2, 2) as cluster:
        trainer = linear_trainer(cluster, "lazy", 2)
        trainer.fit(20, verbose=0)
        cluster.kill("worker:0")
        trainer.fit(60, verbose=0)
        without = trainer.attempts
        cluster.restart("worker:0")
        trainer.fit(60, verbose=0)
        os.kill(cluster.pid("worker:1"), signal.SIGSTOP)
        trainer._watch.patience = 5
        frozen = refusal(lambda: trainer.fit(60, verbose=0))
        os.kill(cluster.pid("worker:1"), signal.SIGCONT)
        trainer._watch.patience = 60
        trainer.fit(60, verbose=0)
        clocks = [int(server.optimizer.step_number.numpy()) for server in trainer._served.servers]
        found = {"without": without, "frozen": frozen, "attempts": trainer.attempts, "clocks": clocks}
        return found | frozen_server(cluster, trainer)


def frozen_server(cluster, trainer):
    """A server that is frozen while others wait for it: named in time, and Ctrl-C is heard."""
    before, trainer._watch.patience = trainer.model().get_weights(), 5
    os.kill(cluster.pid("ps:1"), signal.SIGSTOP)
    found = {"server frozen in model": refusal(trainer.model), "server frozen in fit": None, "interrupted": False}
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        trainer.model()
    except KeyboardInterrupt:  # before patience ends, or else this would be Silence
        found["interrupted"] = True
    found["server frozen in fit"] = refusal(lambda: trainer.fit(10, verbose=0))
    os.kill(cluster.pid("ps:1"), signal.SIGCONT)
    trainer._watch.patience = 60
    trainer.fit(10, verbose=0)
    return found | {"moved after": distance(before, trainer.model().get_weights())}


def killed_within_sections(kills, name):
    """Workers killed while servers are in sections, where these take up most of a step."""
    global WIDTH, DIRECTION  # wide rows, of which each tells by itself which steps are in it
    WIDTH, DIRECTION = 1024, np.linspace(0.5, 1.5, 1024).astype("float32") / 100  # shorter than the clip
    _gradients_wait(functools.partial(_some_time, rounds=500))
    chance, ended = random.Random(1), []
    with LocalCluster(2, 2) as cluster:
        trainer = linear_trainer(cluster, name, 2)
        trainer.fit(4, verbose=0)

        def killer():
            for _ in range(int(kills)):
                time.sleep(chance.uniform(0.2, 0.6))
                victim = f"worker:{chance.randrange(2)}"
                cluster.kill(victim)
                time.sleep(chance.uniform(0, 0.2))
                cluster.restart(victim)
            ended.append(True)

        thread = threading.Thread(target=killer)
        thread.start()
        while not ended:
            trainer.fit(4, verbose=0)  # a server left locked would end this with TimeoutError
        trainer.fit(4, verbose=0)
        clocks = [int(server.optimizer.step_number.numpy()) for server in trainer._served.servers]
        table, found = trainer.model().get_weights()[0], []
        for clock, (touched, read) in zip(clocks, IDS):
            noise, gradients = steps_in(table[touched], touched, clock, name)
            untouched = steps_in(table[read], read, clock, name)
            found.append({"clock": clock, "noise": noise, "gradients": gradients, "untouched": untouched})
        return {"attempts": trainer.attempts, "servers": found}


def steps_in(row, number, clock, name):
    """Of each of the steps on a clock, how often its noise is in a row; and how many gradients are.

    Under momentum a step's noise counts as much as it has moved the row by now, and a gradient as it may have: by which
    its coefficient is no whole number.
    """
    momentum = LINEAR[name][1].get("momentum", 0.0)
    one = lambda step: KeyedNoise(3).normal(0, tf.constant([number], tf.int64), step, WIDTH)[0]  # noqa: E731
    drawn = tf.map_fn(one, tf.range(clock, dtype=tf.int64), fn_output_signature=tf.float64)
    noise = drawn.numpy().T * (-RATE * SIGMA * CLIP / 2)
    moved = (1 - momentum ** np.arange(clock, 0, -1)) / (1 - momentum)
    columns = np.concatenate([noise * moved, DIRECTION[:, None] * (-RATE / 2)], axis=1)
    found, *_ = np.linalg.lstsq(columns, row.astype("float64"), rcond=None)
    return found[:-1].tolist(), float(found[-1])


def _devices(graph, seen):
    """Of all operations of a graph and of the functions it calls; but those that only hand out its results."""
    results = {tensor.op.name for tensor in graph.outputs}
    for operation in graph.get_operations():
        if operation.name not in results:
            yield operation.type, operation.device
    for name, definition in graph._functions.items():
        if name not in seen:
            seen.add(name)
            for node in definition.cached_definition.node_def:
                yield node.op, node.device


def noted_sections():
    """Has every section noted, with its device and graph, from now on."""
    noted, original = [], sections.on_server

    def on_server(device, body):
        def observed(*arguments):
            result = body(*arguments)
            noted.append((device, tf.compat.v1.get_default_graph()))
            return result

        return original(device, observed)

    sections.on_server = on_server
    return noted


def strays(noted):
    """Operations of sections that are not placed on their server."""
    found = []
    for device, graph in noted:
        for kind, where in _devices(graph, set()):
            # Reads of variables are placed where the variable is.
            if where != device and kind not in ("Placeholder", "NoOp", "ReadVariableOp"):
                found.append([kind, where, device])
    return found


class Mixing(tfdp_rec.PrivateModel):
    def per_example_loss(self, data, training=True):
        return tf.reduce_mean(super().per_example_loss(data, training)) + tf.zeros([tf.shape(data[1])[0]])


def refusals(cluster, dear=False):
    """What the trainer says to what it does not do: the cases that cost little, or the dear ones."""
    sampling = tfdp_rec.data.PoissonSampling(UNITS, BATCH)

    others = tfdp_rec.data.PoissonSampling(UNITS, BATCH)

    def drawn_by(scheme, first=0):
        rows = lambda i: (tf.cast(tf.stack([i, i, i], 1), tf.int32), tf.cast(i, tf.float32)[:, None])  # noqa: E731
        return scheme.graph_batches(lambda i: rows(i[first:]))

    drawn = functools.partial(drawn_by, sampling)

    def fit(trainer):
        accountant = tfdp_rec.privacy.Accountant(trainer.cluster_model.optimizer.dp_event(), sampling, 0.01, "rdp")
        trainer.fit(6, [tfdp_rec.callbacks.PrivacyBudget(accountant, 20.0)], verbose=0)

    def cached(trainer):
        """What is said of a draw used twice, and by an accountant of the model that has seen it."""
        said = refusal(lambda: fit(trainer))
        accountant = tfdp_rec.privacy.Accountant(trainer.cluster_model.optimizer.dp_event(), sampling, 0.01, "rdp")
        accountant.follow(trainer.cluster_model)
        return f"{said} {accountant.epsilon()}, since {accountant.void}"

    def trainer(model=ordinary_model, optimizer=lambda: optimizer_of("lazy"), batches=drawn, **options):
        given = {"loss": "mse", "sampling": sampling, "min_shard_bytes": 1000, **options}
        return ParameterServerTrainer(model, optimizer, batches, cluster.resolver(), **given)

    basics = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": BATCH}
    vote = {"contribution_clip": 1.0, "contribution_noise_multiplier": 1.0, "threshold": 1.0}
    plain = lambda **options: tfdp_rec.LazyDPSGD(0.1, **{**basics, **options})  # noqa: E731
    survey = lambda: tfdp_rec.AdaFEST(0.1, **basics, **vote)  # noqa: E731
    mixing = lambda: Mixing(*(lambda m: (m.inputs, m.outputs))(ordinary_model()))  # noqa: E731

    def dropping():
        inputs = keras.Input([3], dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(40, 2)(inputs))
        return tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(hidden)))

    def small():
        inputs = keras.Input([3], dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 4)(inputs))
        return tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(hidden))

    good = functools.cache(lambda: trainer(small))
    in_order = tfdp_rec.data.FixedOrder(UNITS, BATCH)
    checkpoint = tfdp_rec.callbacks.TrainingCheckpoint(tempfile.mkdtemp())
    deserted = Cluster({"worker": ["127.0.0.1:9"], "ps": [cluster.cluster.servers[0]]}).resolver()
    alone = lambda: ParameterServerTrainer(  # noqa: E731
        ordinary_model, lambda: optimizer_of("lazy"), drawn, deserted, sampling=sampling, seconds_to_connect=0.2
    )
    refused = {
        "deserted": alone,
        "AdaFEST": lambda: trainer(optimizer=survey),
        "Adam": lambda: trainer(optimizer=keras.optimizers.Adam),
        "regularizer": lambda: trainer(lambda: ordinary_model(0.1), lambda: tfdp_rec.EANA(0.1, **basics)),
        "random layer": lambda: trainer(model=dropping),
        "secure": lambda: trainer(optimizer=lambda: plain(secure=True)),
        "no sampling": lambda: trainer(sampling=None),
        "in order": lambda: trainer(sampling=in_order),
        "other data": lambda: trainer(batches=fixed_batches),
        "plain Keras": lambda: trainer(model=lambda: keras.Sequential([keras.layers.Dense(1)])),
        "mixing": lambda: trainer(model=mixing).fit(1, verbose=0),
        "whole read": lambda: good().cluster_model.get_weights(),
        "another batch size": lambda: trainer(optimizer=lambda: plain(expected_batch_size=2 * BATCH)),
        "BackupAndRestore": lambda: good().fit(1, [keras.callbacks.BackupAndRestore(tempfile.mkdtemp())], verbose=0),
        "TrainingCheckpoint": lambda: good().fit(1, [checkpoint], verbose=0),
        "resume": lambda: good().resume(),
        "another sampling": lambda: trainer(batches=lambda: (drawn(), drawn_by(others))[1]),
        "no proof": lambda: fit(trainer(small, plain, lambda: drawn().map(lambda e: e.batch))),
        "ends": lambda: trainer_of(cluster, "lazy").fit(100, verbose=0),
        "batched anew": lambda: trainer(small, batches=lambda: drawn().unbatch().batch(4)).fit(6, verbose=0),
        "rows dropped": lambda: trainer(small, batches=lambda: drawn(first=1)).fit(6, verbose=0),
        "mapped": lambda: trainer(small, batches=lambda: drawn().map(lambda e: e)),
    }
    found = {name: refusal(act) for name, act in refused.items() if (name in DEAR) == dear}
    if dear:
        found["cached"] = cached(trainer(small, plain, lambda: drawn().take(2).cache().repeat()))
    return found


DEAR = ("ends", "batched anew", "rows dropped", "mixing", "no proof", "cached")  # each traces a step of its own


def one_worker(directory):
    """An interrupted training against one machine's, and what is refused at once."""
    noted = noted_sections()
    with LocalCluster(1, 2) as cluster:
        found = {"resumed": resumed(cluster, os.path.join(directory, "resumed"))}
        found |= {"sections": len(noted), "strays": strays(noted)}
        return found | {"by shards": by_shards(cluster, f"{directory}/by shards"), "refusals": refusals(cluster)}


def released_models(directory):
    """What goes on from a released model, after a training on this machine."""
    trained_before_connecting()
    with LocalCluster(1, 2) as cluster:
        found = {"released twice": released_twice(cluster, os.path.join(directory, "released"))}
        return found | {"grown": grown(cluster, os.path.join(directory, "grown"))}


def trained_before_connecting():
    """Trains on one machine, with real noise: the workers of a later cluster have no function that is traced here."""
    model = ordinary_model()
    basics = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": BATCH}
    model.compile(tfdp_rec.LazyDPSGD(0.1, **basics), loss="mse")
    model.fit(fixed_batches().take(2), verbose=0)


def beyond_strangers(description, folder, steps):
    """A training that waits in the middle until strangers have tried, against one machine's; and its steps a second."""
    trainer, steps = linear_trainer(Cluster.read(description), "lazy", 2), int(steps)
    trainer.fit(20, steps_per_report=20, verbose=0)
    began = time.monotonic()
    trainer.fit(steps, steps_per_report=steps, verbose=0)
    rate = steps / (time.monotonic() - began)
    print("trained", flush=True)
    while not os.path.exists(os.path.join(folder, "go on")):
        time.sleep(0.05)
    trainer.fit(20, steps_per_report=20, verbose=0)
    there = states("lazy", steps + 40)
    off, moved = distance(trainer.model().get_weights(), [there[-1]]), float(np.abs(there[-1]).max())
    return {"off": off, "moved": moved, "attempts": trainer.attempts, "rate": rate}


def refused_dearly():
    """What takes a training to be refused."""
    with LocalCluster(1, 2) as cluster:
        return {"refusals": refusals(cluster, dear=True)}


def every_mechanism():
    """One worker against one machine, for each."""
    with LocalCluster(1, 2) as cluster:
        return equal(cluster, [name for name in MECHANISMS if name != "lazy, real noise"])


def end_with(parent):
    """Ends this process when the test that started it is gone, however it went; the cluster then ends by itself."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    result = globals()[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result), flush=True)
    os._exit(0)  # threads of the coordinator would wait for servers that are gone
