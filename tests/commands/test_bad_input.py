"""Bad input is one sentence and exit code 2, before anything is computed or written."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from command_line import Said, gossamer
from gossamer import MethodSpec, simulate
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from support import cluster_of, digits


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that should have been refused must not leave its folder in the repository."""
    monkeypatch.chdir(tmp_path)


def refused(*arguments: str) -> str:
    """The one sentence with which a command line is refused."""
    said = gossamer(*arguments)
    assert said.status == 2, said
    return sentence_of(said)


def sentence_of(said: Said) -> str:
    """It stands alone on standard error, is no traceback, and nothing else was printed."""
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    return said.err.removeprefix("error: ").strip()


UNKNOWN_NAMES = {
    "simulate --method ad_psdg": "unknown method 'ad_psdg'; did you mean 'ad_psgd'?",
    "simulate --task digit-mlp": "unknown task 'digit-mlp'; did you mean 'digits-mlp'?",
    "simulate --cluster equal-9": "unknown cluster 'equal-9'; did you mean 'equal-8'?",
    "simulate --method ad_psgd:topologi=ring":
        "unknown ad_psgd option 'topologi'; did you mean 'topology'?",
    "simulate --method ad_psgd:topology=rin": "unknown topology 'rin'; did you mean 'ring'?",
    "simulate --task digits-mlp:widht=3": "unknown digits-mlp option 'widht'; did you mean",
    "simulate --optimiser sgdd": "unknown optimiser 'sgdd'; did you mean 'sgd'?",
    "simulate --optimiser sgd:momentun=0.9": "unknown sgd option 'momentun'; did you mean",
    "simulate --schedule cosin": "unknown schedule 'cosin'; did you mean 'cosine'?",
    "simulate --split shufled": "unknown split 'shufled'; did you mean 'shuffled'?",
    "simulate --engine vectr": "unknown engine 'vectr'; did you mean 'vector'?",
    "simulate --buffers average": "unknown buffers policy 'average'; did you mean 'averaged'?",
    "simulate --device tpu": "unknown device 'tpu'; choose cpu or cuda",
    "simulate --device meta": "device 'meta' is not supported; choose cpu or cuda",
    "compare --methods all_reduce,ad_psdg": "unknown method 'ad_psdg'; did you mean 'ad_psgd'?",
    "reproduce ad-psgd-slow": "unknown table 'ad-psgd-slow'; did you mean 'ad-psgd-slow-worker'?",
    "simualte": "no such command 'simualte'; did you mean 'simulate'?",
    "train-faster": "no such command 'train-faster'; see `gossamer --help`",
    "simulate --methd ad_psgd": "no such option: --methd; did you mean --method?",
    "methods --jsn": "no such option: --jsn",
    "simulate ad_psgd": "write --method ad_psgd",
}  # fmt: skip

