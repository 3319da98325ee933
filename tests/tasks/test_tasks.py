"""Tasks: models of the right size, losses that can be evaluated for many workers at once."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

from gossamer.errors import ConfigurationError
from gossamer.sim.forms.chosen_forms import ChosenForms
from gossamer.tasks import TASKS, make_task
from gossamer.tasks.keyed import key_of
from gossamer.tasks.models import Standardise, lenet5, resnet18, resnet20
from gossamer.tasks.task import Data, cross_entropy, fraction_correct
from gossamer.tasks.text import CharacterTransformer
from gossamer.tasks.vision import crop_and_flip


def parameter_count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def gradient(model, loss):
    """The gradient function of one worker, with its buffers after the step as the second value."""

    def of_worker(parameters, buffers, inputs, targets):
        def forward(parameters):
            # Cloned inside: grad refuses to change a tensor that was made outside of it.
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            return loss(functional_call(model, (parameters, own), inputs), targets), own

        return grad(forward, has_aux=True)(parameters)

    return of_worker


def assert_together_equals_alone(model, loss, inputs, targets):
    """Gradients and buffers of several workers under vmap equal those of each worker alone."""
    workers = len(inputs)
    state = [
        {name: value.detach().expand(workers, *value.shape).clone() for name, value in named}
        for named in (model.named_parameters(), model.named_buffers())
    ]
    for value in state[0].values():
        value += 0.01 * torch.randn_like(value)
    with ChosenForms(workers, "fp32"):
        together = vmap(gradient(model, loss))(*state, inputs, targets)
    for worker in range(workers):
        own = [{name: value[worker] for name, value in part.items()} for part in state]
        alone = gradient(model, loss)(*own, inputs[worker], targets[worker])
        for part, part_together in zip(alone, together, strict=True):
            for name, value in part.items():
                torch.testing.assert_close(
                    part_together[name][worker],
                    value,
                    rtol=1e-3,
                    atol=1e-5,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
    return together


def made_up_text(path):
    path.write_text("To be, or not to be, that is the question:\n" * 60)
    return path


def test_models_have_the_published_sizes():
    """LeNet-5 has 61,706 parameters, ResNet-20 0.27 million, ResNet-18 11.17 million."""
    with torch.device("meta"):
        assert parameter_count(lenet5()) == 61_706
        assert parameter_count(resnet20()) == 269_722
        assert parameter_count(resnet18()) == 11_173_962
        assert parameter_count(resnet18(width=8)) < 200_000


@pytest.mark.parametrize(
    ("make", "channels", "size"), [(lenet5, 1, 28), (resnet20, 3, 32), (lambda: resnet18(8), 3, 32)]
)
def test_networks_score_ten_classes(make, channels, size):
    """One row of ten finite scores for each image."""
    torch.manual_seed(0)
    scores = make()(torch.randn(2, channels, size, size))
    assert scores.shape == (2, 10)
    assert scores.isfinite().all()


def test_option_a_shortcuts_have_no_parameters():
    """ResNet-20 changes shape by subsampling and zero channels: its only 1x1 sizes are none."""
    assert all(p.shape[-1] == 3 for p in resnet20().parameters() if p.dim() == 4)
    assert any(p.shape[-1] == 1 for p in resnet18(8).parameters() if p.dim() == 4)


def test_standardise_maps_bytes_channel_by_channel():
    """(byte / 255 - mean) / deviation, with the constants of each channel."""
    images = torch.arange(24, dtype=torch.uint8).view(1, 2, 3, 4)
    output = Standardise((0.0, 0.5), (1.0, 0.25))(images)
    torch.testing.assert_close(output[:, 0], images[:, 0] / 255)
    torch.testing.assert_close(output[:, 1], (images[:, 1] / 255 - 0.5) / 0.25)


def test_resnet_trains_under_vmap_with_buffers_of_its_own():
    """Each worker's BatchNorm statistics follow its own batch, not its neighbour's."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 3, 8, 8) * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1, 1)
    gradients, buffers = assert_together_equals_alone(
        resnet20(), cross_entropy, inputs, torch.randint(10, (2, 4))
    )
    assert all(value.any() for value in gradients.values())
    variance = buffers["stem_norm.running_var"]
    assert (variance[1] > variance[0]).all()


@pytest.mark.parametrize("name", ["quadratic", "digits-logistic", "digits-mlp"])
def test_own_tasks_work_under_vmap(name):
    """Workers evaluated together get the gradients that they would get alone."""
    torch.manual_seed(0)
    task = make_task(name)
    inputs, targets = task.train.inputs[:24], task.train.targets[:24]
    assert_together_equals_alone(
        task.make_model(), task.loss, inputs.view(3, 8, -1), targets.view(3, 8)
    )


