"""What collective operations cost, in closed form, on cards that nothing else uses.

L is the latency of one message in seconds, G the seconds per byte of a card, B the size
of the whole vector in bytes and P the number of members; arithmetic on the vectors is free. Cards
are full duplex: an exchange of B bytes in both directions costs L + B G.
"""

from __future__ import annotations

from gossamer.errors import ConfigurationError, unknown_name

COLLECTIVES: dict[str, str] = {
    "ring": "reduce-scatter and all-gather around a ring: least bytes, latency linear in P",
    "tree": "binomial reduce to one member, then binomial broadcast: the simplest",
    "halving_doubling": "Rabenseifner: recursive halving, then doubling: least bytes, log P steps",
    "butterfly": "recursive doubling with whole vectors: fewest steps, best for small vectors",
}


def all_reduce_seconds(
    algorithm: str, members: int, size_bytes: int, latency_s: float, seconds_per_byte: float
) -> float:
    """Seconds until every member has the sum of all members' vectors."""
    _check(algorithm, members, size_bytes)
    if members == 1:
        return 0.0
    whole_s = latency_s + size_bytes * seconds_per_byte
    if algorithm == "ring":
        # Both halves move the same blocks in the same number of steps.
        return 2 * all_gather_seconds(members, size_bytes, latency_s, seconds_per_byte)
    if algorithm == "tree":
        return 2 * broadcast_seconds(members, size_bytes, latency_s, seconds_per_byte)
    core = _power_of_two_within(members)
    # Members beyond the largest power of two send their vectors first and get the sum last.
    fix_up_s = 0.0 if core == members else 2 * whole_s
    steps = core.bit_length() - 1
    if algorithm == "butterfly":
        return fix_up_s + steps * whole_s
    moved_s = size_bytes * seconds_per_byte * (core - 1) / core
    return fix_up_s + 2 * (latency_s * steps + moved_s)


def broadcast_seconds(
    members: int, size_bytes: int, latency_s: float, seconds_per_byte: float
) -> float:
    """Seconds until every member has one member's vector, down a binomial tree."""
    _check_sizes(members, size_bytes)
    steps = (members - 1).bit_length()
    return steps * (latency_s + size_bytes * seconds_per_byte)


def all_gather_seconds(
    members: int, size_bytes: int, latency_s: float, seconds_per_byte: float
) -> float:
    """Seconds until every member has all blocks, of `size_bytes` together, around a ring."""
    _check_sizes(members, size_bytes)
    return (members - 1) * (latency_s + size_bytes / members * seconds_per_byte)


def all_reduce_bytes(algorithm: str, members: int, size_bytes: int) -> int:
    """Bytes that a member puts on its card during one all-reduce, rounded up.

    If the members send unequally (in a tree, or beyond a power of two) this is their mean, so that
    the network carries this number times the number of members.
    """
    _check(algorithm, members, size_bytes)
    if algorithm == "butterfly":
        core = _power_of_two_within(members)
        vectors = core * (core.bit_length() - 1) + 2 * (members - core)
    else:
        # P - 1 vectors move towards the sum, and P - 1 copies of the sum move back.
        vectors = 2 * (members - 1)
    return -(-vectors * size_bytes // members)


def _power_of_two_within(members: int) -> int:
    return 1 << (members.bit_length() - 1)


def _check(algorithm: str, members: int, size_bytes: int) -> None:
    if algorithm not in COLLECTIVES:
        raise unknown_name("collective algorithm", algorithm, COLLECTIVES)
    _check_sizes(members, size_bytes)


def _check_sizes(members: int, size_bytes: int) -> None:
    if members < 1 or size_bytes < 0:
        raise ConfigurationError(
            f"a collective among {members} members of {size_bytes} bytes cannot be; give 1 member "
            "or more and 0 bytes or more"
        )
