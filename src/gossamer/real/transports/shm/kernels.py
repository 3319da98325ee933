"""The kernels of our own, in Triton, which comes with torch wherever torch drives a GPU.

To be imported only by those who can do without it.
"""

# There is no Triton, and nothing known of its types, where the rest is checked.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _average(mine, theirs, count, block: tl.constexpr) -> None:  # noqa: ANN001
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = at < count
    some = tl.load(mine + at, mask=is_inside)
    others = tl.load(theirs + at, mask=is_inside)
    mean = others - (others - some) * 0.5  # the bits of torch's lerp_
    tl.store(mine + at, mean, mask=is_inside)
    tl.store(theirs + at, mean, mask=is_inside)


def compiled_average(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Of two vectors of 32 bits, aligned like torch's own: both become their mean."""
    zeros = torch.zeros(2, _BLOCK, device=device)
    # What Triton does for every call, finding the kernel for its arguments, takes half as long as
    # the kernel itself.
    with torch.cuda.device(device):
        kernel = _average[(1,)](*zeros, _BLOCK, block=_BLOCK)
    index = zeros.device.index

    def average(mine: Tensor, theirs: Tensor) -> None:
        if torch.cuda.current_device() != index:
            with torch.cuda.device(device):
                return average(mine, theirs)
        count = mine.numel()
        grid = (-(-count // _BLOCK), 1, 1)
        # Addresses: of a tensor Triton would first ask CUDA where it is.
        kernel[grid](mine.data_ptr(), theirs.data_ptr(), count, _BLOCK)
        return None

    average(*zeros)
    return average


@triton.jit(do_not_specialize=["number", "count", "parts"])
def _mean(table, left, result, number, count, parts, block: tl.constexpr) -> None:  # noqa: ANN001
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = at < count
    total = tl.zeros([block], tl.float32)
    added = 0.0
    for part in range(parts):
        value = tl.load(table + 2 * part).to(tl.pointer_type(tl.float32))
        left_at = tl.load(left + tl.load(table + 2 * part + 1))
        is_out = (left_at > 0) & (left_at <= number)
        some = tl.load(value + at, mask=is_inside)
        # The first as it is: added to zero, a negative zero would lose its sign.
        total = tl.where(is_out, total, tl.where(added > 0.0, total + some, some))
        added += tl.where(is_out, 0.0, 1.0)
    tl.store(result + at, tl.div_rn(total, added + tl.zeros([block], tl.float32)), mask=is_inside)


def compiled_mean(device: torch.device) -> Callable[[Tensor, int, int, Tensor], None]:
    """See `mean_in_one_pass`."""
    zeros = torch.zeros(_BLOCK, device=device)
    left = torch.zeros(1, dtype=torch.int64, device=device)
    table = torch.tensor([[zeros.data_ptr(), 0]], device=device)
    with torch.cuda.device(device):
        kernel = _mean[(1,)](table, left, zeros, 0, _BLOCK, 1, block=_BLOCK)
    index = zeros.device.index

    def mean(table: Tensor, left: int, number: int, result: Tensor) -> None:
        if torch.cuda.current_device() != index:
            with torch.cuda.device(device):
                return mean(table, left, number, result)
        count = result.numel()
        grid = (-(-count // _BLOCK), 1, 1)
        places = (table.data_ptr(), left, result.data_ptr())
        kernel[grid](*places, number, count, len(table), _BLOCK)
        return None

    mean(table, left.data_ptr(), 0, zeros)
    return mean
