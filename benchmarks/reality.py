"""The simulator against reality: predicted and measured time per epoch, as an error per method.

    sudo .venv/bin/python benchmarks/reality.py            about ten minutes
    ... --write docs/benchmarks/reality.json               keeps the figures, with a table beside
    ... --transformer --data tinyshakespeare --write docs/benchmarks/reality-bits.json
        a character transformer of 0.2 million parameters on a link of 20 Mbit/s, with whole and
        with compressed exchanges: as many bits of model to a bit of link as ten million parameters
        have on 1 Gbit/s

Four hosts (network namespaces, see namespaces.py) on links of limited rate hold one worker each.
What the simulator is told is measured without any method: the time of a gradient, its jitter and
the time between two gradients from workers that do not communicate at all, bandwidth and latency
from plain sockets. Then the same methods run in virtual time and on the four hosts, over the torch
transport, with equal workers and with one that is four times slower (`gossamer run --slow 0=4`).

Four workers on few cores would take the cores from each other, which no description of four hosts
contains. So a gradient here mostly sleeps: the model is small and its gradient short, and a sleep
of random length stands for the rest of the computing. Messages, sums, updates and the network are
real.

The time of an epoch is that of the whole run over its epochs. In asynchronous runs workers end at
different moments: whoever has taken the last batches finishes them, a slow one last, whereas the
simulator ends such a run with its last sample. There the time of a real epoch is the number of
samples over the sum of the workers' rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from figures import tell
from namespaces import Hosts, hosts, why_not

from gossamer import Cluster, Task, make_task, simulate
from gossamer.config.cluster import Compute, Wires
from gossamer.config.faults import parse_fault
from gossamer.config.settings import Settings, make_settings
from gossamer.real.train.request import TrainRequest

HERE = Path(__file__).parent
WORKERS = 4
TASK = "digits-mlp:width=3200"
METHODS = (
    "all_reduce",
    "d_psgd",
    "ad_psgd",
    "pull_gossip",
    "sync_server:placement=workers",
    "local_sgd:period=4",
)
CASES = {"equal workers": "", "one slow": "0=4"}
TRANSFORMER = "shakespeare-gpt:layers=4"
FEWER_BITS = (
    "all_reduce", "all_reduce+powersgd:rank=2", "local_sgd:period=10", "diloco:period=10+int4",
)  # fmt: skip
SEEDS = 5
"""Of the simulation; their mean is the prediction."""
LIMIT_S = 240
NICE = ("nice", "-n", "-10")
"""Other programs of this machine are not part of the experiment."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run."""

    mbit: float
    seconds: float
    jitter: float
    batch: int
    epochs: float
    rounds: int
    task: str = TASK
    data: str | None = None
    cases: tuple[str, ...] = tuple(CASES)

    def load(self) -> Task:
        return make_task(self.task, data=Path(self.data) if self.data else None)


# ---------------------------------------------------------------------------------- reality


