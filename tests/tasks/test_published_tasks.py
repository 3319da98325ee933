"""Problems of papers: sparse samples, recurrent networks, VGG, and nanoGPT's size."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.tasks import make_task
from gossamer.tasks.models import Vgg
from gossamer.tasks.published.recurrent import Lstm
from gossamer.tasks.published.sparse_logistic import SparseConstants, logistic_loss
from gossamer.tasks.text import CharacterTransformer


def test_a_sparse_sample_touches_the_parameters_of_its_features_only():
    """The gradient of one sample is the logistic one, at its features, and 0 elsewhere."""
    task = make_task("sparse-logistic:features=50,nonzeros=4,samples=64")
    model = task.make_model()
    inputs, targets = task.train.inputs[:1], task.train.targets[:1]
    task.loss(model(inputs), targets).backward()
    expected = torch.zeros(50)
    expected[inputs[0]] = 0.5 - targets[0].float()
    torch.testing.assert_close(model.weight.grad, expected)


def test_the_constants_of_sparse_data_are_those_of_the_paper():
    """Three samples by hand: sizes 2, feature 1 in two of three, sample 1 meets all of them."""
    found = SparseConstants.of(torch.tensor([[0, 1], [1, 2], [2, 3]]), 4)
    assert found == SparseConstants(2, pytest.approx(2 / 3), 1.0)


def test_the_logistic_loss_is_that_of_torch():
    """The same as the binary cross-entropy of the scores."""
    scores, labels = torch.randn(9), torch.randint(2, (9,))
    theirs = nn.functional.binary_cross_entropy_with_logits(scores, labels.float())
    torch.testing.assert_close(logistic_loss(scores, labels), theirs)


def test_more_nonzeros_than_features_are_refused():
    """One sentence with the numbers."""
    with pytest.raises(ConfigurationError, match="between 1 and features=3, got 4"):
        make_task("sparse-logistic:features=3,nonzeros=4")


@pytest.mark.parametrize("workers", [1, 4])
def test_sparse_updates_of_hogwild_move_what_dense_ones_move(workers):
    """On a network that costs nothing both forms end alike where one worker trains, and the sparse
    one sends a part of the bytes at any number."""
    runs = {
        sparse: gossamer.simulate(
            "sparse-logistic:features=200,nonzeros=3,samples=64",
            f"hogwild:sparse={sparse}",
            gossamer.load_cluster("equal-8").changed(workers=workers),
            epochs=1,
            learning_rate=0.3,
            seed=1,
        )
        for sparse in ("true", "false")
    }
    if workers == 1:
        torch.testing.assert_close(runs["true"].parameters, runs["false"].parameters)
    assert runs["true"].loss < 0.69
    assert runs["true"].bytes_per_step < runs["false"].bytes_per_step


def test_the_memory_of_torch_is_ours():
    """With the same weights, `nn.LSTM` shows the same at each time."""
    torch.manual_seed(0)
    own, theirs = Lstm(3, 5), nn.LSTM(3, 5, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(own.of_input.weight)
        theirs.weight_hh_l0.copy_(own.of_state.weight)
        theirs.bias_ih_l0.copy_(own.of_input.bias)
        theirs.bias_hh_l0.zero_()
    sequence = torch.randn(2, 6, 3)
    torch.testing.assert_close(own(sequence), theirs(sequence)[0])


@pytest.mark.parametrize("name", ["digits-lstm:width=8", "sparse-logistic:samples=32"])
def test_published_tasks_are_evaluated_together(name):
    """Gradients of two workers under vmap equal those of each alone."""
    torch.manual_seed(0)
    task = make_task(name)
    model = task.make_model()
    named = {key: value.detach() for key, value in model.named_parameters()}
    inputs, targets = task.train.inputs[:8], task.train.targets[:8]

    def loss(parameters, inputs, targets):
        return task.loss(torch.func.functional_call(model, parameters, inputs), targets)

    together = vmap(grad(loss), (None, 0, 0))(
        named, inputs.view(2, 4, *inputs.shape[1:]), targets.view(2, 4)
    )
    alone = grad(loss)(named, inputs[4:], targets[4:])
    for key, value in alone.items():
        torch.testing.assert_close(together[key][1], value, rtol=1e-4, atol=1e-6)


def test_published_models_have_the_published_sizes():
    """VGG-16 with one linear layer has 14.7 million parameters, nanoGPT's size is 10.8 million."""

    def count(model):
        return sum(parameter.numel() for parameter in model.parameters())

    with torch.device("meta"):
        assert count(Vgg()) == 14_724_042
        assert round(count(CharacterTransformer(65, 6, 6, 384, 256)) / 1e6, 1) == 10.8
    assert Vgg(8)(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_the_texts_of_published_tasks(tmp_path):
    """A recurrent network trains on a text; the transformer of nanoGPT's size has its dropout."""
    (tmp_path / "input.txt").write_text("To be, or not to be, that is the question:\n" * 80)
    spec = "shakespeare-lstm:layers=1,width=8,context=8"
    result = gossamer.simulate(
        spec, "all_reduce", gossamer.load_cluster("equal-8").changed(workers=2), data=tmp_path,
        epochs=0.2,
    )  # fmt: skip
    assert result.loss < 4
    large = make_task("shakespeare-nanogpt", data=tmp_path)
    with torch.device("meta"):
        model = large.make_model()
    assert [one.p for one in model.modules() if isinstance(one, nn.Dropout)] == [0.2] * 13