IMPOSSIBLE_VALUES = {
    "--lr -0.1": "--lr must be a finite number above 0, got -0.1",
    "--lr 0": "--lr must be a finite number above 0, got 0.0",
    "--lr nan": "--lr must be a finite number above 0, got nan",
    "--lr": "option '--lr' requires an argument",
    "--lr fast": "--lr must be a number, got 'fast'",
    "--workers 0": "--workers must be at least 1, got 0",
    "--workers 2.5": "--workers must be a whole number, got '2.5'",
    "--workers 2000 --split sharded": "cannot give each of 2000 workers a sample",
    "--batch 0": "--batch must be a finite number above 0, got 0",
    "--batch 1438": "a batch of 1438 is larger than the 1437 samples of digits-mlp",
    "--epochs 0": "--epochs must be a finite number above 0, got 0.0",
    "--epochs inf": "--epochs must be a finite number above 0, got inf",
    "--samples 0": "--samples must be at least 1, got 0",
    "--samples 9 --epochs 1": "give --epochs or --samples, not both",
    "--seed 9223372036854775808": "--seed must have at most 63 bits, got 9223372036854775808",
    "--method ssp:servers=5": "the model has 4 parameter tensors and cannot be cut over 5 servers",
    "--seeds 0": "seeds must be at least 1, got 0",
    "--evaluations 0": "--evaluations must be at least 1, got 0",
    "--threads 0": "--threads must be a finite number above 0, got 0",
    "--clip 0": "--clip must be a finite number above 0, got 0.0",
    "--model-bytes -5": "--model-bytes must be a size of at least one byte such as 100e6",
    "--split dirichlet:alpha=-1": "dirichlet: alpha must be at least 0.001",
    "--method easgd:period=0": "easgd: period must be at least 1, got 0",
    "--method easgd:alpha=2": "easgd: alpha must lie between 0 and 1, got 2",
    "--method easgd:alpha=nan": "easgd: alpha must be a number, got 'nan'",
    "--method d_psgd:groups=3": "groups must divide the number of workers, got groups=3 for 8",
    "--method d_psgd:topology=(ring": "parentheses that do not match",
    "--method ad_psgd:topology=bipartite_ring --workers 7":
        "bipartite_ring needs an even number of workers, got 7; use 6 or 8",
    "--method ad_psgd:paper --workers 5": "needs an even number of workers, got 5",
    "--task digits-mlp:width=0": "digits-mlp: width must be at least 1, got 0",
    "--slow 9=10": "the fault 'slow 9=10' names worker 9, but the 8 workers are numbered 0 to 7",
    "--slow 0": "--slow cannot read '0'; write it as 0=10 or 0=10@1s+2s",
    "--slow 0=0": "--slow cannot read '0=0'",
    "--slow 0=1.2.3": "--slow cannot read '0=1.2.3'",
    "--slow 0=nan": "--slow cannot read '0=nan'",
    "--slow 0=2@1s+0s": "--slow cannot read '0=2@1s+0s'",
    "--slow-link 8=2": "names worker 8",
    "--kill 3": "--kill cannot read '3'; write it as 3@2.5s",
    "--kill 3@": "--kill cannot read '3@'",
    "--kill x@1s": "--kill cannot read 'x@1s'",
    "--kill 3@1s+2s": "--kill cannot read '3@1s+2s'",
    "--kill 3@1e400": "--kill cannot read '3@1e400'",
    "--kill 8@1s": "names worker 8",
    "--pause 3@1s": "--pause cannot read '3@1s'; write it as 2@1s+0.5s",
    "--drop 2": "--drop cannot read '2'; write it as 0.05 or 0.05@1s+2s (a probability below 1)",
    "--drop .": "--drop cannot read '.'",
    "--delay soon": "--delay cannot read 'soon'; write it as 20ms or 20ms@1s+2s",
    "--partition 0|0": "--partition cannot read '0|0'; write it as 0,1|2-7@1s+2s, no worker on two",
    "--partition 0,1": "--partition cannot read '0,1'",
    "--partition 0|1-99999999999": "--partition cannot read '0|1-99999999999'",
    "--partition 0|8": "names worker 8",
    "--cluster none.toml": "cluster file 'none.toml' does not exist",
    "--task digits-mlp --data .": "task digits-mlp brings its own data",
    "--task mnist-lenet": "task mnist-lenet needs data; get the four MNIST IDX files from",
}  # fmt: skip

COMPARISONS = {
    "--lr 0.1,,0.2": "--lr must be numbers separated by commas, got '0.1,,0.2'",
    "--lr 0.1,-1": "--lr must be a finite number above 0, got -1.0",
    "--target nan": "--target must be an accuracy above 0 and at most 1 (or in per cent,",
    "--target 101": "got 101",
    "--target -1": "got -1",
    "--seeds some": "--seeds must be a whole number or auto, got 'some'",
    "--engine none": "compare needs gradients; use --engine vector or loop",
    "--seeds 0": "seeds must be at least 1, got 0",
}


@pytest.mark.parametrize("line", UNKNOWN_NAMES)
def test_an_unknown_name_is_refused_with_the_nearest_right_one(line: str) -> None:
    assert UNKNOWN_NAMES[line] in refused(*line.split())


@pytest.mark.parametrize("line", IMPOSSIBLE_VALUES)
def test_an_impossible_value_is_refused_and_leaves_nothing_behind(
    line: str, tmp_path: Path
) -> None:
    """No run folder, not even the folder of the run folders."""
    runs = tmp_path / "runs"
    sentence = refused(
        "simulate", *line.split(), *(() if line == "--lr" else ("--runs", str(runs)))
    )
    assert IMPOSSIBLE_VALUES[line] in sentence
    assert not runs.exists()


