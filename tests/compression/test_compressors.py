"""The laws of the compressors, each for all that promise it in the one table."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.compression import COMPRESSORS, Coder, Stream, parse_compressor
from gossamer.compression.compressor import MeanRound
from gossamer.errors import ConfigurationError
from gossamer.replica import Layout

LAYOUT = Layout.of([
    ("weight", torch.zeros(24, 33)), ("bias", torch.zeros(24)),
    ("kernel", torch.zeros(6, 3, 5, 5)), ("scale", torch.zeros(7)),
])  # fmt: skip
VARIANTS = (
    *COMPRESSORS, "int8:block=7", "int2:block=16", "topk:scope=global,share=0.1",
    "topk:scope=tensor,bits=2",
    "topk:chunk=64,share=0.05,bits=8", "topk:bits=16", "topk:bits=4,share=0.3", "powersgd:rank=1",
    "powersgd:least_rate=0", "qsgd:levels=1", "qsgd:levels=100,bucket=64", "terngrad:clip=0",
    "dgc:warm_up=0", "randk:share=0.5", "threshold:factor=1",
)  # fmt: skip


def stream(layout=LAYOUT, **more):
    return Stream(layout, **more)


def vectors(kind, count=LAYOUT.total):
    """Numbers with which compressors meet their worst."""
    torch.manual_seed(len(kind))
    match kind:
        case "gaussian":
            return torch.randn(count)
        case "heavy tail":
            return torch.randn(count) / torch.rand(count).clamp(min=1e-4)
        case _:
            return torch.zeros(count).index_fill_(0, torch.tensor([count // 3]), -2.5)


def exchanged(coders, own):
    """Make the rounds of several workers; the mean, and each one's part of it."""
    rounds = [coder.rounds(vector) for coder, vector in zip(coders, own, strict=True)]
    asked = [next(one) for one in rounds]
    sent = 0
    while True:
        sent += asked[0].value.nbytes
        values = [one.value for one in asked]
        answer = (
            [torch.stack([v.float() for v in values]).mean(0).to(values[0].dtype)]
            if isinstance(asked[0], MeanRound) else values
        )  # fmt: skip
        asked, ended = [], []
        for one in rounds:
            try:
                asked.append(one.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            assert not asked
            means = [mean for mean, _ in ended]
            assert all(torch.equal(means[0], mean) for mean in means)
            return means[0], [part for _, part in ended], sent


@pytest.mark.parametrize("text", VARIANTS)
def test_the_bytes_are_those_that_were_promised(text):
    """Of what is encoded for a server and of what travels in the rounds of an all-reduce."""
    compressor = parse_compressor(text)
    vector = vectors("gaussian")
    data = compressor.encode(vector, stream())
    assert data.dtype == torch.uint8
    if compressor.name == "threshold":
        width = (LAYOUT.total - 1).bit_length()
        count = int((vector.abs() > compressor.factor * vector.square().mean().sqrt()).sum())
        assert count > 0
        assert data.numel() == math.ceil(count * width / 8) + 4 * count
        return
    # Random places come with the number of the vector, unless all count together.
    own = 8 if compressor.name == "randk" else 0
    assert data.numel() == compressor.size(LAYOUT) + own
    assert exchanged([Coder(compressor, stream())], [vector])[2] == compressor.size(LAYOUT)


def test_the_bits_of_sparse_loco():
    """64 of 4096 values with places of 12 bits and values of 2: 7/32 bit for a parameter."""
    layout = Layout.of([("weight", torch.zeros(4096, 16))])
    size = parse_compressor("topk:share=0.015625,bits=2").size(layout)
    assert 8 * (size - 16) / layout.total == 0.21875  # without the table of four means


CONTRACTING = [text for text in VARIANTS if parse_compressor(text).contraction(LAYOUT)]


@pytest.mark.parametrize("text", CONTRACTING)
@pytest.mark.parametrize("kind", ["gaussian", "heavy tail", "one number"])
def test_what_is_decoded_contracts(text, kind):
    """|C(u) - u|^2 <= (1 - d) |u|^2 with the promised d; random places in expectation."""
    compressor = parse_compressor(text)
    promised = compressor.contraction(LAYOUT)
    vector = vectors(kind)
    draws = 400 if compressor.name == "randk" else 1
    here, left = stream(), 0.0
    for _ in range(draws):
        decoded = compressor.decode(compressor.encode(vector, here), here)
        left += float((decoded - vector).double().square().sum()) / draws
        here.sent()
    error = 5 * math.sqrt(promised * (1 - promised) / draws) if draws > 1 else 1e-6
    assert left <= (1 - promised + error) * float(vector.double().square().sum())


@pytest.mark.parametrize("text", VARIANTS)
def test_zeros_stay_zeros(text):
    coder = Coder(parse_compressor(text), stream())
    nothing = torch.zeros(LAYOUT.total)
    assert not coder.decode(coder.encode(nothing)).any()
    assert not exchanged([Coder(coder.compressor, stream())], [nothing])[0].any()


UNBIASED = [
    text for text in VARIANTS
    if COMPRESSORS[text.partition(":")[0]].is_unbiased and text != "terngrad"
]  # fmt: skip


@pytest.mark.parametrize("text", UNBIASED)
def test_rounding_at_random_is_right_in_expectation(text):
    """The mean of 800 draws is within 5 standard errors of every one of 100 numbers, which a right
    one misses less often than once in 10,000 times; of seldom ones, 5 draws more or less."""
    layout = Layout.of([("vector", torch.zeros(100))])
    compressor, here = parse_compressor(text), stream(layout, seed=5)
    vector = vectors("gaussian", 100)
    draws = []
    for _ in range(800):
        draws.append(compressor.decode(compressor.encode(vector, here), here).double())
        here.sent()
    found = torch.stack(draws)
    bound = 5 * found.std(0) / math.sqrt(len(draws)) + 5 * found.abs().max() / len(draws)
    assert bool(((found.mean(0) - vector).abs() <= bound).all())


def test_the_variance_of_qsgd_is_as_proved():
    """E|Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2, bucket by bucket."""
    layout = Layout.of([("vector", torch.zeros(512))])
    compressor, here = parse_compressor("qsgd:levels=7,bucket=512"), stream(layout)
    vector, squares = vectors("gaussian", 512), 0.0
    for _ in range(50):
        decoded = compressor.decode(compressor.encode(vector, here), here)
        squares += float((decoded - vector).square().sum()) / 50
        here.sent()
    assert squares <= min(512 / 49, math.sqrt(512) / 7) * float(vector.square().sum())


LINEAR = [name for name, row in COMPRESSORS.items() if row.is_linear]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_ones_may_be_summed_on_the_way(name):
    """mean C(u_i) = C(mean u_i), with the state that all share. The numbers are whole, so that
    their sums are exact in 16 bits."""
    compressor = parse_compressor(name)
    own = [vectors("gaussian").mul(8).round().roll(step) for step in range(4)]
    mean, _, _ = exchanged([Coder(compressor, stream()) for _ in own], own)
    of_mean, _, _ = exchanged([Coder(compressor, stream())], [torch.stack(own).mean(0)])
    assert torch.allclose(mean, of_mean, atol=1e-4, rtol=1e-4)


EXACT = (
    "topk:share=0.05", "topk:scope=tensor", "randk:share=0.1,feedback=true", "threshold:factor=1",
)  # fmt: skip


@pytest.mark.parametrize("text", EXACT)
def test_feedback_telescopes_exactly(text):
    """What was sent and what is left are together what came in, bit for bit where sums are exact:
    whole numbers over a power of two."""
    coder = Coder(parse_compressor(text), stream())
    torch.manual_seed(1)
    came = sent = torch.zeros(LAYOUT.total)
    for _ in range(30):
        vector = torch.randint(-64, 65, (LAYOUT.total,)) / 32
        came = came + vector
        sent = sent + coder.decode(coder.encode(vector))
    assert coder.residual is not None
    assert coder.residual.any()
    assert torch.equal(sent + coder.residual, came)


WITH_FEEDBACK = [name for name, row in COMPRESSORS.items() if row.has_feedback]


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_feedback_telescopes_over_workers(name):
    """The sum of the means, and the mean of the residuals, are the sum of the mean gradients."""
    coders = [Coder(parse_compressor(name), stream(seed=rank)) for rank in range(3)]
    torch.manual_seed(2)
    came = sent = torch.zeros(LAYOUT.total)
    for _ in range(10):
        own = [torch.randn(LAYOUT.total) for _ in coders]
        came = came + torch.stack(own).mean(0)
        sent = sent + exchanged(coders, own)[0]
    left = torch.stack([coder.residual for coder in coders]).mean(0)
    assert torch.allclose(sent + left, came, atol=1e-4)


def test_a_decay_forgets_as_much_as_it_says():
    """sum sent = sum came - e_T - (1 - beta) sum of the earlier e: SparseLoCo's leak."""
    coder = Coder(parse_compressor("topk:share=0.05,decay=0.75"), stream())
    torch.manual_seed(3)
    came = sent = leaked = torch.zeros(LAYOUT.total, dtype=torch.float64)
    for _ in range(10):
        vector = torch.randint(-64, 65, (LAYOUT.total,)) / 32
        if coder.residual is not None:
            leaked = leaked + 0.25 * coder.residual.double()
        came = came + vector
        sent = sent + coder.decode(coder.encode(vector))
    assert torch.allclose(sent + coder.residual + leaked, came, atol=1e-5)


def test_feedback_follows_the_learning_rate():
    """Along rates that change, steps and what is left are together the steps of plain descent."""
    coder = Coder(parse_compressor("topk:share=0.05"), stream())
    torch.manual_seed(4)
    plain = made = torch.zeros(LAYOUT.total)
    for rate in (0.5, 0.5, 0.125, 0.125, 1.0, 0.25):
        vector = torch.randint(-64, 65, (LAYOUT.total,)) / 32
        coder.at_rate(rate)
        plain = plain + rate * vector
        made = made + rate * coder.decode(coder.encode(vector))
    assert torch.allclose(made + 0.25 * coder.residual, plain, atol=1e-5)


def drift(text, steps=600):
    """Descend along f(x) = x / 4 by gradients that are 4 once in four times and else -1."""
    layout = Layout.of([("x", torch.zeros(1))])
    coder = Coder(parse_compressor(text), stream(layout))
    generator = torch.Generator().manual_seed(0)
    x = 0.0
    for draw in torch.rand(steps, generator=generator).tolist():
        gradient = torch.tensor([4.0 if draw < 0.25 else -1.0])
        step = coder.decode(coder.encode(gradient))
        # Signs alone: without the scale, which would tell the magnitude of a single number.
        x -= 0.01 * (float(step) if coder.compressor.feedback else float(step.sign()))
    return x


def test_signs_need_feedback():
    """Karimireddy et al.'s counter-example: the expected gradient is 1/4, so x must fall; by signs
    alone it rises by half the rate a step."""
    assert drift("sign:feedback=false") > 0.4 * 0.01 * 600
    assert drift("sign") < -0.2 * 0.01 * 600


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_exact_for_low_rank(rank):
    """A matrix of at most that rank comes out as it is, from the first step on."""
    layout = Layout.of([("weight", torch.zeros(40, 30)), ("bias", torch.zeros(40))])
    coder = Coder(parse_compressor(f"powersgd:rank={rank}"), stream(layout))
    torch.manual_seed(rank)
    matrix = torch.randn(40, rank) @ torch.randn(rank, 30)
    vector = torch.cat([matrix.view(-1), torch.randn(40)])
    mean, _, _ = exchanged([coder], [vector])
    assert torch.allclose(mean, vector, atol=1e-4)
    assert torch.allclose(coder.decode(coder.encode(vector)), vector, atol=1e-4)


def test_powersgd_is_that_of_torch():
    """The first step of torch's own hook, begun with the same random Q."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

    layout = Layout.of([("weight", torch.zeros(20, 50))])
    coder = Coder(parse_compressor("powersgd:rank=3"), stream(layout, common="0"))
    torch.manual_seed(0)
    own = [torch.randn(20, 50) for _ in range(3)]
    right = coder.compressor._right(own[0].view(-1), coder.stream)[0].clone()
    left = torch.stack([one @ right for one in own]).mean(0)
    _orthogonalize(left.unsqueeze(0))
    expected = left @ torch.stack([one.T @ left for one in own]).mean(0).T
    coders = [Coder(coder.compressor, stream(layout, common="0")) for _ in own]
    mean, _, _ = exchanged(coders, [one.view(-1) for one in own])
    assert torch.allclose(mean.view(20, 50), expected, atol=1e-4)


def test_dgc_sends_all_of_what_momentum_makes_of_a_gradient():
    """Without new gradients, what was sent and what is left add up to g (1 + m + m^2 + ...), but
    for the momentum that is masked where something was sent."""
    dgc = parse_compressor("dgc:share=1,warm_up=0,momentum=0.5")
    coder = Coder(dgc, stream())
    vector = vectors("gaussian")
    assert torch.equal(coder.decode(coder.encode(vector)), vector)
    assert not coder.stream.state["velocity"].any()  # masked: all of it was sent
    little = Coder(parse_compressor("dgc:share=0.01,warm_up=0,momentum=0.5"), stream())
    first = little.decode(little.encode(vector))
    left = torch.where(first == 0, vector, 0.0)
    assert torch.equal(little.stream.state["gathered"], left)
    second = little.decode(little.encode(torch.zeros_like(vector)))
    assert torch.equal(second + little.stream.state["gathered"], left * 1.5)


def test_dgc_begins_with_many():
    """A quarter first, then a quarter of that, down to the share."""
    coder = Coder(parse_compressor("dgc:share=0.01,warm_up=0.5"), stream(steps=20))
    sizes = [coder.encode(vectors("gaussian")).numel() for _ in range(20)]
    assert len(set(sizes)) == 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 15 * sizes[-1]


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "int4", "natural", "topk", "sign"])
def test_what_was_decoded_is_encoded_as_it_is(text):
    compressor, here = parse_compressor(text), stream()
    once = compressor.decode(compressor.encode(vectors("gaussian"), here), here)
    twice = compressor.decode(compressor.encode(once, here), here)
    assert torch.allclose(once, twice, rtol=1e-5, atol=0)


@pytest.mark.wide
@pytest.mark.parametrize("text", VARIANTS)
def test_shapes_are_enough(text):
    """Without values, for runs of which only the time is asked, as many bytes are made."""
    compressor = parse_compressor(text)
    if compressor.name == "threshold":
        with pytest.raises(ConfigurationError, match="use topk"):
            compressor.encode(torch.empty(LAYOUT.total, device="meta"), stream())
        return
    coder = Coder(compressor, stream())
    data = coder.encode(torch.empty(LAYOUT.total, device="meta"))
    assert data.is_meta
    assert data.numel() == Coder(compressor, stream()).encode(vectors("gaussian")).numel()
    assert coder.decode(data).shape == (LAYOUT.total,)


@st.composite
def compressors(draw):
    """Any options within their ranges."""
    kind = COMPRESSORS[draw(st.sampled_from(sorted(COMPRESSORS)))].kind
    choices = {
        "feedback": st.booleans() if kind.name != "dgc" else st.just(False),
        "decay": st.floats(0, 1), "down": st.booleans(), "share": st.floats(1e-6, 1),
        "scope": st.sampled_from(["global", "tensor", "chunk"]), "chunk": st.integers(2, 1 << 16),
        "bits": st.sampled_from([2, 4, 8, 16, 32]), "block": st.integers(1, 4096),
        "rank": st.integers(1, 64), "start": st.integers(0, 10**6),
        "least_rate": st.floats(0, 100), "levels": st.integers(1, 32767),
        "bucket": st.integers(1, 4096), "clip": st.floats(0, 10), "factor": st.floats(0, 10),
        "momentum": st.floats(0, 0.99), "warm_up": st.floats(0, 0.99),
    }  # fmt: skip
    names = [field.name for field in dataclasses.fields(kind)]
    chosen = draw(st.lists(st.sampled_from(names), unique=True))
    return kind(**{name: draw(choices[name]) for name in chosen})


@settings(max_examples=100)
@given(compressors())
def test_what_is_printed_is_parsed_back(compressor):
    assert parse_compressor(str(compressor)) == compressor


@pytest.mark.parametrize(("text", "said"), [
    ("topj", "did you mean 'topk'"), ("topk:share=0", "above 0 and at most 1, got 0"),
    ("topk:share=1.5", "got 1.5"), ("topk:bits=3", "one of 2, 4, 8, 16, 32"),
    ("topk:shar=1", "did you mean 'share'"), ("powersgd:rank=0", "at least 1, got 0"),
    ("qsgd:levels=0", "between 1 and 32767"), ("int8:block=0", "at least 1"),
    ("sign:decay=1.5", "decay must be"), ("dgc:feedback=true", "keeps what it does not send"),
])  # fmt: skip
def test_what_is_impossible_is_said_in_a_sentence(text, said):
    with pytest.raises(ConfigurationError) as error:
        parse_compressor(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
