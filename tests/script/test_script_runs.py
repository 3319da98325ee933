"""A script in virtual time: the same bits as on real workers, the same run on any machine."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path

import pytest
import torch

import scripts
from command_line import gossamer
from gossamer.config.cluster import Compute
from gossamer.script.fork_server import ForkServer
from scripts import HEAD, LOOP, cluster_of, printed, run, written

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "scripts"
DIGEST = """
import hashlib
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
if worker.is_main:
    print("digest", hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest())
"""
wide = pytest.mark.wide


@pytest.mark.parametrize(
    "method",
    [
        "all_reduce",
        *(
            pytest.param(one, marks=wide)
            for one in ("d_psgd", "local_sgd", "sync_server", "push_sum")
        ),
    ],
)
def test_the_bits_are_those_of_real_workers(
    method: str, tmp_path: Path, server: ForkServer
) -> None:
    """A method that depends on no timing gives the same losses and the same model in both
    worlds."""
    script = written(tmp_path, HEAD, LOOP, DIGEST)
    result = run(server, script, method)
    said = gossamer("run", "-n", "4", "--method", method, script)
    shown = [line.removeprefix("[0] ") for line in said.out.splitlines()]
    assert said.status == 0
    assert printed(script) == [line for line in shown if line.startswith(("loss", "digest"))]
    assert printed(script)[-1] == f"digest {result.parameters_digest}"


@pytest.mark.parametrize(
    "method", ["ad_psgd", *(pytest.param(m, marks=wide) for m in ("downpour", "all_reduce"))]
)
def test_the_number_of_cores_changes_nothing(
    method: str, tmp_path: Path, server: ForkServer
) -> None:
    """The digests of the events and of the parameters are the same on one core and on two."""
    script = written(tmp_path, HEAD, LOOP)
    cluster = cluster_of(4, slow=["0=4"])
    found: list[tuple[str, str]] = []
    for cores in ({0}, {0, 1}):
        before = scripts.use_cores(server, cores)
        try:
            result = run(server, script, method, cluster, seed=3)
        finally:
            scripts.use_cores(server, before)
        found.append((result.digest, result.parameters_digest))
    assert found[0] == found[1]
    other = run(server, script, method, cluster, seed=4)
    assert other.digest != found[0][0]


TELL = """
seen = []
import json
with gossamer.join(model, optimizer, steps=16) as worker:
    for epoch in range(2):
        for batch, wanted in worker.shard(loader):
            seen.append([epoch, batch.sum().item()])
            optimizer.zero_grad()
            cross_entropy(model(batch), wanted).backward()
            worker.step()
