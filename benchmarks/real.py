"""Real workers against the plain loop, DDP and bare MPI scripts, as ratios within one run.

    python benchmarks/real.py                     an hour on two cores
    python benchmarks/real.py --quick --json      the main figures in under a minute
    python benchmarks/real.py --only shm/2 --models mlp --rounds 45    some rows again, for longer
    python benchmarks/real.py --only shm/2 --before ../old    beside those of another checkout
    PYTHONPATH=src python benchmarks/real.py --device cuda    processes that share one GPU

Each variant runs in p processes of its own, started as a user starts them, and takes turns with p
processes of the plain loop. A ratio is that of one phase to the two of the plain loop around it;
the median over rounds is reported, with the least and the most.
With --json one JSON object is the last line; --write FILE keeps it, with the tables as Markdown
beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from figures import tell
from real_conductor import Group, Turns, Variant, awake, find_mpirun, together
from real_report import as_markdown

PLAIN = Variant("plain", "plain")
DDP = Variant("DDP", "ddp", is_synchronous=True)
SHM_GOSSIP = Variant("pull_gossip on shm", "join", "pull_gossip", "shm")
SHM_AD_PSGD = Variant("ad_psgd on shm", "join", "ad_psgd", "shm")
SHM_OFTEN = Variant("ad_psgd, 5 averages in 4 steps", "join", "ad_psgd:least=1.25,most=1.25", "shm")
"""Passive workers get ahead of active ones, the more so the more they are; so much makes up for it
with four."""
SHM_ALL_REDUCE = Variant("all_reduce on shm", "join", "all_reduce", "shm", True)
BY_HAND = {
    SHM_GOSSIP.name: Variant("by hand, read", "hand", "read", "shm"),
    SHM_AD_PSGD.name: Variant("by hand, average", "hand", "average", "shm"),
    SHM_ALL_REDUCE.name: Variant("by hand, all-reduce", "hand", "all_reduce", "shm", True),
}
"""What each exchange takes with no library around it; a small model shows that best."""
OF_TORCH = (
    Variant("pull_gossip on torch", "join", "pull_gossip", "torch"),
    Variant("ad_psgd on torch", "join", "ad_psgd", "torch"),
    Variant("all_reduce on torch", "join", "all_reduce", "torch", True),
    Variant("all_reduce on torch, by messages", "join", "all_reduce", "torch", True, "messages"),
    Variant("local_sgd, period 4, on torch", "join", "local_sgd:period=4", "torch", True),
)
BARE_GET = Variant("bare MPI, Get", "bare", "get", "mpi")
BARE_ALL_REDUCE = Variant("bare MPI, Allreduce", "bare", "all_reduce", "mpi", True)
OF_MPI = (
    BARE_GET,
    Variant("pull_gossip on mpi", "join", "pull_gossip", "mpi"),
    BARE_ALL_REDUCE,
    Variant("all_reduce on mpi", "join", "all_reduce", "mpi", True),
)
LONELY = Variant("joined, no communication", "join", "pull_gossip:period=1000000000", "shm")
EXCHANGES = tuple(
    Variant(f"exchange on {engine}", "exchange", "pull_gossip:period=1000000000", engine)
    for engine in ("shm", "torch", "mpi")
)
SECONDS = {"mlp": 0.4, "resnet18": 4.0}
"""Of one phase: enough steps for a rate, too few for the machine to change."""
QUICK_SECONDS = 0.25
SLOWER = 4.0


def why_no_mpi() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None if find_mpirun() else "there is no mpirun"


def coupled(
    variants: Sequence[Variant], size: int, model: str, device: str, rounds: int
) -> dict[str, Any]:
    """Speed over the plain loop, all workers alike."""
    plain, *others = groups = [Group(v, size, model, device) for v in (PLAIN, *variants)]
    with together(groups):
        return Turns(SECONDS[model]).ratios(plain, others, rounds)


def straggling(
    plain: Group, others: Sequence[Group], seconds: float, rounds: int
) -> dict[str, Any]:
    """Speed of worker 0 while worker 1 sleeps four steps' time after each step."""
    alone = Turns(seconds)
    alone.phase(plain)
    step = plain.size / alone.phase(plain)
    found = Turns(seconds, sleep=SLOWER * step).ratios(plain, others, rounds)
    return {"sleep_seconds": SLOWER * step, "variants": found}