def test_the_transformer_works_under_vmap(tmp_path):
    """Embedding, attention and normalisation all have their batching rules."""
    torch.manual_seed(0)
    text = made_up_text(tmp_path / "input.txt")
    task = make_task("shakespeare-gpt:width=16,context=8", data=text)
    inputs, targets = task.train.inputs[:6], task.train.targets[:6]
    assert_together_equals_alone(
        task.make_model(), task.loss, inputs.view(3, 2, 8), targets.view(3, 2, 8)
    )


def test_the_transformer_does_not_see_the_future():
    """A change of the last character leaves the scores of all earlier positions as they were."""
    torch.manual_seed(0)
    model = CharacterTransformer(characters=5, layers=2, heads=2, width=8, context=6)
    text = torch.randint(5, (1, 6))
    changed = text.clone()
    changed[0, -1] = (text[0, -1] + 1) % 5
    one, other = model(text), model(changed)
    torch.testing.assert_close(one[:, :-1], other[:, :-1])
    assert not torch.allclose(one[:, -1], other[:, -1])


def test_the_text_is_cut_into_windows_by_position(tmp_path):
    """Targets follow their inputs by one; windows do not overlap; the last tenth is for testing."""
    text = made_up_text(tmp_path / "play.txt").read_text()
    task = make_task("shakespeare-gpt:context=10", data=tmp_path / "play.txt")
    alphabet = sorted(set(text))
    boundary = int(len(text) * 0.9)
    for part, characters in ((task.train, text[:boundary]), (task.test, text[boundary:])):
        codes = [alphabet.index(character) for character in characters]
        assert len(part) == (len(characters) - 1) // 10
        assert part.inputs.flatten().tolist() == codes[: 10 * len(part)]
        assert part.targets.flatten().tolist() == codes[1 : 10 * len(part) + 1]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"input.txt does not exist; get input.txt of tinyshakespeare"),
        (b"\xff\xfe", r"input.txt is not UTF-8 text \(byte 0 of 2\)"),
        (b"too short", r"its last tenth has 1 characters, expected more than context=64"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, content, sentence):
    """One sentence says which file, and what is wrong with it."""
    if content is not None:
        (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence):
        make_task("shakespeare-gpt", data=tmp_path)


