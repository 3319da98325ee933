"""Draws from keys: the same alone, together, traced and compiled; and random enough."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gossamer.errors import ConfigurationError
from gossamer.tasks.keyed import (
    KeyedDropout,
    KeyedFunctions,
    fold,
    key_of,
    uniform,
    with_keyed_dropout,
)

integers = st.integers(min_value=-(2**63), max_value=2**63 - 1)
quick = settings(max_examples=50)


def keys(count):
    return torch.tensor([key_of(0, worker, 7) for worker in range(count)])


@quick
@given(integers, integers, integers)
def test_the_key_in_python_is_the_key_in_torch(seed, worker, step):
    """`key_of` folds seed, worker and step into 0, bit for bit as `fold` does."""
    key = torch.tensor(0)
    for number in (seed, worker, step):
        key = fold(key, number)
    assert key.item() == key_of(seed, worker, step)


@quick
@given(integers, integers, integers)
def test_different_numbers_give_different_keys(key, first, second):
    """`fold` is injective in its number, and in its key."""
    folded = fold(torch.tensor(key), first)
    assert (folded == fold(torch.tensor(key), second)).item() == (first == second)
    assert (fold(torch.tensor(first), 3) == fold(torch.tensor(second), 3)).item() == (
        first == second
    )


def test_draws_are_pinned():
    """A recorded run can be repeated only while the same key gives the same draws."""
    key = key_of(1, 2, 3)
    assert key == 6161369366696016980
    assert (uniform(torch.tensor(key), (4,)) * 2**24).int().tolist() == [
        13424118,
        3853340,
        3043253,
        6564949,
    ]


@pytest.mark.parametrize("key", [0, 1, -1, key_of(0, 0, 0)])
def test_draws_are_uniform_and_uncorrelated(key):
    """Mean 1/2, variance 1/12, equal bins, no serial correlation: within five deviations."""
    count = 1 << 16
    draws = uniform(torch.tensor(key), (count,)).double()
    assert draws.min() >= 0
    assert draws.max() < 1
    deviation = count**-0.5
    assert abs(draws.mean() - 0.5) < 5 * deviation * (1 / 12) ** 0.5
    assert abs(draws.var() - 1 / 12) < 5 * deviation * (1 / 180) ** 0.5
    bins = torch.histc(draws, 64, 0, 1)
    assert ((bins - count / 64) ** 2 / (count / 64)).sum() < 63 + 5 * 126**0.5
    centred = (draws - 0.5) * 12**0.5
    for lag in (1, 2, 8, 64):
        assert abs((centred[lag:] * centred[:-lag]).mean()) < 5 * deviation


def test_neighbouring_keys_share_no_draws():
    """Workers, steps and layers that differ by one are as independent as any others."""
    count = 1 << 14
    for first, second in (
        (torch.tensor(0), torch.tensor(1)),
        (torch.tensor(key_of(0, 0, 0)), torch.tensor(key_of(0, 0, 1))),
        (torch.tensor(key_of(0, 0, 0)), torch.tensor(key_of(0, 1, 0))),
        (fold(torch.tensor(5), 0), fold(torch.tensor(5), 1)),
    ):
        one, two = uniform(first, (count,)), uniform(second, (count,))
        assert abs(((one - 0.5) * (two - 0.5)).mean() * 12) < 5 * count**-0.5
        assert torch.isin(one, two).sum() < 5 * count**2 / 2**24


def test_a_worker_draws_the_same_alone_and_together():
    """A draw depends on its key, not on who shares the batch."""
    together = vmap(lambda key: uniform(fold(key, 4), (3, 5)))(keys(6))
    assert together.shape == (6, 3, 5)
    for key, drawn in zip(keys(6), together, strict=True):
        assert torch.equal(drawn, uniform(fold(key, 4), (3, 5)))


def test_a_traced_function_draws_from_the_key_it_is_given():
    """Tracing must not bake the draws of the example key into the graph."""
    draw = vmap(lambda key: uniform(fold(key, 2), (8,)))
    traced = make_fx(draw)(keys(3))
    other = keys(3) + 1
    assert torch.equal(traced(other), draw(other))
    assert not torch.equal(traced(other), traced(keys(3)))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch needs g++")
@pytest.mark.filterwarnings("default")
def test_a_compiled_function_draws_the_same():
    """Compilation keeps every bit: overflow wraps around, and no index arithmetic is inferred."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
    with_keyed_dropout(model)

    def run(key, inputs):
        dropped = functional_call(model, {"1.key": key}, inputs)
        return dropped == 0, uniform(key, (7, 3))

    inputs = torch.randn(5, 2, 4)
    plain = vmap(run)(keys(5), inputs)
    compiled = torch.compile(vmap(run))(keys(5), inputs)
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))


def test_dropout_drops_the_fraction_and_keeps_the_mean():
    """A fraction p is zero and the rest is scaled by 1 / (1 - p), as in nn.Dropout."""
    dropout = KeyedDropout(0.3)
    output = dropout(torch.ones(200, 200))
    assert output.unique().tolist() == torch.tensor([0.0, 1 / 0.7]).tolist()
    assert abs((output == 0).float().mean() - 0.3) < 5 * (0.3 * 0.7) ** 0.5 / 200


