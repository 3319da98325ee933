"""Files and samples: readers refuse what is damaged, and no sample is lost between workers."""

import gzip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.tasks import make_task
from gossamer.tasks.images import read_cifar10, read_mnist
from gossamer.tasks.split import SPLITS, Order, make_sampler, shares

quick = settings(max_examples=50)
seeds = st.integers(min_value=-(2**31), max_value=2**63)


def idx(*shape, values):
    header = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape)
    return header + np.asarray(values, np.uint8).tobytes()


def write_mnist(directory, compressed=False):
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 3)):
        images = idx(count, 28, 28, values=rng.integers(256, size=(count, 28, 28)))
        labels = idx(count, values=np.arange(count))
        for name, content in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            path = directory / f"{part}-{name}{'.gz' if compressed else ''}"
            path.write_bytes(gzip.compress(content) if compressed else content)


def write_cifar10(directory):
    rng = np.random.default_rng(0)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    tables = {}
    for name in names:
        table = rng.integers(256, size=(2, 3073), dtype=np.uint8)
        table[:, 0] %= 10
        (directory / name).write_bytes(table.tobytes())
        tables[name] = table
    return tables


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_is_read_plain_and_compressed(tmp_path, compressed):
    """Both forms give bytes of shape [sample, 1, 28, 28] and the labels in order."""
    write_mnist(tmp_path, compressed)
    train, test = read_mnist(tmp_path)
    assert train.inputs.shape == (5, 1, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert train.targets.tolist() == [0, 1, 2, 3, 4]
    assert test.targets.tolist() == [0, 1, 2]
    first = np.random.default_rng(0).integers(256, size=(5, 28, 28))
    assert np.array_equal(train.inputs[:, 0].numpy(), first)


def test_the_mnist_task_runs_on_what_was_read(tmp_path):
    """Bytes go through the model to a finite loss with a gradient for every parameter."""
    write_mnist(tmp_path)
    task = make_task("mnist-lenet", data=tmp_path)
    torch.manual_seed(0)
    model = task.make_model()
    loss = task.loss(model(task.train.inputs), task.train.targets)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())


