"""The one kernel of our own, in Triton, which comes with torch wherever torch drives a GPU.

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
        kernel[(-(-count // _BLOCK), 1, 1)](mine, theirs, count, _BLOCK)
        return None

    average(*zeros)
    return average
