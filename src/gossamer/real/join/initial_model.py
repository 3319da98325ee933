"""How the workers of a coupled loop begin from one model."""

from __future__ import annotations

import torch
from torch import nn

from gossamer.real.join.binding import Binding
from gossamer.real.join.gradient import can_send_buckets
from gossamer.real.output_model import unpack_bytes_, untrained
from gossamer.real.router import Addresses, Router
from gossamer.real.transports.transport import Window


def windows_of(plan: Addresses, binding: Binding, device: torch.device) -> dict[int, Window]:
    """What every end publishes."""
    lengths = plan.lengths(binding.layout.total)
    return {
        end: Window(length, binding.dtype, plan.process_of(end), device, binding.home)
        for end, length in enumerate(lengths)
    }


def share_beginning(hub: Router, model: nn.Module, binding: Binding, *, is_resumed: bool) -> bool:
    """Everyone starts from the model of worker 0, unless from a checkpoint of its own. Whether all
    of them can reduce gradients in buckets."""
    rank, transport, plan, driver = hub.rank, hub.transport, hub.plan, hub.driver
    own = transport.window(rank)
    if rank != 0 and not is_resumed:
        pending = transport.read(0)
        driver.wait(pending, "beginning")
        own.copy_(pending.result())
        unpack_bytes_(untrained(model), hub.ask(0, "untrained", "beginning"))
        for end in plan.hosted_by(rank)[1:]:
            transport.window(end).copy_(own[plan.slices[end - plan.size]])
    # Nobody may change anything before everyone has read it.
    binding.let_gpu_finish()
    cannot = torch.tensor([float(not can_send_buckets(binding, transport))])
    agreed = transport.all_reduce([cannot], range(plan.size))
    driver.wait(agreed, "beginning")
    agreed.result()
    return not float(cannot)