LABELS = "train-labels-idx1-ubyte"
IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (LABELS, None, rf"{LABELS}.gz does not exist; get the four MNIST IDX files from ossci"),
        (LABELS, b"", rf"{LABELS} is damaged: it starts with the bytes '', expected '00 00 08 01'"),
        (
            IMAGES,
            idx(5, values=range(5)),
            r"starts with the bytes '00 00 08 01', expected '00 00 08 03'",
        ),
        (IMAGES, idx(5, 28, 28, values=[])[:9], r"its header ends after 9 bytes"),
        (LABELS, idx(5, values=range(4)), r"it has 12 bytes, its header promises 13"),
        (LABELS, idx(5, values=range(6)), r"it has 14 bytes, its header promises 13"),
        (
            IMAGES,
            idx(2**32 - 1, 2**32 - 1, 28, values=[1]),
            r"it has 17 bytes, its header promises",
        ),
        (LABELS, idx(0, values=[]), r"it holds no labels"),
        (LABELS, idx(2, values=[3, 77]), r"it holds the label 77, expected 0 to 9"),
        (IMAGES, idx(5, 2, 2, values=range(20)), r"shape is \(5, 2, 2\), expected \(5, 28, 28\)"),
        (LABELS, idx(4, values=range(4)), r"shape is \(5, 28, 28\), expected \(4, 28, 28\)"),
    ],
)
def test_a_damaged_mnist_file_is_refused(tmp_path, name, content, sentence):
    """One sentence says which file, what was found in it and where to get a good one."""
    write_mnist(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence) as error:
        read_mnist(tmp_path)
    assert "get the four MNIST IDX files" in str(error.value)


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"text", lambda b: b[:-9] + bytes(9)]
)
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    """Truncated, foreign or corrupt: the file is named, with its size."""
    write_mnist(tmp_path, compressed=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    size = path.stat().st_size
    with pytest.raises(
        ConfigurationError, match=rf"{IMAGES}.gz is not a whole gzip file \({size} b"
    ):
        read_mnist(tmp_path)


def test_a_directory_in_place_of_a_file_is_refused(tmp_path):
    """The system's own reason is part of the sentence."""
    write_mnist(tmp_path)
    (tmp_path / LABELS).unlink()
    (tmp_path / LABELS).mkdir()
    with pytest.raises(ConfigurationError, match=rf"{LABELS} cannot be read \(Is a directory\)"):
        read_mnist(tmp_path)


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_its_folder_or_the_one_above(tmp_path, folder):
    """The five training files in order, then the test file, channel by channel."""
    (tmp_path / folder).mkdir(exist_ok=True)
    tables = write_cifar10(tmp_path / folder)
    train, test = read_cifar10(tmp_path, records=2)
    everything = np.concatenate([tables[f"data_batch_{n}.bin"] for n in range(1, 6)])
    assert train.targets.tolist() == everything[:, 0].tolist()
    assert np.array_equal(train.inputs.flatten(1).numpy(), everything[:, 1:])
    assert train.inputs.shape == (10, 3, 32, 32)
    assert test.targets.tolist() == tables["test_batch.bin"][:, 0].tolist()


def test_a_cifar10_file_of_the_wrong_size_is_refused(tmp_path):
    """The files have no header: the size is all there is to check, and 10,000 records are due."""
    write_cifar10(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"1.bin is damaged: it has 6146 bytes, expected 30730000"
    ):
        make_task("cifar10-resnet20", data=tmp_path)


def test_a_foreign_cifar10_label_is_refused(tmp_path):
    """A label beyond 9 means that this is CIFAR-100, or noise."""
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes([20]) * 6146)
    with pytest.raises(
        ConfigurationError, match=r"data_batch_3.bin is damaged: it holds the label 20"
    ):
        read_cifar10(tmp_path, records=2)


def test_a_missing_cifar10_file_is_named(tmp_path):
    """So that the user sees which file, and which archive holds it."""
    with pytest.raises(
        ConfigurationError, match=r"data_batch_1.bin does not exist; get cifar-10-bin"
    ):
        read_cifar10(tmp_path)
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(
        ConfigurationError, match=r"test_batch.bin does not exist; get cifar-10-bin"
    ):
        read_cifar10(tmp_path, records=2)


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-py"])
def test_pickled_cifar10_is_refused(tmp_path, folder):
    """A pickle can run any code, so it is never opened; the sentence names the other archive."""
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "data_batch_1").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ConfigurationError, match=r"never unpickled.*get cifar-10-binary.tar.gz"):
        read_cifar10(tmp_path)


@quick
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    part=st.floats(0, 1),
    split=st.sampled_from(
        ["shuffled", "sharded", "by_class", "dirichlet", "dirichlet:alpha=0.001"]
    ),
    seed=seeds,
)
def test_a_split_deals_every_sample_once(labels, part, split, seed):
    """Shares partition the samples, and nobody goes away empty, however skewed the split."""
    workers = 1 + int(part * (len(labels) - 1))
    dealt = shares(torch.tensor(labels), workers, split, seed)
    assert len(dealt) == workers
    assert all(len(share) > 0 and share.dtype == np.int64 for share in dealt)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(labels)))


def classes_of(split, workers=5):
    targets = torch.arange(1000) % 10
    return [set(targets[share].tolist()) for share in shares(targets, workers, split, seed=0)]


def test_splits_are_as_skewed_as_they_say():
    """By class each of five workers owns two of ten classes; dirichlet sharpens as alpha falls."""
    assert [len(classes) for classes in classes_of("by_class")] == [2] * 5
    assert [len(classes) for classes in classes_of("sharded")] == [10] * 5
    assert max(len(classes) for classes in classes_of("dirichlet:alpha=1000")) == 10
    assert max(len(classes) for classes in classes_of("dirichlet:alpha=0.001")) < 10


