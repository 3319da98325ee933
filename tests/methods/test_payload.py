"""What travels: header and raw bytes, exactly as many as the network charges, never a pickle."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer
from gossamer.errors import ProtocolError
from gossamer.methods.server import Parameters, Push
from gossamer.payload import decode, encode, payload, tensor_bytes, wire_bytes

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@payload
@dataclass(frozen=True)
class Größe:
    """One of everything, under a name that is longer in bytes than in letters."""

    label: str
    count: int
    share: float
    is_last: bool
    missing: None
    values: Tensor


def tensors() -> st.SearchStrategy[Tensor]:
    def made(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(0, 256, (*shape, 8), dtype=torch.uint8, generator=generator)
        # Any bits are welcome, NaN too; a boolean has only two patterns.
        if dtype is torch.bool:
            return whole[..., 0] > 127
        return whole.view(dtype)[..., 0]

    return st.builds(
        made, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)
    )


NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(), tensors())
WHOLE = st.builds(Größe, st.text(), NUMBERS, st.floats(), st.booleans(), st.none(), tensors())
PAYLOADS = st.one_of(PLAIN, WHOLE)


def is_same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        ours, theirs = (
            value.clone(memory_format=torch.contiguous_format) for value in (one, other)
        )
        return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, Größe):
        return all(is_same(getattr(one, name), getattr(other, name)) for name in vars(one))
    return one == other


@given(PAYLOADS)
def test_what_is_decoded_is_what_was_encoded(value: Any) -> None:
    """Bit for bit, of the same type and shape, in memory of its own."""
    assert is_same(decode(encode(value)), value)


@given(PAYLOADS)
def test_the_network_charges_exactly_the_encoding(value: Any) -> None:
    """`wire_bytes` is the length of the encoding, known without encoding."""
    assert wire_bytes(value) == len(encode(value))
    assert tensor_bytes(value) <= wire_bytes(value)


def test_headers_are_small_beside_a_model() -> None:
    """A push of a million parameters costs their bytes and fewer than a hundred more."""
    push = Push(torch.zeros(1_000_000), read=3)
    assert tensor_bytes(push) == 4_000_000
    assert 0 < wire_bytes(push) - 4_000_000 < 100
    assert wire_bytes(Push(None, read=3)) < 100
    assert isinstance(decode(encode(Parameters(torch.ones(2), 1))), Parameters)


def test_a_view_travels_without_the_rest_of_its_memory() -> None:
    """Slices, transposed matrices and parameters are charged for what they show."""
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    column = whole.t()[1]
    assert tensor_bytes(column) == 12
    assert torch.equal(decode(encode(column)), torch.tensor([1.0, 5.0, 9.0]))
    assert not decode(encode(column)).requires_grad


def test_a_decoded_tensor_can_be_changed() -> None:
    """It lies in memory of its own, not in the message."""
    message = encode(torch.zeros(3))
    decode(message).add_(1.0)
    assert torch.equal(decode(message), torch.zeros(3))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1, 2], "list cannot travel: register it with @payload"),
        ({"a": 1}, "dict cannot travel"),
        (object(), "object cannot travel"),
        (b"raw", "bytes cannot travel"),
        (torch.zeros(2, dtype=torch.complex64), "a tensor of type torch.complex64 cannot travel"),
    ],
)
def test_an_unknown_type_is_refused(value: object, sentence: str) -> None:
    """Before anything is sent, both when it is charged and when it is encoded."""
    for refuse in (encode, wire_bytes):
        with pytest.raises(ProtocolError, match=sentence):
            refuse(value)


def test_a_number_that_does_not_fit_is_refused() -> None:
    """A word of 64 bits is what a number gets."""
    with pytest.raises(ProtocolError, match="64 bits cannot travel"):
        encode(2**63)


def test_a_dataclass_must_be_registered() -> None:
    """And a name means one thing on the wire."""

    @dataclass
    class Unknown:
        value: int

    with pytest.raises(ProtocolError, match="Unknown cannot travel"):
        encode(Unknown(1))
    stranger = type("Push", (), {"__module__": "elsewhere", "__annotations__": {}})
    with pytest.raises(ProtocolError, match="two payloads are called 'Push'"):
        payload(dataclass(stranger))
    assert isinstance(decode(encode(Push(None, 1))), Push)


def test_an_unknown_label_is_refused() -> None:
    """Nothing is looked up by name but what was registered."""
    with pytest.raises(ProtocolError, match=r"unknown type 'os\.system'"):
        decode(b"\x09\x00os.system")


@given(PAYLOADS, st.data())
def test_a_damaged_message_is_refused_or_another_message(value: Any, data: st.DataObject) -> None:
    """Cut, lengthened or with a byte changed: one error of ours, never a crash."""
    message = bytearray(encode(value))
    place = data.draw(st.integers(0, len(message) - 1))
    for damaged in (message[:place], message + b"\x00"):
        with pytest.raises(ProtocolError):
            decode(bytes(damaged))
    message[place] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(message))
    except ProtocolError:
        pass  # refused


FORBIDDEN = re.compile(
    # safetensors.torch writes and reads numbers only, unlike torch itself.
    r"(import|from) \w*pickle|pickle\.|(?<!\bsafetensors\.)torch\.(load|save|serialization)"
    r"|from torch(\.serialization)? import .*\b(load|save)\b"
    r"|marshal|dill|(?<!\bmodule\.)(?<!\bmodel\.)(?<!\bwhole\.)eval\("
)


@pytest.mark.parametrize(
    ("line", "is_forbidden"),
    [
        ("torch.save(model, path)", True),
        ("state = torch.load(path)", True),
        ("from torch import save", True),
        ("torch.serialization.load(file)", True),
        ("safetensors.torch.save_file(own, torch.load(path))", True),
        ("import pickle", True),
        ("from pickle import loads", True),
        ("import cloudpickle", True),
        ("pickle.loads(data)", True),
        ("eval(text)", True),
        ("safetensors.torch.save_file(own, part)", False),
        ("return safetensors.torch.load_file(path)", False),
        ("data = safetensors.torch.save(dict(tensors))", False),
        ("self.first.module.eval()", False),
    ],
)
def test_what_counts_as_pickle(line: str, is_forbidden: bool) -> None:
    """The search below finds what it is there for."""
    assert bool(FORBIDDEN.search(line)) == is_forbidden


def test_there_is_no_pickle_in_the_package() -> None:
    """The word occurs where it is refused or forbidden, where a command talks to processes that it
    has started itself, over a pipe that nobody else can open, and where a loop keeps the state of
    its own objects in a file, which is read with `weights_only`."""
    root = Path(gossamer.__file__).parent
    loop = root / "real" / "join" / "checkpoints" / "loop_checkpoints.py"
    own = (root / "commands" / "work" / "parcel.py", loop)
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if path not in own and FORBIDDEN.search(line)
    ]
    assert found == []
    lines = [
        line
        for path in root.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "allow_pickle" in line
    ]
    assert all("allow_pickle=False" in line for line in lines)
    read = [line for line in loop.read_text(encoding="utf-8").splitlines() if "torch.load" in line]
    assert read
    assert all("weights_only=True" in line for line in read)