def test_the_digits_are_the_1797_of_the_repository():
    """1437 for training, 360 for testing, all ten classes in the known numbers, pixels 0 to 1."""
    task = make_task("digits-mlp")
    assert task.train.inputs.shape == (1437, 64)
    assert task.test.inputs.shape == (360, 64)
    counts = torch.bincount(torch.cat([task.train.targets, task.test.targets]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.bincount(task.test.targets).min() >= 25
    assert task.train.inputs.min() == 0
    assert task.train.inputs.max() == 1


def test_the_digits_equal_those_of_scikit_learn():
    """The stored file is the known data set in another order, image by image."""
    known = pytest.importorskip("sklearn.datasets").load_digits()
    train, test = make_task("digits-mlp").train, make_task("digits-mlp").test
    inputs = torch.cat([train.inputs, test.inputs]) * 16
    labels = torch.cat([train.targets, test.targets])
    ours = sorted(
        (*row, label) for row, label in zip(inputs.tolist(), labels.tolist(), strict=True)
    )
    theirs = sorted((*row, label) for row, label in zip(known.data, known.target, strict=True))
    assert ours == theirs


@pytest.mark.parametrize(("name", "epochs"), [("digits-mlp", 5), ("digits-logistic", 8)])
def test_the_digits_can_be_learnt(name, epochs):
    """Plain SGD with momentum at the middle learning rate passes 93 % of test accuracy."""
    task = make_task(name)
    torch.manual_seed(0)
    model = task.make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=task.learning_rates[1], momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(task.train)).split(task.batch):
            optimiser.zero_grad()
            task.loss(model(task.train.inputs[batch]), task.train.targets[batch]).backward()
            optimiser.step()
    with torch.no_grad():
        correct = task.metric.score(model(task.test.inputs), task.test.targets)
    assert correct.shape == (360,)
    assert correct.mean() > 0.93


def test_a_model_depends_on_the_seed_alone():
    """The same seed gives the same initial model, another seed another one."""
    task = make_task("digits-mlp:width=4")
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(task.make_model()[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "spec", ["quadratic", "quadratic:dimension=1", "quadratic:dimension=30,condition=100,spread=3"]
)
def test_the_optimum_of_the_quadratic_has_no_gradient(spec):
    """The mean of the points is where the whole training set's gradient vanishes."""
    task = make_task(spec)
    model = task.make_model()
    with torch.no_grad():
        model.theta.copy_(task.optimum)
    task.loss(model(task.train.inputs), task.train.targets).backward()
    assert model.theta.grad.abs().max() < 1e-6


def test_the_curvature_of_the_quadratic_spans_the_condition_number():
    """The Hessian is diagonal, with the largest entry 1 and the smallest 1 / condition."""
    task = make_task("quadratic:dimension=5,condition=50")
    zero = torch.zeros(1, dtype=torch.int64)
    hessian = jacrev(grad(lambda x: task.loss(x[None], zero)))(torch.ones(5))
    torch.testing.assert_close(hessian, hessian.diag().diag())
    assert hessian.diag().max().item() == pytest.approx(1)
    assert hessian.diag().min().item() == pytest.approx(1 / 50)


def test_classes_of_the_quadratic_differ_by_the_spread():
    """Workers that own classes have optima of their own; without spread only the noise is left."""

    def distance(spec):
        task = make_task(spec)
        means = [task.train.inputs[task.train.targets == c].mean(0) for c in range(10)]
        return torch.stack(means).std(0).mean().item()

    assert distance("quadratic") == pytest.approx(1, rel=0.3)
    assert distance("quadratic:spread=0") < 0.03


def test_augmentation_depends_on_the_key_alone():
    """Shape and type stay; the same key gives the same images; vmap gives what each key gives."""
    images = torch.randint(256, (3, 4, 3, 32, 32), dtype=torch.uint8)
    keys = torch.tensor([key_of(0, worker, 5) for worker in range(3)])
    together = vmap(crop_and_flip)(images, keys)
    assert together.shape == images.shape
    assert together.dtype == torch.uint8
    for batch, key, augmented in zip(images, keys, together, strict=True):
        assert torch.equal(crop_and_flip(batch, key), augmented)
    same = crop_and_flip(images[0], keys[1])
    assert not torch.equal(same, together[0])


def test_augmentation_shifts_by_at_most_four_and_mirrors():
    """All nine shifts each way and both orientations occur; what comes from outside is black."""
    columns = torch.arange(1, 33, dtype=torch.uint8).expand(1, 32, 32)
    rows = columns.transpose(1, 2)
    images = torch.stack([columns[0], rows[0]]).expand(400, 2, 32, 32)
    augmented = crop_and_flip(images, torch.tensor(key_of(0, 0, 0))).to(torch.int64)
    down = augmented[:, 1, 16, 16] - 17
    assert set(down.tolist()) == set(range(-4, 5))
    mirrored = augmented[:, 0, 16, 16] > augmented[:, 0, 16, 17]
    assert 150 < mirrored.sum() < 250
    position = torch.where(mirrored, 15, 16)
    across = augmented[:, 0, 16, 16] - 1 - position
    assert set(across.tolist()) == set(range(-4, 5))
    pushed_down = augmented[down == -4]
    assert (pushed_down[:, :, :4] == 0).all()


def test_accuracy_is_counted_for_each_sample():
    """A class is right or wrong; a text is right in part."""
    scores = torch.eye(3)[torch.tensor([0, 1, 2, 1])]
    assert fraction_correct(scores, torch.tensor([0, 1, 1, 1])).tolist() == [1, 1, 0, 1]
    assert fraction_correct(scores.view(2, 2, 3), torch.tensor([[0, 1], [1, 1]])).tolist() == [
        1,
        0.5,
    ]


def test_every_task_without_data_can_be_made():
    """The table's rows are sound: defaults, three rates in rising order, aligned data."""
    for name, entry in TASKS.items():
        if not entry.needs_data:
            task = make_task(name)
            assert task.name == name
            assert list(task.learning_rates) == sorted(set(task.learning_rates))
            assert len(task.learning_rates) == 3
            assert len(task.train) > 0
            assert task.train.to("cpu").inputs is task.train.inputs


def test_data_that_are_not_aligned_are_refused():
    """Every input needs one target."""
    with pytest.raises(AssertionError, match="one target"):
        Data(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize(
    ("spec", "data", "sentence"),
    [
        ("digit-mlp", None, r"unknown task 'digit-mlp'; did you mean 'digits-mlp'\?"),
        ("mnist-lenet", None, r"task mnist-lenet needs data; get the four MNIST IDX files"),
        ("digits-mlp", ".", r"task digits-mlp brings its own data, got \.; leave data out"),
        ("digits-mlp:widht=3", None, r"unknown digits-mlp option 'widht'; did you mean 'width'\?"),
        ("digits-mlp:width=0", None, r"digits-mlp: width must be at least 1"),
        ("quadratic:condition=0.5", None, r"quadratic: condition must be .*, got 0.5"),
        ("quadratic:noise=inf", None, r"quadratic: noise must be .*, got inf"),
        ("shakespeare-gpt:width=9", ".", r"got width=9, heads=2; try width=8"),
        ("shakespeare-gpt:heads=0", ".", r"shakespeare-gpt: heads must be .*, got 0"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(spec, data, sentence):
    """One sentence says what was asked and what to change."""
    with pytest.raises(ConfigurationError, match=sentence):
        make_task(spec, data=data)