def test_equal_shares_differ_by_one_sample_at_most():
    """1437 samples on 4 workers: 360, 359, 359, 359."""
    dealt = shares(torch.zeros(1437, dtype=torch.int64), 4, "sharded", seed=0)
    assert sorted(len(share) for share in dealt) == [359, 359, 359, 360]


def test_splits_depend_on_the_seed():
    """The same seed deals the same shares, another seed others."""
    targets = torch.arange(100) % 10
    for split in SPLITS:
        one, same, other = (shares(targets, 4, split, seed) for seed in (1, 1, 2))
        assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("targets", "workers", "split", "sentence"),
    [
        (
            torch.zeros(9).long(),
            2,
            "shufled",
            r"unknown split 'shufled'; did you mean 'shuffled'\?",
        ),
        (torch.zeros(9).long(), 10, "sharded", r"each of 10 workers a sample, got 9 samples"),
        (torch.zeros(9).long(), 0, "sharded", r"workers must be at least 1, got 0"),
        (torch.zeros(9).long(), 2, "dirichlet:alpha=0", r"dirichlet: alpha must be .*, got 0.0"),
        (
            torch.zeros(9).long(),
            2,
            "by_class:alpha=1",
            r"split by_class takes no options, got 'alpha'",
        ),
        (torch.zeros(9, 4).long(), 2, "by_class", r"got targets of shape \(9, 4\)"),
        (torch.zeros(9), 2, "dirichlet", r"type torch.float32; use the split shuffled or sharded"),
    ],
)
def test_an_impossible_split_is_refused(targets, workers, split, sentence):
    """One sentence, before anything runs."""
    with pytest.raises(ConfigurationError, match=sentence):
        shares(targets, workers, split, 0)


@quick
@given(samples=st.integers(1, 30), batch=st.integers(1, 40), epochs=st.integers(1, 4), seed=seeds)
def test_an_order_covers_every_sample_once_an_epoch(samples, batch, epochs, seed):
    """Cut where you like: each run of `samples` draws is a permutation."""
    order = Order(samples, seed, batch)
    drawn = list[int]()
    while len(drawn) < samples * epochs:
        indices = order.next_batch()
        assert len(indices) == batch
        assert indices.dtype == np.int64
        drawn.extend(indices.tolist())
        assert order.drawn == len(drawn)
    for epoch in range(epochs):
        part = drawn[epoch * samples : (epoch + 1) * samples]
        assert sorted(part) == list(range(samples))


def test_an_order_changes_from_epoch_to_epoch_and_with_the_seed():
    """A new permutation each epoch; the same seed repeats all of them."""
    order, same, other = Order(100, 1, 100), Order(100, 1, 100), Order(100, 2, 100)
    first, second = order.next_batch(), order.next_batch()
    assert not np.array_equal(first, second)
    assert np.array_equal(first, same.next_batch())
    assert np.array_equal(second, same.next_batch())
    assert not np.array_equal(first, other.next_batch())


@quick
@given(
    deaths=st.lists(st.booleans(), max_size=40),
    split=st.sampled_from(["shuffled", "sharded"]),
    synchronous=st.booleans(),
    seed=seeds,
)
def test_what_is_given_back_is_not_lost(deaths, split, synchronous, seed):
    """However often a batch is given back, what is processed are whole epochs all the same."""
    sampler = make_sampler(torch.zeros(24).long(), 1, 4, split, seed, synchronous)
    processed = list[int]()
    while len(processed) < 3 * 24:
        indices = sampler.next(0)
        if deaths and deaths.pop():
            sampler.give_back(0, indices)
        else:
            processed.extend(indices.tolist())
    for start in range(0, 3 * 24, 24):
        assert sorted(processed[start : start + 24]) == list(range(24))


