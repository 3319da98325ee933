"""What loops share beside their models, and how else they can be written; for `test_loop_words`."""

from __future__ import annotations

import time

import torch

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.pending import Pending
from gossamer.real.join.shared_values import SharedValue
from join_cases import batch, digest, loss_of, net, train


def _joined(rank: int) -> gossamer.JoinedWorker:
    model = net(rank)
    return gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1))


def case_of_matched_values(rank: int) -> dict[str, object]:
    """All make the same calls; the last worker leaves after two steps."""
    worker = _joined(rank)
    found: list[object] = []
    with worker:
        for step in range(4):
            if rank == worker.size - 1 and step == 2:
                break
            train(worker, 1, step)
            vector = worker.mean(torch.tensor([rank, 1.0]))
            seen = worker.broadcast(torch.full((2,), 10 * rank), source=worker.size - 1)
            count = worker.mean(torch.tensor(rank)).item()
            found.append([
                worker.mean(float(rank)), vector.tolist(), count, seen.tolist(),
                worker.broadcast(f"from {rank}", source=1),
                worker.any(rank == 1 and step == 1),
            ])  # fmt: skip
    return {"found": found, "digest": digest(worker.model)}


def case_of_other_words(rank: int) -> dict[str, object]:
    """One worker calls another word than the rest, and a source that there is not."""
    worker = _joined(rank)
    said: list[str] = []
    with worker:
        try:
            worker.broadcast(1.0, source=worker.size)
        except ConfigurationError as error:
            said.append(str(error))
        try:
            if rank == 0:
                worker.any(True)
            else:
                worker.mean(1.0)
        except ConfigurationError as error:
            said.append(str(error))
    return {"said": said}


def case_of_a_death_that_some_have_heard(rank: int) -> dict[str, object]:
    """Worker 2 answers one of the others and dies before it answers the second."""
    worker = _joined(rank)
    worker.open()
    if rank < 2:
        mean = worker.mean(float(rank))
        again = worker.mean(float(rank))
        worker.close()
        return {"mean": mean, "again": again}
    heard: list[int] = []

    def once(number: int) -> SharedValue | Pending[SharedValue]:
        heard.append(number)
        return Pending("never") if heard[1:] else SharedValue(2, "mean", "", 5.0)

    worker.coupling.session.router.offer("worker.mean", once)
    while len(heard) < 2 or worker.coupling.session.store.get("shared value 1") is None:
        time.sleep(0.001)
    worker.__exit__(None, RuntimeError("dies"), None)
    return {}


def case_of_values_that_nobody_waits_for(rank: int) -> dict[str, object]:
    """Worker 0 asks before worker 1 has said anything, and again afterwards."""
    worker = _joined(rank)
    store = worker.coupling.session.store

    def meet(what: str) -> None:
        store.add(what, 1)
        while store.add(what, 0) < worker.size:
            time.sleep(0.001)

    def share(value: float, flag: bool) -> tuple[object, ...]:
        tensor = worker.broadcast(torch.tensor(value), source=1)
        return worker.mean(value), worker.any(flag), tensor.item()

    with worker:
        first = share(0.0, False) if rank == 0 else ()  # nobody else has said anything
        meet("asked")
        if rank == 1:
            share(4.0, True)
            share(6.0, False)  # the flag was true in between
        meet("said")
        until = time.monotonic() + 100
        flags: list[object] = []
        while True:
            now = share(0.0, False) if rank == 0 else (3.0, True, 6.0)
            flags.append(now[1])
            if (now[0], now[2]) == (3.0, 6.0) or time.monotonic() > until:
                break
        meet("heard")
        said = ""
        try:
            worker.mean(1.0)
            worker.mean(2.0)
        except ConfigurationError as error:
            said = str(error)
        named = worker.mean(1.0, name="another") if rank == 0 else 1.0
        train(worker, 2)
    return {"first": first, "now": now, "flags": flags, "said": said, "named": named}


def case_of_stopping_together(rank: int) -> dict[str, object]:
    """Worker 1 has enough after a few steps, and all leave their loops."""
    worker = _joined(rank)
    made = 0
    with worker:
        while made < 100_000:
            train(worker, 1, made)
            made += 1
            if worker.any(rank == 1 and made >= 3):
                break
    return {"made": made, "digest": digest(worker.model)}


