"""What goes with what: which compressor suits which kind of exchange, and why others do not.

Every method says in its row what it exchanges. A pair that is refused is refused by name, with the
reason, before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.compression.compressor import Compressor


@dataclass(frozen=True)
class ExchangeKind:
    """One kind of exchange."""

    what: str
    reason: str = ""
    """Why nothing can be compressed there; empty where it can."""


_MODELS = (
    "it sends whole models, and what a compressor takes from a model would be lost to the mean; "
    "use a method that sends gradients, or differences to what all know"
)
EXCHANGES = {
    "gradients": ExchangeKind("gradients, averaged over all workers"),
    "differences": ExchangeKind("the difference of a model to the last common one"),
    "server": ExchangeKind("gradients to servers, and answers with parameters"),
    "displacements": ExchangeKind("displacements to servers, and answers with parameters"),
    "models": ExchangeKind("whole models, sent to neighbours", _MODELS),
    "pairs": ExchangeKind("whole models, averaged in pairs by half their decoded difference"),
    "copies": ExchangeKind("differences to copies of models that all neighbours follow"),
    "memory": ExchangeKind(
        "memory that is read and added to",
        "it reads and adds to memory that others change meanwhile, where nobody could decode; use "
        "a server that answers, such as downpour",
    ),
    "nothing": ExchangeKind(
        "nothing", "it exchanges nothing, so there is nothing to compress; leave the compressor out"
    ),
}
"""The kinds of exchange, by the names that the rows of methods give them."""


_TOO_FAR = "its error may be longer than the vector, so that copies would not come nearer"


def refusal(exchange: str, compressor: Compressor) -> str | None:
    """Why a method that exchanges this cannot use the compressor; None if it can."""
    if not exchange:
        return (
            "its row does not say what it exchanges; put exchange='gradients' there if it averages "
            "gradients, or exchange='differences' if its all-reduces name a reference"
        )
    if compressor.own_momentum and exchange in ("differences", "displacements", "copies"):
        return "it corrects the momentum of gradients, which are not what is sent; use topk"
    if exchange == "pairs" and not compressor.rounds_models:
        return (
            "it sends whole models, of which that would leave too little for two to come near each "
            "other; use fp16, bf16 or int8"
        )
    if exchange == "pairs" and compressor.feedback:
        return "a model is no part of a sum that could be paid later; leave out feedback=true"
    if exchange == "copies" and compressor.overshoots:
        return f"{_TOO_FAR}; use sign, topk or int4"
    if exchange in ("server", "displacements") and compressor.down and compressor.overshoots:
        return f"{_TOO_FAR} to what a server answers; leave out down=true"
    return EXCHANGES[exchange].reason or None
