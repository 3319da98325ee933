"""What Lightning's metrics and callbacks ask of all workers together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.errors import ConfigurationError
from gossamer.integrations.reduction import reduced


class Others:
    """A coupled worker with one other, which always says two more; it notes all names."""

    is_open = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def gather(self, value: Any, *, name: str = "") -> list[Any]:
        self.names.append(name)
        return [value, value + 2]

    def any(self, flag: object, *, name: str = "") -> bool:
        self.names.append(name)
        return bool(flag)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", 4.0), ("mean", 2.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0),
        (torch.distributed.ReduceOp.SUM, 4.0),
    ],
)  # fmt: skip
def test_a_reduction_is_the_one_that_was_asked_for(reduction: object, expected: float) -> None:
    """Frameworks name it, torch has objects for it."""
    worker: Any = Others()
    assert reduced(worker, torch.tensor(1.0), reduction, "loss").item() == expected
    assert reduced(worker, torch.tensor(1), "mean", "count").item() == 2.0
    with pytest.raises(ConfigurationError, match="cannot reduce a value by 'product'"):
        reduced(worker, torch.tensor(1.0), "product", "loss")


def strategy_with(worker: Others) -> Any:
    pytest.importorskip("lightning")
    from gossamer.integrations.lightning import JoinedStrategy

    strategy = JoinedStrategy("ad_psgd", accelerator=None)
    strategy.worker = worker
    return strategy


def test_every_metric_and_each_of_its_parts_has_a_name_of_its_own() -> None:
    """A mean has a sum and a count; a sum is a sum, a maximum a maximum."""
    worker = Others()
    strategy = strategy_with(worker)
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

    found = _ResultCollection(training=True)
    for name, how in (("loss", "mean"), ("count", "sum"), ("worst", "max")):
        found.log(
            "training_step", name, torch.tensor(3.0), on_step=True, on_epoch=True, reduce_fx=how,
            sync_dist=True, sync_dist_fn=strategy.reduce, batch_size=4,
        )  # fmt: skip
    values = {name.partition(".")[2]: metric.compute().item() for name, metric in found.items()}
    assert len(worker.names) == len(set(worker.names)) == 7
    assert values == pytest.approx({"loss": (12.0 + 14.0) / (4 + 6), "count": 8.0, "worst": 5.0})


def test_two_callbacks_that_stop_have_names_of_their_own() -> None:
    """What one of them decides is not taken for the other's decision."""
    worker = Others()
    strategy = strategy_with(worker)
    from lightning.pytorch.callbacks import EarlyStopping

    class Stops(EarlyStopping):
        def ask(self) -> None:
            strategy.reduce_boolean_decision(True, all=False)

    Stops("loss").ask()
    Stops("accuracy").ask()
    assert len(set(worker.names)) == 2