def run_real(made: Hosts, plan: Plan, method: str, slow: str, port: int) -> dict[str, Any]:
    """One run on all hosts; its time per epoch and what became of the time."""
    settings = make_settings(
        plan.load(), method, Cluster(workers=WORKERS), batch=plan.batch, epochs=plan.epochs,
        evaluations=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gossamer-reality-") as name:
        folder = Path(name)
        request = TrainRequest(settings, folder).to_json()
        path = folder / "job.json"
        path.write_text(
            json.dumps({"job": request, "seconds": plan.seconds, "jitter": plan.jitter})
        )
        secret = secrets.token_hex(32)
        command = [
            *NICE, sys.executable, "-m", "gossamer", "run", "-n", "1", "--nnodes", str(WORKERS),
            "--rendezvous", f"node0:{port}", "--deadline", str(LIMIT_S),
            *(("--slow", slow) if slow else ()),
        ]  # fmt: skip
        started = [
            made.start(
                host,
                [*command, "--node-rank", str(host), str(HERE / "reality_worker.py"), str(path)],
                environment={"OMP_NUM_THREADS": "1", "GOSSAMER_SECRET": secret},
            )
            for host in range(WORKERS)
        ]
        for process in started:
            written, _ = process.communicate(timeout=LIMIT_S)
            if process.returncode != 0:
                raise RuntimeError(f"{method} failed:\n{written}")
        made.started.clear()
        diaries = [_diary(folder / "workers" / f"{rank}.jsonl") for rank in range(WORKERS)]
    books = [diary["books"] for diary in diaries]
    steps = sum(book["steps"] for book in books)
    return {
        "epoch_seconds": _epoch_seconds(settings, books),
        "wall_seconds": max(book["seconds"] for book in books),
        "steps": [book["steps"] for book in books],
        "gradient_seconds": sum(book["computing_seconds"] for book in books) / steps,
        "other_seconds": sum(
            book["seconds"] - book["computing_seconds"] - sum(book["waiting_seconds"].values())
            for book in books
        )
        / steps,
        "jitter": statistics.mean(
            diary["slept"]["sd"] / diary["slept"]["mean"] for diary in diaries
        ),
    }


def _epoch_seconds(settings: Settings, books: list[dict[str, Any]]) -> float:
    """In step, the end of the last one counts; out of step, the sum of everybody's rates."""
    if settings.method.method.is_synchronous(settings.method_options()):
        samples = sum(book["samples"] for book in books)
        rate = samples / max(book["seconds"] for book in books)
    else:
        rate = sum(book["samples"] / book["seconds"] for book in books)
    return len(settings.task.train) / rate


def _diary(path: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry["kind"]: entry for entry in entries}


def measure_link(made: Hosts) -> dict[str, float]:
    """From the second host to the first."""
    script = str(HERE / "reality_link.py")
    server = made.start(0, [*NICE, sys.executable, script, "serve", "29300"])
    client = made.start(1, [*NICE, sys.executable, script, "measure", "node0", "29300"])
    written, _ = client.communicate(timeout=60)
    server.communicate(timeout=60)
    made.started.clear()
    return json.loads(written)


def measure_exchange(
    made: Hosts, plan: Plan, model_bytes: int, bandwidth: float
) -> dict[str, float]:
    """What an all-reduce moves, by plain sockets; and what a fair share of the links would take."""
    script, share = str(HERE / "reality_link.py"), model_bytes // WORKERS
    command = [*NICE, sys.executable, script, "exchange"]
    started = [
        made.start(host, [*command, str(host), "29310", str(share), str(plan.seconds), *made.names])
        for host in range(WORKERS)
    ]
    found = [json.loads(process.communicate(timeout=60)[0])["seconds"] for process in started]
    made.started.clear()
    fair = 2 * (WORKERS - 1) * share / bandwidth
    return {"seconds": statistics.mean(found), "fair_seconds": fair}


# ---------------------------------------------------------------------------------- prediction


def describe(link: dict[str, float], alone: dict[str, Any]) -> Cluster:
    """The cluster as measured, without looking at any method."""
    return Cluster(
        name="measured",
        workers=WORKERS,
        compute=Compute(
            seconds=alone["gradient_seconds"], jitter=alone["jitter"],
            unoverlapped_seconds=max(0.0, alone["other_seconds"]),
        ),
        network=Wires(bandwidth=link["bandwidth"], latency=link["latency"]),
    )  # fmt: skip


def predict(cluster: Cluster, plan: Plan, method: str, slow: str) -> float:
    """Seconds per epoch in virtual time."""
    faults = [parse_fault("slow", slow)] if slow else []
    task, found = plan.load(), list[float]()
    for seed in range(SEEDS):
        run = simulate(
            task, method, cluster.changed(faults=faults), seed=seed, engine="none",
            batch=plan.batch, epochs=plan.epochs,
        )  # fmt: skip
        found.append(run.virtual_seconds / run.epochs)
    return statistics.mean(found)


# ---------------------------------------------------------------------------------- report


def compare(made: Hosts, plan: Plan, methods: tuple[str, ...]) -> dict[str, Any]:
    ports = iter(range(29400, 29999))
    task = plan.load()
    parameters = sum(p.numel() for p in task.make_model().parameters())
    steps = len(task.train) / plan.batch / WORKERS
    link = measure_link(made)
    exchange = measure_exchange(made, plan, 4 * parameters, link["bandwidth"])
    alone = run_real(made, plan, "ensemble", "", next(ports))
    cluster = describe(link, alone)
    print(f"link {link['bandwidth'] / 1e6:.1f} MB/s, {1e6 * link['latency']:.0f} us; gradient "
          f"{1e3 * alone['gradient_seconds']:.1f} ms, jitter {alone['jitter']:.3f}, "
          f"else {1e3 * alone['other_seconds']:.2f} ms", flush=True)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for case in plan.cases:
        slow = CASES[case]
        for method in methods:
            predicted = predict(cluster, plan, method, slow)
            runs = [run_real(made, plan, method, slow, next(ports)) for _ in range(plan.rounds)]
            measured = statistics.median(run["epoch_seconds"] for run in runs)
            row = {
                "method": method.partition(":")[0], "spec": method, "case": case,
                "predicted_seconds": predicted, "measured_seconds": measured,
                "error": predicted / measured - 1, "runs": runs,
                "predicted_step": predicted / steps, "measured_step": measured / steps,
            }  # fmt: skip
            rows.append(row)
            print(f"{case:14} {method:26} predicted {predicted:6.2f} s  measured "
                  f"{measured:6.2f} s  error {100 * row['error']:+5.1f} %", flush=True)  # fmt: skip
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "plan": dataclasses.asdict(plan), "task": plan.task, "model_bytes": 4 * parameters,
        "steps_of_an_epoch": steps, "link": link, "exchange": exchange, "alone": alone,
        "cluster": cluster.as_dict(), "rows": rows,
    }  # fmt: skip


