"""Compressors below methods: every pair trains or is refused, real bytes travel, and what was not
sent is kept wherever a run is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gossamer import simulate
from gossamer.compression import COMPRESSORS, parse_compressor
from gossamer.compression.pairing import EXCHANGES, refusal
from gossamer.config.cluster import Wires
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, MethodSpec, parse_method
from gossamer.replica import Layout
from support import build, cluster_of, digits, pieces, rows, scatter
from tiers import only

BY_EXCHANGE = {
    "gradients": "all_reduce", "differences": "diloco", "server": "downpour",
    "displacements": "async_diloco", "models": "d_psgd", "pairs": "ad_psgd", "copies": "choco_sgd",
    "memory": "hogwild", "nothing": "ensemble",
}  # fmt: skip
"""One method for each kind of exchange."""
PAIRS = [(kind, name) for kind in BY_EXCHANGE for name in COMPRESSORS]
OPTIONS = {("differences", "powersgd"): ":rank=4"}
"""A pseudo-gradient travels seldom, so feedback has few rounds for what two columns leave."""
FAST = [("gradients", "powersgd"), ("differences", "topk"), ("server", "onebit")]


@pytest.mark.parametrize(("kind", "name"), only(FAST, PAIRS))
def test_every_pair_trains_the_digits_or_is_refused(kind: str, name: str) -> None:
    """To 93 % on eight workers, with the compressor's usual options but for `OPTIONS`; or in a
    sentence that names both and says why."""
    compressor = parse_compressor(name)
    text = f"{BY_EXCHANGE[kind]}+{name}{OPTIONS.get((kind, name), '')}"
    if refusal(kind, compressor):
        with pytest.raises(ConfigurationError, match=rf"{BY_EXCHANGE[kind]} cannot use {name}: "):
            parse_method(text)
        return
    rate = 0.1 * (COMPRESSORS[name].rate if kind == "gradients" else 1.0)
    result = simulate(digits(), text, "equal-8", seed=3, evaluations=1, learning_rate=rate)
    assert result.accuracy >= 0.93


def test_every_exchange_has_a_method_and_every_method_an_exchange() -> None:
    assert set(BY_EXCHANGE) == set(EXCHANGES) == {row.exchange for row in METHODS.values()}
    assert all(METHODS[name].exchange == kind for kind, name in BY_EXCHANGE.items())


SERVER_PAIRS = ["topk:share=0.05", "sign", "onebit", "int8", "qsgd", "powersgd"]


@pytest.mark.wide
@pytest.mark.parametrize("name", SERVER_PAIRS)
def test_a_server_with_momentum_can_be_compressed_both_ways(name: str) -> None:
    rate = 0.1 * COMPRESSORS[name.partition(":")[0]].rate
    text = f"sync_server+{name}"
    result = simulate(digits(), text, "equal-8", seed=3, evaluations=1, learning_rate=rate)
    assert result.accuracy >= 0.93


# ---------------------------------------------------------------------- what travels


def sent(method: str, workers: int, numbers: int = 40_000, steps: int = 8) -> float:
    """Bytes a worker and step, without gradients: zeros are as long as other numbers."""
    run = build(pieces(numbers), method, cluster_of(workers), steps=steps, engine="none")
    scatter(run)
    return run.run().bytes_per_step


@pytest.mark.parametrize("name", ["topk", "sign", "int4"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_what_is_gathered_grows_with_the_workers(name: str, workers: int) -> None:
    """Each worker passes p - 1 encodings on, to the byte but for the headers of messages."""
    size = parse_compressor(name).size(Layout.of([("x", torch.empty(40_000))]))
    assert sent(f"all_reduce+{name}", workers) == pytest.approx((workers - 1) * size, rel=0.05)


@pytest.mark.parametrize("name", ["bf16", "randk"])
def test_what_is_summed_on_the_way_does_not(name: str) -> None:
    """A ring sends 2 (p - 1) / p of the encoding."""
    size = parse_compressor(name).size(Layout.of([("x", torch.empty(40_000))]))
    for workers in (2, 8):
        expected = 2 * (workers - 1) / workers * size
        assert sent(f"all_reduce+{name}", workers) == pytest.approx(expected, rel=0.05)


def test_servers_are_sent_and_answer_encodings() -> None:
    """Up and down; with down=false the answers are whole."""
    size = parse_compressor("int8").size(Layout.of([("x", torch.empty(40_000))]))
    both, up = (sent(f"downpour+int8{more}", 4, steps=40) for more in ("", ":down=false"))
    assert both == pytest.approx(2 * size, rel=0.1)  # the first answer is the whole model
    assert up == pytest.approx(size + 160_000, rel=0.05)


def test_a_slow_encoder_loses_where_it_is_slow() -> None:
    """On a fast network the time to encode decides, on a thin one the bytes do; the figures of the
    cluster count."""

    def seconds(method: str, bandwidth: float, top_k_ns: float) -> float:
        cluster = dataclasses.replace(
            cluster_of(4), network=Wires(bandwidth=bandwidth),
            compression={"topk": (top_k_ns, 1.0)},
        )  # fmt: skip
        return build(pieces(40_000), method, cluster, steps=8, engine="none").run().virtual_seconds

    assert seconds("all_reduce+topk", 1e10, 1000.0) > seconds("all_reduce", 1e10, 0.0)
    assert seconds("all_reduce+topk", 1e10, 1.0) < seconds("all_reduce+topk", 1e10, 1000.0)
    assert seconds("all_reduce+topk", 1e6, 1000.0) < 0.5 * seconds("all_reduce", 1e6, 0.0)


# ---------------------------------------------------------------------- averages in pairs


@pytest.mark.parametrize(
    ("name", "floor"),
    only([("bf16", 2**-7)], [("bf16", 2**-7), ("fp16", 2**-10), ("int8", 1 / 127)]),
)
@pytest.mark.parametrize("workers", [2, 4])
def test_pairs_keep_the_sum_and_come_as_near_as_rounding_allows(
    name: str, floor: float, workers: int
) -> None:
    """Half of the decoded theirs minus the decoded own is added at one end and taken at the other,
    so the sum stays. Two models end at most one rounding step of the largest number apart, more
    models two; without rounding they would end at the same bits."""
    run = build(pieces(30, 20, 10), f"ad_psgd+{name}", cluster_of(workers), steps=60, engine="none")
    scatter(run)
    before = rows(run).clone()
    run.run()
    after = rows(run)
    assert torch.allclose(after.sum(0), before.sum(0), atol=1e-5)
    apart = float((after.max(0).values - after.min(0).values).max())
    largest = float(before.abs().max())
    assert 0 < apart <= (1 if workers == 2 else 2) * floor * largest
    assert apart < 0.02 * float((before.max(0).values - before.min(0).values).max())


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "method",
    ["all_reduce+topk:share=0.1", "diloco:period=3+topk:share=0.1,bits=2",
     "downpour+topk:share=0.1", "sync_server:servers=2+sign", "bmuf:period=4+int4"],
)  # fmt: skip
def test_all_workers_hold_the_same_model_where_it_is_promised(method: str) -> None:
    """What was decoded is the same everywhere: synchronous workers end with the same bits."""
    run = build(pieces(30, 20, 10), method, cluster_of(3), steps=12, engine="loop",
                optimiser="sgd", learning_rate=0.05, evaluations=1)  # fmt: skip
    run.run()
    found = rows(run)
    if "downpour" not in method:
        assert bool((found == found[0]).all())
    residuals = [key for replica in run.world.replicas[:3] for key in replica.memory
                 if key.startswith("compression") and key.endswith("residual")]  # fmt: skip
    assert bool(residuals) == bool(parse_method(method).compressor.feedback)


# ---------------------------------------------------------------------- names

METHOD_TEXTS = st.sampled_from([
    "all_reduce", "diloco:period=30", "diloco:period=8,fragments=4,delay=1,mix=0.5", "downpour",
    "sync_server:servers=2", "async_diloco:period=4", "all_reduce:groups=2", "choco_sgd:gamma=0.5",
])  # fmt: skip
COMPRESSOR_TEXTS = st.sampled_from([
    "topk:share=0.01,bits=2", "powersgd:rank=2", "onebit", "topk:share=0.01,feedback=false",
    "int8:block=64", "sign", "bf16", "topk:scope=tensor",
])  # fmt: skip


@examples(max_examples=60)
@given(METHOD_TEXTS, COMPRESSOR_TEXTS)
def test_a_compressed_method_is_printed_and_parsed_back(method: str, compressor: str) -> None:
    spec = parse_method(f"{method}+{compressor}")
    assert spec.compressor == parse_compressor(compressor)
    assert parse_method(str(spec)) == spec
    assert str(parse_method(str(spec))) == str(spec)


@examples(max_examples=30)
@given(st.lists(st.tuples(METHOD_TEXTS, COMPRESSOR_TEXTS), min_size=1, max_size=4))
def test_lists_of_methods_keep_their_compressors(pairs: list[tuple[str, str]]) -> None:
    """A list is cut at blanks, and no compressor has any."""
    texts = [f"{method}+{compressor}" for method, compressor in pairs]
    assert [str(parse_method(one)) for one in " ".join(texts).split()] == [
        str(parse_method(one)) for one in texts
    ]


def test_a_plus_that_names_no_compressor_is_part_of_a_value() -> None:
    spec = parse_method("sync_server:server_optimiser=adam+topk:share=0.1")
    assert isinstance(spec, MethodSpec)
    assert spec.compressor == parse_compressor("topk:share=0.1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("diloco:period=30+topk:share=2", "share must be above 0 and at most 1, got 2"),
        ("all_reduce+topk:bits=3", "bits must be one of 2, 4, 8, 16, 32, got '3'"),
        ("all_reduce+powersdg:rank=2", "did you mean 'powersgd'"),
        ("all_reduce+powersgd:rnk=2", "did you mean 'rank'"),
        ("all_reduce+topk+sign", "all_reduce can have one compressor, got topk+sign"),
        ("d_psgd+topk", "d_psgd cannot use topk: it sends whole models"),
        ("ad_psgd+topk", "ad_psgd cannot use topk: it sends whole models, of which that would"),
        ("ad_psgd+bf16:feedback=true", "a model is no part of a sum that could be paid later"),
        ("hogwild+sign", "hogwild cannot use sign: it reads and adds to memory"),
        ("ensemble+sign", "ensemble cannot use sign: it exchanges nothing"),
        ("diloco+dgc", "diloco cannot use dgc: it corrects the momentum of gradients"),
        ("downpour+qsgd:down=true", "downpour cannot use qsgd: its error may be longer"),
        ("choco_sgd+terngrad", "choco_sgd cannot use terngrad: its error may be longer"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_method(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
