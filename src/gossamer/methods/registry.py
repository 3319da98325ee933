"""The one table of methods. A row is a method's name, its paper and its promises, and the tests
read the promises from here: a new method is a row, not a file of tests."""

from __future__ import annotations

import dataclasses
from math import ceil, inf
from typing import Any

from gossamer.methods import (
    compressed,
    decentralised,
    differing_data,
    elastic,
    gossip,
    local,
    outer,
    outer_server,
    server,
    synchronous,
    traffic,
)
from gossamer.methods.method import Method, Options, Promises


def _period(steps: int, most: int) -> int:
    """A period of at most 1/20 of the steps: a short run must still meet often enough."""
    return max(1, min(most, steps // 20))


def _bipartite(workers: int, steps: int) -> dict[str, Any]:
    even = workers % 2 == 0
    return {"topology": "bipartite_exponential" if even else "complete"}


_AVERAGED = Promises(True, "everyone", "0", True, "2(p-1)/p / period", lambda p, o: traffic.ring(p))


def _outer(*, plain: bool) -> Promises:
    def means(workers: int, options: Options) -> float:
        twice = 2 if options.get("state") == "averaged" else 1
        return twice * traffic.ring(workers) / options["period"]

    def start_and_velocity(workers: int, options: Options) -> float:
        """Where the period began, with momentum also the velocity; of each fragment on its way what
        was sent, and the mean that may have arrived."""
        momentum = [options.get(key, 0.0) for key in ("block_momentum", "beta", "outer_momentum")]
        count, delay = options.get("fragments", 1), options.get("delay", 0)
        flying = ceil(delay * count / options["period"]) / count
        return 1.0 + any(momentum) + 2.0 * flying

    return dataclasses.replace(
        _AVERAGED, models_per_step=means, is_plain_alone=plain, memory=start_and_velocity
    )


def _inner_period(workers: int, values: Options, given: Options) -> dict[str, Any]:
    """A quarter of the outer one, which a long outer period forgives."""
    return {"inner": given.get("inner", max(1, values["period"] // 4))}


def _no_sites(workers: int, values: Options) -> str:
    if values["sites"] > workers:
        return f"{values['sites']} sites are more than the {workers} workers; choose fewer"
    if values["inner"] > values["period"]:
        return (
            f"the inner period of {values['inner']} steps is longer than the outer one of "
            f"{values['period']}; choose a shorter one"
        )
    return ""


def _server(waits_for: str, staleness: str, *, bounded: bool = False) -> Promises:
    """A gradient up and the parameters down at every step, or at most that."""
    return Promises(
        False, waits_for, staleness, True, "at most 2" if bounded else "2", lambda p, o: 2.0,
        is_traffic_a_bound=bounded, is_plain_alone=False,
        memory=lambda p, o: 1.0 + bool(o.get("overlap")),
    )  # fmt: skip


_ROWS = (
    Method(
        "all_reduce", "synchronous", "Jin et al. 2016, Algorithm 1", "mean",
        synchronous.all_reduce,
        Promises(
            True, "everyone", "stale", True, "2(p-1)/p", lambda p, o: traffic.ring(p),
            memory=lambda p, o: 2.0 * o["stale"] + 1,
        ),
        trains_output=lambda options: True,
        balances=True,
        exchange="gradients",
    ),
    Method(
        "d_psgd", "decentralised", "Lian et al. 2017", "mean", decentralised.d_psgd,
        Promises(
            True, "neighbours", "0", True, "degree", traffic.degree,
            memory=traffic.neighbours_models,
        ),
        exchange="models",
    ),
    Method(
        "ad_psgd", "decentralised", "Lian et al. 2018, Algorithms 2-4", "mean",
        decentralised.ad_psgd,
        Promises(
            True, "partner", "none", True, "1 (2 where all offer)",
            lambda p, o: traffic.offers(p, o) * o.get("compressed", 1.0), memory=lambda p, o: 1.0,
        ),
        shares_replica=True,
        is_synchronous=lambda options: False,
        suits=_bipartite,
        paper_values={"topology": "bipartite_ring", "least": 0.0, "most": inf},
        exchange="pairs",
    ),
    Method(
        "gradient_tracking", "decentralised", "Pu & Nedic 2021", "mean",
        differing_data.gradient_tracking,
        Promises(
            True, "neighbours", "0", True, "2 x degree", lambda p, o: 2 * traffic.degree(p, o),
            memory=lambda p, o: 2 * traffic.neighbours_models(p, o) + 1,
        ),
        exchange="models",
    ),
    Method(
        "d2", "decentralised", "Tang et al. 2018", "mean", differing_data.d2,
        Promises(
            True, "neighbours", "0", True, "degree", traffic.degree,
            memory=lambda p, o: traffic.most_neighbours(p, o) + 4,
        ),
        needs_topology="a fixed graph with links both ways",
        exchange="models",
    ),
    Method(
        "qg_dsgdm", "decentralised", "Lin et al. 2021", "mean", differing_data.qg_dsgdm,
        Promises(
            True, "neighbours", "0", True, "degree", traffic.degree, is_plain_alone=False,
            memory=lambda p, o: traffic.most_neighbours(p, o) + 3,
        ),
        own_momentum="beta",
        exchange="models",
    ),
    Method(
        "relay_sgd", "decentralised", "Vogels et al. 2021", "mean", differing_data.relay_sgd,
        Promises(
            False, "neighbours", "0", True, "2(p-1)/p", traffic.degree,
            memory=lambda p, o: 2 * traffic.most_neighbours(p, o) + 2,
        ),
        needs_topology="a tree",
        exchange="models",
    ),
    Method(
        "choco_sgd", "decentralised", "Koloskova et al. 2019", "mean", compressed.choco_sgd,
        Promises(
            True, "neighbours", "0", True, "degree, compressed",
            lambda p, o: traffic.degree(p, o) * o.get("compressed", 1.0), memory=lambda p, o: 4.0,
        ),
        exchange="copies",
        default_compressor="sign",
    ),
    Method(
        "pull_gossip", "gossip", "Jin et al. 2016, Algorithm 3", "mean", gossip.pull_gossip,
        Promises(
            False, "peer's card", "0", True, "1 / period", lambda p, o: (p > 1) / o["period"]
        ),
        is_synchronous=lambda options: False,
        exchange="models",
    ),
    Method(
        "push_gossip", "gossip", "Jin et al. 2016, Algorithm 4", "mean", gossip.push_gossip,
        Promises(
            False, "nobody", "0", True, "1 / period", lambda p, o: (p > 1) / o["period"],
            memory=lambda p, o: (p > 1) * traffic.WAITING_MODELS,
        ),
        is_synchronous=lambda options: False,
        exchange="models",
    ),
    Method(
        "push_sum", "gossip", "Assran et al. 2019, Algorithms 1-2", "mean", gossip.push_sum,
        Promises(
            True, "in-neighbours", "0", True, "out-degree", traffic.degree,
            memory=traffic.shares_of_mass,
        ),
        paper_values={"topology": "one_peer_exponential"},
        exchange="models",
    ),
    Method(
        "easgd", "elastic", "Zhang, Choromanska & LeCun 2015", "centre", elastic.easgd,
        Promises(
            True, "centre", "0", True, "2 / period", lambda p, o: 2 / o["period"],
            is_plain_alone=False, memory=lambda p, o: 1.0,
        ),
        has_server=True,
        is_synchronous=lambda options: bool(options["synchronous"]),
        suits=lambda workers, steps: {"alpha": 0.9 / workers, "period": _period(steps, 4)},
        paper_values={"period": 10},
        exchange="memory",
    ),
    Method(
        "eamsgd", "elastic", "Zhang, Choromanska & LeCun 2015", "centre", elastic.eamsgd,
        Promises(
            True, "centre", "0", True, "2 / period", lambda p, o: 2 / o["period"],
            is_plain_alone=False, memory=lambda p, o: 2.0,
        ),
        has_server=True,
        own_momentum="delta",
        is_synchronous=lambda options: bool(options["synchronous"]),
        suits=lambda workers, steps: {"alpha": 0.9 / workers, "period": _period(steps, 4)},
        paper_values={"period": 10, "delta": 0.99},
        exchange="memory",
    ),
    Method(
        "sync_server", "parameter server", "Chen et al. 2016", "server", server.client,
        _server("everyone", "0"),
        server=server.sync_server,
        has_server=True,
        is_synchronous=lambda options: options["backups"] == 0,
        trains_output=lambda options: options["backups"] == 0 and options["decay"] == 0.0,
        balances=True,
        suits=lambda workers, steps: {"backups": 0, "decay": 0.0},
        about="Chen et al. 2016: a server that waits for a gradient of every worker (hardsync).",
        exchange="server",
    ),
    Method(
        "backup_workers", "parameter server", "Chen et al. 2016", "moving average", server.client,
        _server("the first p - backups", "0"),
        server=server.sync_server,
        has_server=True,
        is_synchronous=lambda options: options["backups"] == 0,
        suits=lambda workers, steps: {
            "backups": max(1, workers // 8) if workers > 1 else 0,
            "decay": min(0.9999, max(0.5, 1 - 50 / steps)),
        },
        paper_values={"decay": 0.9999},
        about="Chen et al. 2016: the first N gradients make a step, late ones are dropped.",
        exchange="server",
    ),
    Method(
        "ssp", "parameter server", "Ho et al. 2013", "server", server.ssp,
        _server("slowest beyond the bound", "none", bounded=True),
        server=server.clock_server,
        has_server=True,
        leaves_out_momentum=True,
        is_synchronous=lambda options: options["bound"] == 0,
        exchange="server",
    ),
    Method(
        "bounded_delay", "parameter server", "Li et al. 2014", "server", server.asynchronous_client,
        _server("slowest beyond the bound", "none"),
        server=server.clock_server,
        has_server=True,
        leaves_out_momentum=True,
        is_synchronous=lambda options: options["bound"] == 0,
        about="Li et al. 2014: step t starts when everyone has finished step t - bound - 1.",
        exchange="server",
    ),
    Method(
        "softsync", "parameter server", "Gupta et al. 2016", "server", server.asynchronous_client,
        _server("server", "none (mean (p-1)/c)"),
        server=server.softsync_server,
        has_server=True,
        is_synchronous=lambda options: False,
        about="Gupta et al. 2016: an update after every c = p / n gradients, from anyone.",
        exchange="server",
    ),
    Method(
        "staleness_aware", "parameter server", "Zhang et al. 2016", "server",
        server.asynchronous_client,
        _server("server", "none (mean (p-1)/c)"),
        server=server.softsync_server,
        has_server=True,
        leaves_out_momentum=True,
        is_synchronous=lambda options: False,
        suits=lambda workers, steps: {"n": workers, "damping": "inverse", "divide": False},
        about="Zhang et al. 2016: each gradient's step is divided by its own staleness.",
        exchange="server",
    ),
    Method(
        "dc_asgd", "parameter server", "Zheng et al. 2017", "server", server.asynchronous_client,
        _server("server", "none (mean p-1)"),
        server=server.dc_asgd_server,
        has_server=True,
        leaves_out_momentum=True,
        is_synchronous=lambda options: False,
        about="Zheng et al. 2017: each gradient is corrected for the way gone since its point.",
        exchange="server",
    ),
    Method(
        "hogwild", "parameter server", "Recht et al. 2011", "server", server.hogwild,
        _server("server", "none"),
        has_server=True,
        leaves_out_momentum=True,
        is_synchronous=lambda options: False,
        exchange="memory",
    ),
    Method(
        "downpour", "parameter server", "Dean et al. 2012", "server", server.downpour,
        Promises(
            False, "server", "none (mean p-1)", True, "1/n_push + 1/n_fetch",
            lambda p, o: 1 / o["n_push"] + 1 / o["n_fetch"], is_plain_alone=False,
            memory=lambda p, o: 1.0 + (o["n_push"] > 1) + o["overlap"],
        ),
        server=server.downpour_server,
        has_server=True,
        leaves_out_momentum=True,
        is_synchronous=lambda options: False,
        suits=lambda workers, steps: {"divide": workers > 1},
        paper_values={"divide": False},
        exchange="server",
    ),
    Method(
        "local_sgd", "local updates", "Zinkevich et al. 2010; Lin et al. 2020", "mean",
        local.local_sgd, _outer(plain=True),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        paper_values={"period": 16, "switch": 0.5},
        exchange="differences",
    ),
    Method(
        "hierarchical_sgd", "local updates", "Lin et al. 2020", "mean", local.hierarchical_sgd,
        Promises(
            True, "everyone", "0", True, "2(s-1)/s / inner, 2(p-1)/p / period",
            traffic.two_levels,
        ),
        suits=lambda workers, steps: {
            "period": _period(steps, 32), "sites": min(2, workers), "inner": _period(steps, 8),
        },
        follows=_inner_period,
        refuses=_no_sites,
        exchange="models",
    ),
    Method(
        "bmuf", "local updates", "Chen & Huo 2016", "mean", local.bmuf, _outer(plain=False),
        suits=lambda workers, steps: {
            "period": _period(steps, 8), "block_momentum": 1 - 1 / workers,
        },
        follows=outer.block_momentum,
        exchange="differences",
    ),
    Method(
        "slowmo", "local updates", "Wang et al. 2020", "mean", local.slowmo, _outer(plain=False),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        paper_values={"period": 48},
        exchange="differences",
    ),
    Method(
        "diloco", "local updates", "Douillard et al. 2023", "mean", local.diloco,
        _outer(plain=False),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        follows=outer.outer_step,
        refuses=outer.too_late,
        paper_values={"period": 500},
        about="Douillard et al. 2023; Streaming DiLoCo, 2025 (fragments): an outer Nesterov step.",
        exchange="differences",
    ),
    Method(
        "one_bit_adam", "synchronous", "Tang et al. 2021", "mean", compressed.one_bit_adam,
        Promises(
            True, "everyone", "0", True, "2(p-1)/p, then compressed",
            traffic.warm_then_compressed, is_plain_alone=False, memory=lambda p, o: 7.0,
        ),
        own_momentum="beta1",
        exchange="differences",
        default_compressor="sign",
        normalises=True,
    ),
    Method(
        "sparse_loco", "local updates", "Sarfi et al. 2025", "mean", local.sparse_loco,
        Promises(
            True, "everyone", "0", True, "(p-1) / 146 / period",
            lambda p, o: (p - 1) * 0.21875 / 32 / o["period"], is_plain_alone=False,
            memory=lambda p, o: 4.0,
        ),
        suits=lambda workers, steps: {"period": _period(steps, 30)},
        paper_values={"period": 30},
        exchange="differences",
        default_compressor="topk:share=0.015625,bits=2,decay=0.95",
    ),
    Method(
        "async_diloco", "local updates", "Liu et al. 2024", "centre", outer_server.async_diloco,
        Promises(
            False, "server", "0", True, "2 / steps between", lambda p, o: 2 / o["period"],
            is_plain_alone=False, memory=lambda p, o: 2.0,
        ),
        server=outer_server.delayed_nesterov_server,
        has_server=True,
        is_synchronous=lambda options: False,
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        follows=outer.arriving_step,
        refuses=outer.too_early,
        paper_values={"period": 50},
        about="Liu et al. 2024: asynchronous local SGD with delayed Nesterov and dynamic steps.",
        exchange="displacements",
    ),
    Method(
        "decoupled_diloco", "local updates", "Douillard et al. 2026", "centre",
        outer_server.decoupled_diloco,
        Promises(
            False, "nobody", "0", True, "2 / period", lambda p, o: 2 / o["period"],
            is_plain_alone=False, memory=lambda p, o: 2.0,
        ),
        server=outer_server.syncer,
        has_server=True,
        is_synchronous=lambda options: False,
        suits=lambda workers, steps: {"period": _period(steps, 24)},
        follows=outer.merged_step,
        refuses=outer.too_many,
        paper_values={"period": 24},
        about="Douillard et al. 2026: learners never wait; a quorum's fragments are merged.",
        exchange="models",
    ),
    Method(
        "noloco", "local updates", "Kolehmainen et al. 2025", "mean", gossip.noloco,
        Promises(
            True, "a partner in turn", "0", True, "1 / period",
            lambda p, o: (p - p % 2) / p / o["period"], is_plain_alone=False,
            memory=lambda p, o: 3.0,
        ),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        follows=outer.pair_step,
        refuses=outer.unstable_pairs,
        paper_values={"period": 50},
        exchange="models",
    ),
    Method(
        "ensemble", "independent", "Ben-Nun & Hoefler 2019", "ensemble", synchronous.ensemble,
        Promises(
            True, "nobody", "0", True, "0", lambda p, o: o.get("shared", 0.0) * traffic.ring(p)
        ),
        is_synchronous=lambda options: False,
        exchange="nothing",
    ),
    Method(
        "codistill", "independent", "Anil et al. 2018", "best", gossip.codistill,
        Promises(
            True, "peer's card", "0", True, "teachers (1 - burn_in) / period",
            lambda p, o: min(o["teachers"], p - 1) * (1 - o["burn_in"]) / o["period"],
            memory=lambda p, o: 1.0 * min(o["teachers"], p - 1),
        ),
        is_synchronous=lambda options: False,
        suits=lambda workers, steps: {
            "period": _period(steps, 50), "teachers": max(1, workers - 1),
        },
        paper_values={"period": 50},
        compares_losses=True,
        exchange="models",
    ),
    Method(
        "pbt", "independent", "Jaderberg et al. 2017", "best", gossip.pbt,
        Promises(
            False, "nobody", "0", True, "at most 1 / period", lambda p, o: (p > 1) / o["period"],
            is_traffic_a_bound=True, memory=lambda p, o: (p > 1) * 3.0,
        ),
        is_synchronous=lambda options: False,
        suits=lambda workers, steps: {"period": _period(steps, 50)},
        compares_losses=True,
        acts_by_losses=True,
        exchange="models",
    ),
)  # fmt: skip

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}
