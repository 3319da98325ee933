"""A small tree of images that the tests make, read as ImageNet is."""

import numpy as np
import pytest
import torch
from PIL import Image

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.tasks import make_task
from gossamer.tasks.keyed import key_of
from gossamer.tasks.published.image_folder import View
from gossamer.tasks.published.imagenet import among_five, colour_noise, imagenet_resnet

SPEC = "imagenet-resnet18:size=32,loaders=0"


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """Two classes: dark and bright images, of different shapes and formats."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 4)):
        for name, level in (("bright", 170), ("dark", 60)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                shape = (40 + 3 * number, 64, 3) if number % 2 else (64, 50, 3)
                pixels = generator.integers(level, level + 60, shape, dtype=np.uint8)
                suffix = "png" if number % 3 else "jpg"
                Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    return root


def test_models_have_the_published_sizes():
    """ResNet-18 has 11.69 million parameters, ResNet-50 25.56 million."""
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in imagenet_resnet(layers, 1000).parameters())
            for layers in (18, 50)
        ]
    assert sizes == [11_689_512, 25_557_032]


def test_a_view_is_a_crop_of_the_scaled_image(tmp_path):
    """A ramp from left to right, twice as wide as high: the crop in the middle has the middle half,
    that at the left the left half, and a mirror turns it round."""
    ramp = np.tile(np.arange(128, dtype=np.uint8)[None, :, None], (64, 1, 3))
    path = tmp_path / "ramp.png"
    Image.fromarray(ramp).save(path)
    middle = View(path, 32).read(32)[0, 0].astype(float)
    left = View(path, 32, across=0.0).read(32)[0, 0].astype(float)
    mirrored = View(path, 32, across=0.0, is_mirrored=True).read(32)[0, 0]
    assert middle[[0, -1]] == pytest.approx([32, 95], abs=2)
    assert left[[0, -1]] == pytest.approx([0, 63], abs=2)
    assert (mirrored == left[::-1]).all()


def test_views_depend_on_the_key_and_not_on_the_loaders(tree):
    """The same key gives the same images with and without processes, another key others; images of
    the test are always the same."""
    alone, helped = (
        make_task(f"imagenet-resnet18:size=32,loaders={count}", data=tree) for count in (0, 2)
    )
    index = torch.arange(12).view(2, 6)
    keys = torch.tensor([key_of(0, worker, 3) for worker in range(2)])
    one, targets = alone.train.at(index, keys)
    other, _ = helped.train.at(index, keys)
    assert torch.equal(one, other)
    assert one.shape == (2, 6, 3, 32, 32)
    assert targets.tolist() == [[0] * 6, [0] * 4 + [1] * 2]
    assert torch.equal(alone.train.at(index[1], keys[1])[0], one[1])
    assert not torch.equal(alone.train.at(index, keys + 1)[0], one)
    tested = [alone.test.at(torch.arange(8), key)[0] for key in keys]
    assert torch.equal(*tested)


def test_colour_noise_shifts_whole_images_by_one_colour():
    """All pixels of an image move alike, each image by its own draw, the mean by nothing much."""
    images = torch.full((500, 3, 2, 2), 100, dtype=torch.uint8)
    shift = colour_noise(images, torch.tensor(7)) - 100
    assert (shift == shift[:, :, :1, :1]).all()
    colours = shift[:, :, 0, 0]
    assert colours.mean().abs() < 1.0
    # The first component has the deviation 255 * 0.1 * 0.2175 / sqrt(3) in each channel, about.
    assert colours.std(0).mean() == pytest.approx(3.2, rel=0.15)


def test_top_five_counts_what_is_ranked_first():
    """The fifth counts and the sixth does not; of fewer classes all do."""
    scores = torch.arange(7.0).flip(0).expand(2, 7)
    assert among_five(scores, torch.tensor([4, 5])).tolist() == [1.0, 0.0]
    assert among_five(scores[:, :3], torch.tensor([0, 2])).tolist() == [1.0, 1.0]


@pytest.mark.wide
def test_a_tree_of_images_trains_alike_in_both_worlds(tree):
    """The simulator's loop and real workers end with the same bits; rows have top-1, top-5 and the
    loss of the validation images."""
    chosen = {"data": tree, "epochs": 2, "batch": 5, "evaluations": 1, "learning_rate": 0.01}
    cluster = gossamer.load_cluster("equal-8").changed(workers=2)
    played = gossamer.simulate(SPEC, "all_reduce", cluster, engine="loop", **chosen)
    trained = gossamer.train(SPEC, "all_reduce", workers=2, **chosen)
    assert trained.summary["parameters_digest"] == played.summary["parameters_digest"]
    assert played.history[-1]["top5"] == 1.0
    assert 0.0 <= played.history[-1]["accuracy"] <= 1.0
    assert played.history[-1]["loss"] > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda root: (root / "val").rename(root / "test"), "val does not exist; get a folder"),
        (lambda root: (root / "val" / "other").mkdir(), "has the class other, which train has not"),
        (lambda root: (root / "train" / "a" / "0.png").write_bytes(b"no"), "0.png cannot be"),
    ],
)
def test_a_tree_that_cannot_be_used_is_one_sentence(tmp_path, change, says):
    """Which folder or file, and what to do."""
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / part / "a" / "0.png")
    change(tmp_path)
    with pytest.raises(ConfigurationError, match=says):
        make_task(SPEC, data=tmp_path).train.at(torch.tensor([0]))