def straggler_case(
    variants: Sequence[Variant], model: str, device: str, rounds: int
) -> dict[str, Any]:
    plain, *others = groups = [Group(v, 2, model, device) for v in (PLAIN, *variants)]
    with together(groups):
        return straggling(plain, others, SECONDS[model], rounds)


def overhead(group: Group, rounds: int) -> float:
    """Microseconds of the library in a step without communication."""
    with awake(group):
        answers = group.do({"do": "overhead", "rounds": rounds})
    return statistics.median(value for answer in answers for value in answer["microseconds"])


def exchange(group: Group, rounds: int) -> dict[str, float]:
    """Median milliseconds by what was done with 45 MB."""
    with awake(group):
        answers = group.do({"do": "exchange", "rounds": rounds})
    return {name: statistics.median(times) for name, times in answers[0].items()}


def time_to_loss(repetitions: int, target: float = 0.1) -> dict[str, Any]:
    """Seconds until worker 0's model has reached a loss, beside a worker four times as slow."""
    variants = (DDP, SHM_GOSSIP, SHM_AD_PSGD)
    found: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    for _ in range(repetitions):
        groups = [Group(variant, 2, rate=0.05) for variant in variants]
        plain = Group(PLAIN, 2)
        with together([plain, *groups]):
            turns = Turns(SECONDS["mlp"])
            turns.phase(plain)
            sleep = SLOWER * 2 / turns.phase(plain)
            for group in groups:
                order = {"do": "train", "target": target, "every": 25, "limit": 60.0}
                with awake(group):
                    group.tell({**order, "sleep": sleep})
                    answer = group.hear(0)
                    group.tell({"do": "stop"})
                    group.hear(1)
                found[group.variant.name].append(answer)
    return {
        "target": target,
        "variants": {
            name: {
                "seconds": statistics.median(answer["seconds"] for answer in answers),
                "steps": statistics.median(answer["steps"] for answer in answers),
                "reached": all(answer["loss"] <= target for answer in answers),
            }
            for name, answers in found.items()
        },
    }


def quick_measure(device: str, rounds: int) -> dict[str, Any]:
    """One start of everything, so that a minute is enough."""
    variants = (PLAIN, SHM_GOSSIP, SHM_ALL_REDUCE, DDP)
    plain, *others = groups = [Group(variant, 2, "mlp", device) for variant in variants]
    lonely, flat = Group(LONELY, 2, "mlp", device), Group(EXCHANGES[0], 2)
    with together([*groups, lonely, flat]):
        return {
            "step_overhead_us": overhead(lonely, 2 * rounds),
            "exchange": {"shm": exchange(flat, 4 * rounds)},
            "straggler": {"mlp": straggling(plain, (others[0], others[2]), QUICK_SECONDS, rounds)},
            "coupled": {"mlp": {"2": Turns(QUICK_SECONDS).ratios(plain, others, rounds)}},
            "skipped": {},
        }


def families_of(device: str) -> tuple[dict[str, tuple[Variant, ...]], dict[str, str]]:
    """Those that take turns with each other; and what is left out, and why."""
    families = {
        "shm": (DDP, LONELY, SHM_GOSSIP, SHM_AD_PSGD, SHM_ALL_REDUCE), "torch": (DDP, *OF_TORCH),
    }  # fmt: skip
    reason = "processes that share a GPU go through host memory" if device != "cpu" else None
    if (missing := reason or why_no_mpi()) is None:
        return {**families, "mpi": OF_MPI}, {}
    return families, {"mpi": missing}


def coupled_family(
    family: str, variants: tuple[Variant, ...], size: int, model: str, device: str, rounds: int
) -> dict[str, Any]:
    """Its variants over the plain loop, and over DDP where that is among them."""
    if family == "shm" and model == "mlp" and device == "cpu":
        variants = (*variants, *BY_HAND.values(), *([SHM_OFTEN] if size > 2 else []))
    results = coupled(variants, size, model, device, rounds)
    for name, result in results.items():
        result["family"] = family
        if DDP.name in results and name != DDP.name:
            result["over_ddp"] = result["over_plain"] / results[DDP.name]["over_plain"]
    return results


