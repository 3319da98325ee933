"""One mean for everybody: added in order of rank, whatever memory it is made in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.rules import mean_in_order, mean_into


@settings(max_examples=60)
@given(
    st.integers(1, 5), st.sampled_from([0, 1, 1000, (1 << 16) + 3]), st.data(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)  # fmt: skip
def test_a_mean_has_the_bits_of_adding_first_to_last(
    parts: int, count: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    """In blocks or not, and if the mean takes the place of one of the values. Numbers of 16 bits
    are added in 32."""
    generator = torch.Generator().manual_seed(parts * count)
    values = [torch.randn(count, generator=generator).to(dtype) for _ in range(parts)]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = values[0].to(wide, copy=True)
    for value in values[1:]:
        total = total + value
    expected = (total / parts).to(dtype)
    assert torch.equal(mean_in_order(values), expected)
    place = data.draw(st.sampled_from([None, *range(parts)]))
    target = torch.empty_like(expected) if place is None else values[place]
    mean_into(target, values, parts)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_values_that_were_scaled_before_are_only_added(parts: int) -> None:
    """The divisor is then 1, also for tensors that do not lie in order in memory."""
    values = [torch.randn(300, 400).t() for _ in range(parts)]
    target = torch.empty(300, 400).t()
    mean_into(target, [value / parts for value in values], 1.0)
    assert torch.equal(target, mean_in_order(values))