print(json.dumps(seen))
"""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=wide)])
def test_every_batch_is_one_workers_whatever_a_loader_reads_ahead(
    workers: int, tmp_path: Path, server: ForkServer
) -> None:
    """With an asynchronous method each batch of a pass is taken once, and a slow worker takes
    fewer."""
    head = HEAD.replace("shuffle=True", f"shuffle=True, num_workers={workers}")
    script = written(tmp_path, head, TELL)
    run(server, script, "ad_psgd", cluster_of(4, slow=["0=4"]))
    taken = [json.loads(printed(script, rank)[-1]) for rank in range(4)]
    every = [tuple(one) for own in taken for one in own]
    assert len(every) == len(set(every)) == 2 * 32
    assert len(taken[0]) < min(len(own) for own in taken[1:]) / 2


def test_a_server_follows_the_schedule_of_the_loop(tmp_path: Path, server: ForkServer) -> None:
    """A synchronous server that has another instance of the user's optimiser gives the bits of
    all-reduce, also when a schedule changes the rate."""
    adam = HEAD.replace(
        "SGD(model.parameters(), lr=0.05, momentum=0.9)", "AdamW(model.parameters())"
    )
    script = written(tmp_path, adam, LOOP)
    digests = {run(server, script, m).parameters_digest for m in ("sync_server", "all_reduce")}
    assert len(digests) == 1


def test_a_worker_that_dies_is_left_out(tmp_path: Path, server: ForkServer) -> None:
    """The others go on, another worker is the main one, and the servers live on."""
    script = written(tmp_path, HEAD, LOOP)
    for method in ("all_reduce", "downpour"):
        result = run(server, script, method, cluster_of(4, kill=["0@0.05s"]))
        assert result.living == 3
        assert len(result.history) == 2
        assert scripts.children(scripts.process_of(server)) == []


def test_what_a_dead_worker_has_trained_is_not_trained_again(
    tmp_path: Path, server: ForkServer
) -> None:
    """Only the batches of a gradient that was not delivered go to the others. On a thin link a
    worker mostly waits, and dies with nothing under way."""
    told = TELL.replace("seen.append(", "print(").replace("()])", "()], flush=True)")
    script = written(tmp_path, HEAD, told)
    run(server, script, "downpour", cluster_of(4, kill=["1@0.3s"]), model_bytes=50_000_000)
    taken = [printed(script, rank) for rank in range(4)]
    every = [line for own in taken for line in own if "," in line]
    assert len(taken[1]) < min(map(len, (taken[0], taken[2], taken[3])))
    assert len(every) == len(set(every)) == 2 * 32


def test_the_output_is_that_of_the_virtual_moment(tmp_path: Path, server: ForkServer) -> None:
    """An evaluation takes no virtual time, and what it reports is a row of that moment."""
    quiet = LOOP.replace(
        "        with worker.consensus()", "        if False:\n         with worker.consensus()"
    )
    quiet = quiet.replace("        worker.report(", "        0 and worker.report(")
    quiet = quiet.replace("print(", "0 and print(")
    looked = run(server, written(tmp_path, HEAD, LOOP), "all_reduce")
    other = tmp_path / "other"
    other.mkdir()
    unlooked = run(server, written(other, HEAD, quiet), "all_reduce")
    assert looked.virtual_seconds == unlooked.virtual_seconds
    assert looked.parameters_digest == unlooked.parameters_digest
    assert [row["epochs"] for row in looked.history] == [1.0, 2.0]
    assert looked.history[-1]["virtual_seconds"] <= looked.virtual_seconds
    assert unlooked.history == []
    assert "reported nothing" in unlooked.notices[-1]


def test_a_script_is_simulated_and_compared_by_commands(
    tmp_path: Path, commands: ForkServer
) -> None:
    """A run folder, a page, one JSON object; `compare` ranks by what the script reports."""
    script = written(tmp_path, HEAD, LOOP)
    runs = tmp_path / "runs"
    common = ("--workers", "4", "--slow", "0=4", "--runs", str(runs), "--json")
    said = gossamer("simulate", script, "--compute", "measured", *common, "--", "--ignored")
    assert said.status == 0, said.err
    assert said.json["accuracy"] > 0.5
    (folder,) = runs.iterdir()
    assert (folder / "report.html").exists()
    assert (folder / "outputs" / "worker-3.out").exists()
    assert '"compute": "measured"' in (folder / "config.json").read_text()
    said = gossamer("compare", script, "--methods", "all_reduce ad_psgd", "--seeds", "1", *common)
    assert said.status == 0, said.err
    assert [row["method"] for row in said.json["ranking"]] == ["ad_psgd", "all_reduce"]


@pytest.mark.parametrize("name", ["digits", "gpt", "batchnorm"])
def test_few_lines_couple_a_public_script(name: str) -> None:
    """At most 12 lines are new or other than before, indentation aside."""
    both = [(EXAMPLES / f"{name}{end}.py").read_text().splitlines() for end in ("_plain", "")]
    plain, coupled = ([line.strip() for line in one if line.strip()] for one in both)
    changed = [line for line in difflib.ndiff(plain, coupled) if line.startswith("+ ")]
    assert 0 < len(changed) <= 12, changed


@pytest.mark.parametrize(
    ("name", "method", "arguments"),
    [
        ("gpt", "all_reduce", ("--iterations", "4")),
        pytest.param("digits", "ad_psgd", ("--epochs", "1"), marks=wide),
        pytest.param("batchnorm", "d_psgd", (), marks=wide),
        pytest.param("batchnorm", "downpour", (), marks=wide),
        pytest.param("gpt", "ad_psgd", (), marks=wide),
    ],
)
def test_public_scripts_run_on_sixteen_workers_with_one_slow(
    name: str, method: str, arguments: tuple[str, ...], tmp_path: Path, server: ForkServer
) -> None:
    """As they are, and with the same digests when they are run again."""
    script = tmp_path / f"{name}.py"
    script.write_text((EXAMPLES / f"{name}.py").read_text())
    cluster = scripts.load_cluster("one-slow-of-16")
    times = 1 if "--iterations" in arguments else 2
    found = [run(server, str(script), method, cluster, arguments=arguments) for _ in range(times)]
    assert len({(one.digest, one.parameters_digest) for one in found}) == 1
    assert times == 1 or found[0].history[-1]["loss"] < 3.2
    assert found[0].steps >= 16 * 2


@wide
@pytest.mark.parametrize("name", ["digits", "gpt", "batchnorm"])
def test_the_curve_of_a_public_script_is_that_of_real_workers(
    name: str, tmp_path: Path, server: ForkServer
) -> None:
    """What four workers report with all-reduce, bit for bit."""
    script, runs = tmp_path / f"{name}.py", tmp_path / "runs"
    script.write_text((EXAMPLES / f"{name}.py").read_text())
    few = {"digits": ("--epochs", "2"), "gpt": ("--iterations", "10")}.get(name, ())
    virtual = run(server, str(script), "all_reduce", arguments=few)
    said = gossamer(
        "run", "-n", "4", "--method", "all_reduce", "--output", "folder", "--runs", str(runs),
        str(script), *few,
    )  # fmt: skip
    assert said.status == 0, said.err
    (kept,) = runs.rglob("metrics.jsonl")
    real = [json.loads(line) for line in kept.read_text().splitlines()]
    curves = [
        [(row.get("loss"), row.get("accuracy")) for row in h] for h in (real, virtual.history)
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) >= 2


@wide
def test_balanced_batches_are_those_of_real_loops(tmp_path: Path, server: ForkServer) -> None:
    """The coordinator tells each loop how long its gradients take, and the loops cut their batches
    by that: the slow worker gets small ones, the run is shorter, and the
    model is that of equal batches to rounding."""
    head = HEAD.replace("192", "576").replace("batch_size=6", "batch_size=8")
    script = written(tmp_path, head, LOOP)
    line = Compute(seconds=0.002, per_sample=0.001, distribution="constant", jitter=0.0)
    cluster = dataclasses.replace(cluster_of(4, slow=["0=4"]), compute=line)
    equal, own = (
        run(server, script, method, cluster, steps=36)
        for method in ("all_reduce", "all_reduce:balance=speed")
    )
    torch.testing.assert_close(own.parameters, equal.parameters, rtol=1e-3, atol=1e-4)
    assert own.summary["steps"] == equal.summary["steps"]
    assert own.summary["batch_share"][0] < 0.6 / 4
    assert own.virtual_seconds < 0.6 * equal.virtual_seconds