def as_markdown_of_steps(found: dict[str, Any]) -> str:
    """Milliseconds of a step, and whether the order is the predicted one."""
    plan, link, alone, rows = (found[key] for key in ("plan", "link", "alone", "rows"))
    lines = [
        f"{WORKERS} hosts, links of {plan['mbit']:g} Mbit/s ({link['bandwidth'] / 1e6:.2f} MB/s "
        f"measured). Task `{found['task']}`, {found['model_bytes'] / 4e6:.2f} million parameters, "
        f"batch {plan['batch']}; a gradient takes {1e3 * alone['gradient_seconds']:.0f} ms, most "
        f"of which is a sleep, and what lies between two {1e3 * alone['other_seconds']:.1f} ms. "
        f"{plan['epochs'] * found['steps_of_an_epoch']:.0f} steps a worker, "
        f"{plan['rounds']} runs of each.",
        "", "| | ms a step: predicted | measured | error |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        lines.append(
            f"| `{row['spec']}` | {1e3 * row['predicted_step']:.0f} | "
            f"{1e3 * row['measured_step']:.0f} | {100 * row['error']:+.0f} % |"
        )
    predicted, measured = (
        [row["spec"] for row in sorted(rows, key=lambda row: row[key])]
        for key in ("predicted_step", "measured_step")
    )
    holds = "is the predicted one" if predicted == measured else "is not the predicted one"
    order = " < ".join(f"`{name}`" for name in measured)
    return "\n".join([*lines, "", f"The order {holds}: {order}.", "",
                      f"Machine: {found['machine']}.", ""])  # fmt: skip


def as_markdown(found: dict[str, Any]) -> str:
    plan, link, alone = found["plan"], found["link"], found["alone"]
    exchange = found["exchange"]
    lines = [
        f"{WORKERS} hosts, links of {plan['mbit']:g} Mbit/s: {link['bandwidth'] / 1e6:.1f} MB/s "
        f"and {1e6 * link['latency']:.0f} us measured. A gradient takes "
        f"{1e3 * alone['gradient_seconds']:.1f} ms (jitter {100 * alone['jitter']:.0f} %), what "
        f"lies between two {1e3 * alone['other_seconds']:.1f} ms; the model has "
        f"{found['model_bytes'] / 1e6:.2f} MB, an epoch "
        f"{sum(found['alone']['steps'])} gradients. Runs of each: {plan['rounds']}.",
        "",
        "| seconds per epoch | " + " | ".join(f"{case}: predicted | measured | error"
                                              for case in CASES) + " |",
        "|---|" + "---|" * (3 * len(CASES)),
    ]  # fmt: skip
    by_method: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        by_method.setdefault(row["spec"], {})[row["case"]] = row
    for spec, cases in by_method.items():
        cells = [
            f"{cases[case]['predicted_seconds']:.2f} | {cases[case]['measured_seconds']:.2f} | "
            f"{100 * cases[case]['error']:+.0f} %"
            for case in CASES
        ]
        lines.append(f"| `{spec}` | " + " | ".join(cells) + " |")
    errors = [abs(row["error"]) for row in found["rows"]]
    lines += [
        "",
        f"Mean absolute error {100 * statistics.mean(errors):.0f} %, largest "
        f"{100 * max(errors):.0f} %; {sum(error <= 0.15 for error in errors)} of {len(errors)} "
        "within 15 %.",
        "",
        "What an all-reduce moves, every host's parts to all others and back, takes plain sockets "
        f"{1e3 * exchange['seconds']:.0f} ms after a pause of a gradient's length; "
        f"a fair share of the links would be {1e3 * exchange['fair_seconds']:.0f} ms.",
        "",
        f"Machine: {found['machine']}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=0.4, help="of sleep in a gradient")
    parser.add_argument("--jitter", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--transformer", action="store_true", help="the task with fewer bits")
    parser.add_argument("--data", help="where the text of --transformer is")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        parser.exit(1, f"{reason}\n")
    plan = Plan(
        arguments.mbit, arguments.seconds, arguments.jitter, arguments.batch, arguments.epochs,
        arguments.rounds,
    )  # fmt: skip
    usual, shown = METHODS, as_markdown
    if arguments.transformer:
        if not arguments.data:
            parser.error("--transformer needs --data, the folder of input.txt")
        plan = dataclasses.replace(
            plan, mbit=20.0, seconds=0.25, batch=4, epochs=0.04, task=TRANSFORMER,
            data=str(Path(arguments.data).resolve()), cases=("equal workers",),
        )  # fmt: skip
        usual, shown = FEWER_BITS, as_markdown_of_steps
    with hosts(WORKERS, plan.mbit) as made:
        found = compare(made, plan, tuple(arguments.methods or usual))
    tell(found, shown, arguments)


if __name__ == "__main__":
    main()
