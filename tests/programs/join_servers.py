"""A user's loop with a method that has servers; `test_join.py` compares the workers' answers."""

from __future__ import annotations

import torch

import gossamer
from join_cases import STEPS, assert_close, digest, net, optimizer_of, plain, train


def _joined(rank: int, name: str, gamma: float = 0.1) -> tuple[object, gossamer.JoinedWorker]:
    model = net(rank)
    optimizer = optimizer_of(name, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=gamma)
    with gossamer.join(model, optimizer) as worker:
        train(worker, schedule=schedule)
    return model, worker


def case_of_a_synchronous_server(rank: int, name: str = "momentum") -> dict[str, object]:
    """The server's momentum, groups and schedule are the user's: one process on all batches."""
    model, worker = _joined(rank, name)
    alone = net(0)
    other = optimizer_of(name, alone)
    plain(alone, other, worker.size, schedule=torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.1))
    assert_close(model, alone, 1e-5 if name == "momentum" else 1e-4)
    return {"digest": digest(model)}


def case_of_an_adamw_server(rank: int) -> dict[str, object]:
    return case_of_a_synchronous_server(rank, "adamw")


def case_of_an_asynchronous_server(rank: int, name: str = "momentum") -> dict[str, object]:
    """Moved, finite, the same for all, and torch's own class on the server."""
    model, worker = _joined(rank, name)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not torch.equal(model[0].weight, net(0)[0].weight)
    kinds, momenta, rates = [], [], []
    for server in worker.coupling.session.servers.values():
        optimizer = server._optimizer
        kinds.append(type(optimizer).__name__)
        momenta += [group.get("momentum") for group in optimizer.param_groups]
        rates += [group["lr"] for group in optimizer.param_groups]
    return {"digest": digest(model), "kinds": kinds, "momenta": momenta, "rates": rates}


def case_of_an_asynchronous_adam(rank: int) -> dict[str, object]:
    return case_of_an_asynchronous_server(rank, "adam")


def case_of_rates_that_fall_to_nothing(rank: int) -> dict[str, object]:
    """After the second step the schedule sets all rates to 0: whoever follows stands still."""
    model = net(rank)
    optimizer = optimizer_of("momentum", model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.0)
    with gossamer.join(model, optimizer) as worker:
        train(worker, 2, schedule=schedule)
        # Everybody, the server's host included, has set its rates to 0.
        before = worker.coupling.session.store.add("lowered", 1)
        while worker.coupling.session.store.add("lowered", 0) < worker.size:
            pass
        with worker.consensus():
            there = digest(model)
        train(worker, STEPS, 2)
    assert before <= worker.size
    return {"before": there, "digest": digest(model)}


def case_of_what_is_accrued_at_the_end(rank: int) -> dict[str, object]:
    """Six gradients of ones at each worker, of which the last two fill no push."""
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.nn.init.zeros_(model.weight)
    with gossamer.join(model, optimizer) as worker:
        for _ in range(6):
            optimizer.zero_grad()
            model.weight.sum().backward()
            worker.step()
    return {"steps": float(-model.weight.detach().mean() / 0.5)}


def case_of_refusals(rank: int) -> dict[str, object]:
    """Sentences, not hangs."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    with gossamer.join(model, optimizer) as worker:
        for attempt in (
            lambda: worker.clip_grad_norm_(1.0, "global"),
            lambda: worker.clip_grad_norm_(1.0, "everywhere"),
            lambda: worker.load_state_dict({}),
            lambda: list(worker.shard(_loader())),
        ):
            try:
                attempt()
            except gossamer.ConfigurationError as error:
                said.append(str(error))
        train(worker, 1)
    for attempt in (worker.step, worker.state_dict, worker.__enter__):
        try:
            attempt()
        except gossamer.ConfigurationError as error:
            said.append(str(error))
    return {"said": said}


def _loader() -> object:
    data = torch.utils.data.TensorDataset(torch.arange(1.0))
    return torch.utils.data.DataLoader(data, batch_size=1)
