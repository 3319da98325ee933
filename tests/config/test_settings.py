"""Settings travel as plain values, and files are replaced as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer import simulate
from gossamer.config.cluster import load_cluster
from gossamer.config.faults import parse_faults
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError
from gossamer.files import replace_bytes, replace_text, replacement


@pytest.mark.parametrize(
    ("task", "method", "choices"),
    [
        ("digits-mlp", "ad_psgd", {}),
        ("quadratic:dimension=20", "ssp:bound=4", {"clip": 1.0, "seed": 7}),
        ("digits-logistic", "easgd:groups=2", {"epochs": 0.3, "optimiser": "adamw", "batch": 8}),
    ],
)
def test_settings_come_out_of_json_as_they_went_in(
    task: str, method: str, choices: dict[str, object]
) -> None:
    """What a worker process reads is what the launcher was given, the faults included."""
    faults = parse_faults(kill=["3@2.5s"], slow=["0=10"], partition=["0,1|2-7@1s+2s"])
    settings = make_settings(
        task, method, load_cluster("equal-8").changed(faults=faults), **choices
    )
    again = Settings.from_json(json.loads(json.dumps(settings.to_json())))
    assert again.to_json() == settings.to_json()
    assert again.cluster == settings.cluster
    assert again.method == settings.method
    assert again.samples == settings.samples
    assert again.task.train.inputs.shape == settings.task.train.inputs.shape


def test_settings_of_another_version_are_refused() -> None:
    values = make_settings("digits-mlp", "d_psgd", "equal-8").to_json()
    with pytest.raises(ConfigurationError, match="unknown setting 'warp'"):
        Settings.from_json(values | {"warp": 9})


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Whatever happens while it is written, the old content stays, and no part is left."""
    path = tmp_path / "kept.json"
    replace_text(path, "old\r\n")

    def fail() -> None:
        with replacement(path) as part:
            part.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fail()
    assert path.read_bytes() == b"old\r\n"
    replace_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"learning_rate": "0.1"}, "learning_rate must be a number, got '0.1'"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"batch": True}, "batch must be a whole number, got True"),
        ({"optimiser": 3}, "optimiser must be a text, got 3"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(choice: dict, expected: str) -> None:
    """From Python nothing has parsed the values yet."""
    with pytest.raises(ConfigurationError, match=expected):
        make_settings("digits-mlp", "all_reduce", "equal-8", **choice)


def test_a_result_offers_its_summary_and_says_what_it_does_not_have() -> None:
    """What `result.accuracy` gives is also found by completion."""
    result = simulate("quadratic", "all_reduce", epochs=0.1, evaluations=1)
    assert {"loss", "epochs", "state_dict"} <= set(dir(result))
    with pytest.raises(AttributeError, match="a result has no 'nonsense'; its summary has "):
        _ = result.nonsense