def _normalised_net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU(), torch.nn.Linear(7, 2)
    )


def case_of_one_large_batch(rank: int) -> dict[str, object]:
    """BatchNorm over all workers beside one worker that has all their batches; rates are scaled and
    rise."""
    model, size = _normalised_net(), gossamer.size()
    worker = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    warm_up, rates = worker.scale_lr(warmup=3), []
    layers = worker.synchronise_batch_norm()
    with worker:
        for step in range(5):
            rates.append(round(worker.optimizer.param_groups[0]["lr"], 6))
            train(worker, 1, step)
            warm_up.step()
    alone = _normalised_net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = rates[step]
        parts = [batch(one, step) for one in range(size)]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss_of(alone, inputs, targets).backward()
        optimizer.step()
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    return {"apart": apart, "rates": rates, "layers": layers, "digest": digest(model)}


def case_of_no_common_batch(rank: int) -> dict[str, object]:
    """An asynchronous method has no batch of all workers."""
    worker = _joined(rank)
    said = ""
    try:
        worker.synchronise_batch_norm()
    except ConfigurationError as error:
        said = str(error)
    with worker:
        train(worker, 1)
    return {"said": said}


def case_of_opening_and_closing(rank: int) -> dict[str, object]:
    """The loop without a `with` ends as the one with it."""
    digests = []
    assert (gossamer.rank(), gossamer.size()) == (rank, 2)
    worker = _joined(rank)
    worker.open()
    for step in range(3):
        worker.model.zero_grad()
        loss_of(worker.model, *batch(rank, step)).backward()
        worker.step()
    worker.close()
    worker.close()
    digests.append(digest(worker.model))
    try:
        worker.step()
    except ConfigurationError as error:
        return {"digest": digests[0], "said": str(error)}
    return {}


def case_of_a_driven_optimizer(rank: int) -> dict[str, object]:
    """A schedule, a closure and a scaler drive `worker.optimizer`; one gradient is infinite."""
    model = net(rank)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    moved: list[bool] = []
    with gossamer.join(model, own) as worker:
        optimizer = worker.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is own.param_groups
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, *batch(rank, step))
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0.0
            schedule.step()
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = batch(rank, 4 + step)
            inputs = inputs * (float("inf") if step == 1 and rank == 1 else 1.0)
            before = digest(model)
            scaler.scale(loss_of(model, inputs, targets)).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            moved.append(digest(model) != before)
        made = worker.coupling.session.metrics.steps
    return {"digest": digest(model), "moved": moved, "scale": scaler.get_scale(), "made": made}


def case_of_codistillation(rank: int) -> dict[str, object]:
    """The loop asks what others predict; one that does not ask is told to."""
    torch.manual_seed(rank)
    model = net(rank)
    joined = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=12)
    added: list[float] = []
    with joined as worker:
        for step in range(12):
            inputs, targets = batch(rank, step)
            output = model(inputs)
            loss = torch.nn.functional.cross_entropy(output, targets)
            taught = worker.codistill(loss, output, inputs)
            added.append(float(taught - loss))
            worker.optimizer.zero_grad()
            taught.backward()
            worker.step()
    return {"added": added, "digest": digest(model)}


def case_of_a_loop_that_does_not_ask(rank: int) -> dict[str, object]:
    model = net(rank)
    said = ""
    try:
        with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4) as worker:
            train(worker, 4)
    except ConfigurationError as error:
        said = str(error)
    return {"said": said}


def case_of_a_population(rank: int) -> dict[str, object]:
    """Every loop reports its loss; rates are tuned only inside a step."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rates: set[float] = set()
    with gossamer.join(model, optimizer, steps=40) as worker:
        for step in range(40):
            worker.report(loss=float(rank) + 1.0)  # worker 0 is always the best
            train(worker, 1, step)
            rates.add(optimizer.param_groups[0]["lr"])
            time.sleep(0.005)
        lineage = worker.observer.metrics.lineage.entries
    return {"rates": sorted(rates), "lineage": lineage, "digest": digest(model)}