def some_measure(
    only: str, models: Sequence[str], device: str, rounds: int, before: Path | None
) -> dict[str, Any]:
    """The rows of one family at one number of workers, as in shm/2.

    With `before`, each row of ours stands there again with the `gossamer` of that checkout.
    """
    family, _, size = only.partition("/")
    families, skipped = families_of(device)
    if family not in families or not size.isdigit():
        raise SystemExit(f"--only wants one of {', '.join(families)} and p, as in shm/2: {only!r}")
    variants = families[family]
    if before is not None:
        variants += tuple(
            replace(one, name=f"{one.name}, before", checkout=before.resolve())
            for one in variants
            if one.kind == "join"
        )
    found: dict[str, Any] = {}
    for model in models:
        case = coupled_family(family, variants, int(size), model, device, rounds)
        _beside_bare(case)
        found[model] = {size: case}
    return {"coupled": found, "skipped": skipped, "straggler": {}, "exchange": {}}


def full_measure(device: str, models: Sequence[str], rounds: int) -> dict[str, Any]:
    """Everything, variant families one after the other."""
    families, skipped = families_of(device)
    found: dict[str, Any] = {"skipped": skipped, "coupled": {}, "straggler": {}, "exchange": {}}
    slow_variants = (DDP, SHM_GOSSIP, SHM_AD_PSGD, *([BARE_GET] if "mpi" in families else []))
    for model in models:
        few = rounds if model == "mlp" else max(3, rounds // 2)
        for size in (2, 4):
            case: dict[str, Any] = {}
            for family, variants in families.items():
                results = coupled_family(family, variants, size, model, device, few)
                # DDP stands beside each family; the first one is shown, all are compared with.
                case |= {name: row for name, row in results.items() if name not in case}
            _beside_bare(case)
            found["coupled"].setdefault(model, {})[str(size)] = case
        found["straggler"][model] = straggler_case(slow_variants, model, device, few)
    with Group(LONELY, 2, "mlp", device) as lonely:
        lonely.meet()
        found["step_overhead_us"] = overhead(lonely, 5 * rounds)
    for variant in EXCHANGES:
        if device == "cpu" and variant.transport in families:
            with Group(variant, 2) as group:
                group.meet()
                found["exchange"][variant.transport] = exchange(group, 5 * rounds)
    if device == "cpu":
        found["time_to_loss"] = time_to_loss(3)
    return found


def _beside_bare(case: dict[str, Any]) -> None:
    pairs = [
        ("over_bare", bare.name, ours.name)
        for bare, ours in zip(OF_MPI[::2], OF_MPI[1::2], strict=True)
    ]
    pairs += [("over_hand", hand.name, ours) for ours, hand in BY_HAND.items()]
    for key, bare, ours in pairs:
        if bare in case:
            case[ours][key] = case[ours]["over_plain"] / case[bare]["over_plain"]


def headline(found: dict[str, Any]) -> dict[str, float]:
    """The figures to watch, at the top level of the JSON."""
    pair = found["coupled"]["mlp"]["2"]
    slow = found["straggler"]["mlp"]["variants"]
    figures = {
        "shm_gossip_over_plain": pair[SHM_GOSSIP.name]["over_plain"],
        "shm_all_reduce_over_plain": pair[SHM_ALL_REDUCE.name]["over_plain"],
        "ddp_over_plain": pair[DDP.name]["over_plain"],
        "straggler_fast_over_plain": slow[SHM_GOSSIP.name]["over_plain"],
        "straggler_ddp_over_plain": slow[DDP.name]["over_plain"],
        "step_overhead_us": found["step_overhead_us"],
    }
    if "shm" in found["exchange"]:
        times = found["exchange"]["shm"]
        figures["shm_exchange_over_lerp"] = times["lerp"] / times["average"]
        figures["shm_pull_over_lerp"] = times["lerp"] / times["pull"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", default="mlp,resnet18")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", metavar="FAMILY/P", help="shm/2: the rows of shm at p=2 alone")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="with --only: an older one, beside ours"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if arguments.quick:
        found = quick_measure(arguments.device, arguments.rounds or 4)
    elif arguments.only:
        found = some_measure(
            arguments.only, models, arguments.device, arguments.rounds or 11, arguments.before
        )
    else:
        found = full_measure(arguments.device, models, arguments.rounds or 11)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    machine = f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread per worker"
    figures = {} if arguments.only else headline(found)
    found = {"machine": machine, **figures, **found}
    tell(found, as_markdown, arguments)


if __name__ == "__main__":
    main()