def test_dropout_does_nothing_in_evaluation():
    """In evaluation mode, and with p = 0, the output is the input itself."""
    inputs = torch.randn(4, 4)
    assert KeyedDropout(0.5).eval()(inputs) is inputs
    assert KeyedDropout(0.0)(inputs) is inputs


def test_dropout_of_everything_leaves_nothing():
    """At p = 1 the output and its gradient are zero, not undefined."""
    inputs = torch.ones(4, requires_grad=True)
    output = KeyedDropout(1.0)(inputs)
    output.sum().backward()
    assert output.tolist() == [0.0] * 4
    assert inputs.grad.tolist() == [0.0] * 4


def test_dropout_keeps_the_type_of_its_input():
    """Half precision stays half precision."""
    assert KeyedDropout(0.5)(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "size"), [(nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3)]
)
def test_channel_dropout_drops_whole_channels(kind, size):
    """Every channel of Dropout1d, 2d and 3d is kept whole or dropped whole."""
    model = nn.Sequential(kind(0.5))
    with_keyed_dropout(model)
    channels = model(torch.ones(16, 8, *[4] * size)).flatten(2)
    assert torch.equal(channels.amin(2), channels.amax(2))
    assert 0 < (channels[..., 0] == 0).sum() < 16 * 8


def test_replacement_finds_every_dropout():
    """Nested dropout is replaced too, keeps its p and mode, and its name leads to its key."""
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.2)))
    model[1].eval()
    assert with_keyed_dropout(model) == ["0.key", "1.1.key"]
    assert [model[0].p, model[1][1].p] == [0.1, 0.2]
    assert [model[0].training, model[1][1].training] == [True, False]
    assert [model[0].layer, model[1][1].layer] == [0, 1]
    assert with_keyed_dropout(model) == ["0.key", "1.1.key"]
    assert set(dict(model.named_buffers())) == {"0.key", "1.1.key"}
    assert not any("key" in name for name in model.state_dict())


def test_one_dropout_in_two_places_becomes_two():
    """Two places of use draw different masks though they shared one module and share one key."""
    shared = nn.Dropout(0.5)
    model = nn.ModuleList([shared, shared])
    assert with_keyed_dropout(model) == ["0.key", "1.key"]
    inputs = torch.ones(64)
    assert not torch.equal(model[0](inputs), model[1](inputs))


def test_the_mask_depends_on_the_key_alone():
    """Dropout gradients evaluated together equal those evaluated one by one."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    names = with_keyed_dropout(model)
    parameters = dict(model.named_parameters())

    def loss(parameters, key, inputs):
        return functional_call(model, {**parameters, **dict.fromkeys(names, key)}, inputs).sum()

    inputs = torch.randn(5, 3, 4)
    together = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, keys(5), inputs)
    for row, key in enumerate(keys(5)):
        alone = grad(loss)(parameters, key, inputs[row])
        for name in alone:
            torch.testing.assert_close(together[name][row], alone[name])
    assert len({tuple(row.tolist()) for row in together["2.weight"][:, 0] == 0}) == 5


@pytest.mark.parametrize("layer", [nn.MultiheadAttention(8, 2, 0.5), nn.Linear(8, 8)])
def test_functions_draw_from_the_key_and_the_number_of_the_call(layer):
    """Dropout inside torch's layers and in a forward of one's own: together as alone, and the
    generator of the host is not touched."""
    inputs = torch.randn(5, 3, 8)

    def run(key, given):
        with KeyedFunctions(key):
            made = layer(given, given, given)[0] if layer.__class__ is not nn.Linear else given
            first, second = (functional.dropout(torch.ones(64), 0.5) for _ in range(2))
            return made, first, second

    before = torch.get_rng_state()
    made, first, second = vmap(run)(keys(5), inputs)
    for row, key in enumerate(keys(5)):
        torch.testing.assert_close(run(key, inputs[row])[0], made[row])
        assert not torch.equal(first[row], second[row])
    assert len({tuple(row.tolist()) for row in first}) == 5
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
def test_attention_that_drops_next_to_nothing_is_attention(mask):
    """The one that is written out for dropout, with shared keys and every kind of mask."""
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    seen = torch.rand(2, 1, 6, 6) < 0.7
    seen[..., 0] = True
    given = {"bool": seen, "float": torch.where(seen, 0.5, -torch.inf)}.get(mask)
    options = {"attn_mask": given, "is_causal": mask == "causal", "enable_gqa": True}
    with KeyedFunctions(keys(1)[0]):
        ours = functional.scaled_dot_product_attention(query, key, key, dropout_p=1e-12, **options)
    theirs = functional.scaled_dot_product_attention(query, key, key, **options)
    torch.testing.assert_close(ours, theirs)


def test_what_is_computed_again_drops_the_same_again():
    """A checkpointed part draws from torch's generator, which the checkpoint restores."""
    weights, inputs = torch.ones(64, requires_grad=True), torch.ones(64)

    def part(given):
        return functional.dropout(given * weights, 0.5)

    with KeyedFunctions(keys(1)[0]):
        made = checkpoint(part, inputs, use_reentrant=False)
    (gradient,) = torch.autograd.grad(made.sum(), weights)
    assert torch.equal(gradient, made.detach())


def test_an_impossible_fraction_is_refused():
    """p is a fraction."""
    with pytest.raises(ConfigurationError, match=r"p must lie between 0 and 1, got 1.5"):
        KeyedDropout(1.5)