def test_a_damaged_trace_of_a_cluster_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The network is described before anything runs."""
    (tmp_path / "traffic.csv").write_text("0,0.1\n1,much\n")
    path, runs = tmp_path / "office.toml", tmp_path / "runs"
    path.write_text('[background]\ntrace = "traffic.csv"\n')
    sentence = refused("simulate", "--cluster", str(path), "--runs", str(runs))
    assert "entry 2: expected seconds and a share such as 1.5,0.3" in sentence
    assert not runs.exists()


@pytest.mark.parametrize("line", COMPARISONS)
def test_an_impossible_comparison_is_refused_and_leaves_nothing_behind(
    line: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    assert COMPARISONS[line] in refused("compare", *line.split(), "--runs", str(runs))
    assert not runs.exists()


def test_methods_of_a_comparison_are_named_once(tmp_path: Path) -> None:
    runs = ("--runs", str(tmp_path / "runs"))
    assert "names a method twice" in refused("compare", "--methods", "easgd easgd", *runs)
    assert "names no method" in refused("compare", "--methods", " ", *runs)
    # The last one is wrong: the first ones must not have been run by then.
    assert "period must be" in refused("compare", "--methods", "ad_psgd easgd:period=0", *runs)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["simulate", "compare", "reproduce ad-psgd-slow-worker"])
def test_a_place_that_cannot_be_written_is_refused_before_the_run(command: str) -> None:
    """A path below a file is none, also for root."""
    sentence = refused(*command.split(), "--runs", "/dev/null/runs")
    assert "cannot be made (Not a directory)" in sentence
    assert "--runs none" in sentence


# ---------------------------------------------------------------------- data files


def mnist(folder: Path) -> None:
    """Files of the right names: the labels are cut short."""
    folder.joinpath("train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0"))


def cifar10(folder: Path) -> None:
    folder.joinpath("data_batch_1.bin").write_bytes(b"\0" * 1000)


def shakespeare(folder: Path) -> None:
    folder.joinpath("input.txt").write_bytes(b"\xff\xfe" * 100)


DATA = {"mnist-lenet": mnist, "cifar10-resnet20": cifar10, "shakespeare-gpt": shakespeare}


@pytest.mark.parametrize("task", DATA)
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_data_that_are_missing_or_damaged_are_named(
    task: str, command: str, tmp_path: Path
) -> None:
    """With the file, what is wrong with it and where to get it; and nothing is written."""
    data, runs = tmp_path / "data", tmp_path / "runs"
    data.mkdir()

    def refusal() -> str:
        places = ("--data", str(data), "--runs", str(runs))
        return refused(command, "--task", task, *places)

    missing = refusal()
    assert f"data file {data}" in missing
    assert "does not exist; get " in missing
    DATA[task](data)
    damaged = refusal()
    assert f"data file {data}" in damaged
    assert "does not exist" not in damaged
    assert "; get " in damaged
    assert not runs.exists()


# ---------------------------------------------------------------------- from Python


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"learning_rte": 0.1}, "unknown setting 'learning_rte'; did you mean 'learning_rate'?"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ({"device": "cuda:99"}, "no CUDA device was found for 'cuda:99'; use the device cpu"),
        ({"batch": 5000}, "a batch of 5000 is larger than the 1437 samples"),
    ],
)
def test_the_library_refuses_the_same(choices: dict[str, object], sentence: str) -> None:
    """With an exception of its own, before a run is made."""
    with pytest.raises(ConfigurationError) as error:
        simulate(digits(), "ad_psgd", cluster_of(2), **choices)
    assert sentence in str(error.value)


def test_settings_are_whole_once_made() -> None:
    """What was left out is filled in as the task suggests, and written down as plain values."""
    settings = make_settings("digits-mlp", "easgd", "equal-8")
    described = settings.as_dict()
    assert (described["batch"], described["epochs"]) == (digits().batch, digits().epochs)
    assert described["learning_rate"] in digits().learning_rates
    assert described["method_options"]["period"] >= 1
    grouped = make_settings("digits-mlp", "easgd:groups=2", "equal-8").as_dict()
    assert grouped["method_options"]["alpha"] == pytest.approx(0.9 / 2)


@pytest.mark.parametrize(
    ("method", "options", "others", "sentence"),
    [
        ("easgd", {"perod": 3}, {}, "unknown easgd option 'perod'; did you mean 'period'?"),
        ("easgd", {"period": -1}, {}, "easgd: period must be at least 1, got -1"),
        ("easgd", {"period": 2.5}, {}, "easgd: period must be a whole number, got '2.5'"),
        ("easgd", {"alpha": float("nan")}, {}, "easgd: alpha must be a number, got 'nan'"),
        ("local_sgd", {"state": "forgotten"}, {}, "unknown local_sgd state 'forgotten'"),
        ("ensemble", {"period": 3}, {}, "unknown ensemble option 'period'; choose one of shared"),
        ("d_psgd", {}, {"groups": -2}, "d_psgd: groups must be a number of groups or 'host'"),
        ("d_psgd", {}, {"servers": 2}, "d_psgd has no server, so servers cannot be set"),
        ("ssp", {}, {"servers": 0}, "ssp: servers must be at least 1, got 0"),
        ("ssp", {}, {"placement": "workrs"}, "unknown ssp placement 'workrs'; did you mean"),
        ("ssp", {}, {"server_optimiser": "sgdd"}, "unknown optimiser 'sgdd'; did you mean 'sgd'?"),
    ],
)
def test_a_spec_made_in_python_is_refused_as_its_text_would_be(
    method: str, options: dict[str, object], others: dict[str, Any], sentence: str
) -> None:
    """Names, types and ranges are checked where a spec is made, whoever makes it."""
    with pytest.raises(ConfigurationError) as failure:
        MethodSpec(METHODS[method], options, **others)
    assert sentence in str(failure.value)


def test_a_spec_made_in_python_is_the_spec_of_its_text() -> None:
    """Both have the same options with the same types, and print alike."""
    made = MethodSpec(METHODS["easgd"], {"alpha": 1, "period": 4, "synchronous": True}, groups=2)
    read = parse_method("easgd:alpha=1,period=4,synchronous=true,groups=2")
    assert (made, str(made)) == (read, str(read))
    assert {key: type(value) for key, value in made.options.items()} == {
        "alpha": float, "period": int, "synchronous": bool,
    }  # fmt: skip