def test_several_batches_given_back_all_return():
    """Both batches come before anything new, the last first, and `drawn` counts them once."""
    order = Order(100, 0, 10)
    lost = [order.next_batch() for _ in range(2)]
    kept = order.next_batch()
    for indices in lost:
        order.give_back(indices)
    assert order.drawn == 10
    returned = [order.next_batch() for _ in range(2)]
    assert np.array_equal(returned, lost[::-1])
    assert order.drawn == 30
    assert not set(order.next_batch().tolist()) & set(np.concatenate([*lost, kept]).tolist())


@quick
@given(data=st.data(), workers=st.integers(1, 5), batch=st.integers(1, 7), seed=seeds)
def test_synchronous_rounds_do_not_depend_on_who_asks_first(data, workers, batch, seed):
    """Round t of worker i is the i-th slice of the t-th global batch of the shared order."""
    targets = torch.zeros(20).long()
    sampler = make_sampler(targets, workers, batch, "shuffled", seed, synchronous=True)
    whole = Order(20, seed, workers * batch)
    for _ in range(4):
        slices = np.split(whole.next_batch(), workers)
        for worker in data.draw(st.permutations(range(workers))):
            assert np.array_equal(sampler.next(worker), slices[worker])


@quick
@given(asked=st.lists(st.integers(0, 3), max_size=30), seed=seeds)
def test_asynchronous_workers_share_one_order(asked, seed):
    """Whoever asks gets the next batch of the same order."""
    sampler = make_sampler(torch.zeros(20).long(), 4, 3, "shuffled", seed, synchronous=False)
    order = Order(20, seed, 3)
    for worker in asked:
        assert np.array_equal(sampler.next(worker), order.next_batch())


def test_one_worker_gets_the_same_batches_either_way():
    """With one worker, synchronous and asynchronous are plain SGD on the same data."""
    targets = torch.zeros(50).long()
    shared, sharded = (make_sampler(targets, 1, 8, "shuffled", 3, sync) for sync in (False, True))
    for _ in range(20):
        assert np.array_equal(shared.next(0), sharded.next(0))


def test_a_batch_given_back_in_a_round_goes_to_the_next_who_asks():
    """A dead worker's batch is processed by a survivor, whose own slices are not skipped."""
    targets = torch.zeros(60).long()
    sampler = make_sampler(targets, 2, 5, "shuffled", 0, synchronous=True)
    order = Order(60, 0, 5)
    batches = [order.next_batch() for _ in range(4)]
    assert np.array_equal(sampler.next(0), batches[0])
    lost = sampler.next(1)
    sampler.give_back(1, lost)
    assert np.array_equal(sampler.next(0), batches[1])
    assert np.array_equal(sampler.next(0), batches[2])


@pytest.mark.parametrize("split", ["sharded", "by_class", "dirichlet:alpha=0.1"])
def test_an_owner_cycles_through_its_own_share(split):
    """Each pass covers the share once, in another order; nobody touches another's samples."""
    targets = torch.arange(90) % 9
    dealt = shares(targets, 3, split, 0)
    sampler = make_sampler(targets, 3, 1, split, 0, synchronous=False)
    for worker, share in enumerate(dealt):
        passes = [
            np.concatenate([sampler.next(worker) for _ in range(len(share))]) for _ in range(2)
        ]
        for one_pass in passes:
            assert np.array_equal(np.sort(one_pass), share)
        assert len(share) < 5 or not np.array_equal(*passes)


def test_a_share_smaller_than_the_batch_repeats():
    """A batch is always full, so that workers' gradients weigh the same."""
    sampler = make_sampler(torch.zeros(4).long(), 4, 6, "sharded", 0, synchronous=True)
    assert len(set(sampler.next(2).tolist())) == 1
    assert len(sampler.next(2)) == 6


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (3, 0)])
def test_an_empty_order_is_refused(samples, batch):
    """No samples, or batches of none, would never end."""
    with pytest.raises(ConfigurationError, match="at least 1, got 0"):
        Order(samples, 0, batch)
