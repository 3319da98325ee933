"""The look of each method, which is the same on every page and picture.

The methods compared by default come first, so that each of them has a colour of its own. If two
methods of a page would have the same colour (such as one method with two settings), the later name
takes the next free colour.
"""

from __future__ import annotations

from collections.abc import Iterable

from gossamer.methods import METHODS

# Okabe and Ito's colours without black and without yellow, which means waiting; then six more that
# differ from these and from each other.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
    "#7B52AB", "#8C5A3C", "#7D8B1F", "#B3224A", "#1F8A8A", "#5C6FD6",
)  # fmt: skip
_FIRST = (
    "ad_psgd", "all_reduce", "easgd", "downpour", "d_psgd", "push_sum", "local_sgd", "diloco",
)  # fmt: skip


def places(labels: Iterable[str]) -> dict[str, int]:
    """The look of each method, as an index into the lists of colours, dashes and markers."""
    found: dict[str, int] = {}
    for label in sorted(set(labels), key=lambda label: (":" in label, label)):
        taken = set(found.values())
        shades = {place % len(COLOURS) for place in taken}
        own = _own(label)
        further = range(own, own + 100 * len(COLOURS))
        worn = shades if len(shades) < len(COLOURS) else set[int]()
        found[label] = next(
            place for place in further if place not in taken and place % len(COLOURS) not in worn
        )
    return found


def _own(label: str) -> int:
    """The index of the method with which a label begins; for other names it follows from them."""
    name = label.partition(":")[0].partition(" ")[0]
    known = list(dict.fromkeys([*_FIRST, *METHODS]))
    return known.index(name) if name in known else len(known) + sum(name.encode())
