"""The one table of compressors and their promises; tests, documents and the listing read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.compression.casts import Bf16, Fp16, Int2, Int4, Int8
from gossamer.compression.compressor import Compressor
from gossamer.compression.low_rank import PowerSgd
from gossamer.compression.signs import OneBit, Sign, TernGrad
from gossamer.compression.sparse import Dgc, RandomK, Threshold, TopK
from gossamer.compression.stochastic import Natural, Qsgd
from gossamer.errors import unknown_name
from gossamer.specs import bind, parse_spec


@dataclass(frozen=True)
class CompressorRow:
    """One row: a family with its promises."""

    kind: type[Compressor]
    paper: str
    is_linear: bool = False
    """Whether it is summed on the way, by all-reduce. Everything else is gathered, so that what a
    worker receives grows with the number of workers."""
    is_unbiased: bool = False
    """Whether the expectation of what is decoded is the vector itself."""
    rounds: int = 1
    """How many exchanges one vector takes."""
    rate: float = 1.0
    """Where gradients are averaged that SGD's momentum gathers afterwards: by what the rate should
    be multiplied, because what is fed back comes late and momentum makes more of it."""

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def has_feedback(self) -> bool:
        """Whether error feedback is on unless it is turned off."""
        return bool(self.kind.__dataclass_fields__["feedback"].default)


_ROWS = (
    CompressorRow(Fp16, "IEEE 754", is_linear=True),
    CompressorRow(Bf16, "Kalamkar et al. 2019", is_linear=True),
    CompressorRow(Int8, "Dettmers 2016"),
    CompressorRow(Int4, "Dettmers 2016"),
    CompressorRow(Int2, "Sarfi et al. 2025, SparseLoCo"),
    CompressorRow(Sign, "Karimireddy et al. 2019, EF-signSGD", rate=0.3),
    CompressorRow(OneBit, "Seide et al. 2014"),
    CompressorRow(Qsgd, "Alistarh et al. 2017", is_unbiased=True),
    CompressorRow(TernGrad, "Wen et al. 2017", is_unbiased=True, rounds=2),
    CompressorRow(Natural, "Horváth et al. 2019", is_unbiased=True),
    CompressorRow(RandomK, "Stich et al. 2018", is_linear=True),
    CompressorRow(TopK, "Stich et al. 2018"),
    CompressorRow(Threshold, "Strom 2015"),
    CompressorRow(Dgc, "Lin et al. 2018"),
    CompressorRow(PowerSgd, "Vogels et al. 2019", is_linear=True, rounds=2),
)

COMPRESSORS: dict[str, CompressorRow] = {row.name: row for row in _ROWS}


def parse_compressor(text: str | Compressor) -> Compressor:
    """`name` or `name:key=value,...`."""
    if isinstance(text, Compressor):
        return text
    name, given = parse_spec(text, "compressor")
    if name not in COMPRESSORS:
        raise unknown_name("compressor", name, COMPRESSORS)
    kind = COMPRESSORS[name].kind
    options: dict[str, Any] = bind("compressor", name, kind, given)
    return kind(**options)
