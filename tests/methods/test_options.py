"""Specs are read and printed in one way, and whatever is wrong with one is said in a sentence."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.specs import (
    bind,
    check_range,
    convert,
    parse_spec,
    print_dataclass,
    print_spec,
)

if TYPE_CHECKING:
    from gossamer.worker import Worker

words = st.text(alphabet="abyz_", min_size=1, max_size=4)
plain = st.text(alphabet="ab :=,/ -.", max_size=6)
texts = st.recursive(
    plain,
    lambda inner: st.tuples(plain, inner, plain).map(lambda t: f"{t[0]}({t[1]}){t[2]}"),
    max_leaves=3,
)
specs = st.tuples(words, st.dictionaries(words, texts, max_size=4))


@given(specs)
def test_what_is_printed_is_read_back(spec):
    """parse(print(x)) == x for every name and all texts whose parentheses match."""
    name, options = spec
    assert parse_spec(print_spec(name, options), "thing") == (name, options)


@given(specs, words)
def test_a_printed_spec_is_a_value_of_another_spec(spec, key):
    """Specs nest: a spec given as an option comes back whole."""
    inner = print_spec(*spec)
    options = {key: inner, "LAST": "1"}
    assert parse_spec(print_spec("outer", options), "thing") == ("outer", options)


@given(
    st.one_of(
        st.tuples(st.booleans(), st.just(bool)),
        st.tuples(st.integers(), st.just(int)),
        st.tuples(st.floats(allow_nan=False), st.just(float)),
        st.tuples(st.one_of(st.none(), st.floats(allow_nan=False)), st.just(float | None)),
        st.tuples(st.sampled_from(["a", 2, True, None]), st.just(Literal["a", 2, True, None])),
        st.tuples(
            st.lists(st.floats(allow_nan=False)).map(tuple),
            st.just(tuple[float, ...]),
        ),
    )
)
def test_a_value_survives_printing_reading_and_conversion(case):
    """convert(parse(print(value))) == value, with the same type, for each annotation understood."""
    value, annotation = case
    _, options = parse_spec(print_spec("name", {"key": value}), "thing")
    back = convert(options["key"], annotation, "name: key")
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ring", "ring", {}),
        ("easgd:paper,period=4", "easgd", {"paper": "true", "period": "4"}),
        (" easgd : period = 4 , paper ", "easgd", {"period": "4", "paper": "true"}),
        (
            "d_psgd:topology=(random_regular:degree=4,x=1)",
            "d_psgd",
            {"topology": "random_regular:degree=4,x=1"},
        ),
        ("d_psgd:topology=torus:side=4,b=2", "d_psgd", {"topology": "torus:side=4", "b": "2"}),
        ("a:b=(c:d=(e:f=1,g=2),h=3),i=4", "a", {"b": "c:d=(e:f=1,g=2),h=3", "i": "4"}),
        ("a:b=(c)(d)", "a", {"b": "(c)(d)"}),
        ("a:b=()", "a", {"b": ""}),
    ],
)
def test_known_specs_are_read(text, name, options):
    """The forms that the documentation shows."""
    assert parse_spec(text, "thing") == (name, options)


def test_values_print_as_a_person_would_write_them():
    """Booleans in lower case, floats in full, None as none, tuples with strokes, defaults kept."""
    options = {
        "a": True,
        "b": 0.1,
        "c": None,
        "d": (81.0, 122.0),
        "e": "ring:n=1,m=2",
        "f": np.float64(0.25),
        "g": 3,
    }
    expected = "name:a=true,b=0.1,c=none,d=81.0/122.0,e=(ring:n=1,m=2),f=0.25,g=3"
    assert print_spec("name", options) == expected
    assert print_spec("name", {}) == "name"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "thing '' has no name; write name or name:key=value,key=value"),
        (":a=1", "thing ':a=1' has no name; write name or name:key=value,key=value"),
        ("x:", "thing 'x:' has an option without a name; write name:key=value,key=value"),
        ("x:a,,b", "thing 'x:a,,b' has an option without a name; write name:key=value,key=value"),
        ("x:=1", "thing 'x:=1' has an option without a name; write name:key=value,key=value"),
        ("x:a=", "thing 'x:a=' has an option without a value; write name:key=value,key=value"),
        ("x:a=1,a=2", "thing 'x:a=1,a=2' gives 'a' twice; give it once"),
        (
            "x:a=(1",
            "thing 'x:a=(1' has parentheses that do not match; close each '(' with one ')'",
        ),
        (
            "x:a=)1(",
            "thing 'x:a=)1(' has parentheses that do not match; close each '(' with one ')'",
        ),
    ],
)
def test_a_malformed_spec_is_refused_in_one_sentence(text, sentence):
    """Each way of writing a spec wrongly has its own message."""
    with pytest.raises(ConfigurationError) as failure:
        parse_spec(text, "thing")
    assert str(failure.value) == sentence


def test_a_text_that_could_not_be_read_back_is_not_printed():
    """Parentheses that do not match have no spelling."""
    with pytest.raises(ConfigurationError, match=r"value 'a\)' has parentheses that do not match"):
        print_spec("name", {"key": "a)"})


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("none", str | None, None),
        ("some", str | None, "some"),
        ("workers", float | Literal["workers"], "workers"),
        ("8", float | Literal["workers"], 8.0),
        ("81/122", tuple[float, ...], (81.0, 122.0)),
        ("1/2", tuple[int, ...] | None, (1, 2)),
        ("", tuple[float, ...], ()),
        ("inf", float, float("inf")),
    ],
)
def test_text_becomes_the_annotated_type(text, annotation, value):
    """Unions try None first and then each member in turn."""
    assert convert(text, annotation, "name: key") == value


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("x", int, "a whole number"),
        ("4.0", int, "a whole number"),
        ("x", float, "a number"),
        ("nan", float, "a number"),
        ("1", bool, "true or false"),
        ("x", int | None, "a whole number or none"),
        ("x", Literal["pull", "push"], "one of pull, push"),
        ("x", float | Literal["workers"], "a number or workers"),
        ("1//2", tuple[float, ...], "a list, separated by '/', of which each is a number"),
    ],
)
def test_text_that_does_not_fit_is_refused_with_what_was_expected(text, annotation, expected):
    """The message names the place, what was expected and what was got."""
    with pytest.raises(ConfigurationError) as failure:
        convert(text, annotation, "downpour: n_push")
    assert str(failure.value) == f"downpour: n_push must be {expected}, got {text!r}"


def test_a_type_without_a_spelling_is_refused():
    """An annotation that no text can express is the caller's to set."""
    with pytest.raises(ConfigurationError, match="name: key cannot be written in a spec, because"):
        convert("x", dict[str, int], "name: key")


def downpour(
    worker: Worker,
    *,
    n_push: int = 1,
    rule: Literal["sum", "mean"] = "sum",
    decay: float | None = None,
) -> None:
    """A method as others write it: its first parameter's type exists for the type checker only."""


# A decorated method whose decorator lives in a module that knows none of the method's types.
wrapped = functools.wraps(downpour)(types.FunctionType((lambda: None).__code__, {}))


@dataclasses.dataclass(frozen=True)
class Thing:
    size: int
    _: dataclasses.KW_ONLY
    period: int = 4
    paper: bool = False


@pytest.mark.parametrize("function", [downpour, wrapped])
def test_options_are_bound_to_the_keyword_only_parameters(function):
    """Only what is given is bound, converted by its own annotation; others may stay unresolved."""
    bound = bind("method", "downpour", function, {"n_push": "3", "decay": "none", "rule": "mean"})
    assert bound == {"n_push": 3, "decay": None, "rule": "mean"}


def test_values_from_python_are_held_to_the_types_too():
    """As if they had been written down; only a type that has no spelling passes as it is."""

    def own(*, rule: dict[str, int] | None = None, share: float = 0.5) -> None: ...

    assert bind("method", "own", own, {"rule": {"a": 1}, "share": 1}) == {
        "rule": {"a": 1},
        "share": 1.0,
    }
    with pytest.raises(ConfigurationError, match="own: share must be a number, got 'half'"):
        bind("method", "own", own, {"share": "half"})
    with pytest.raises(ConfigurationError, match="own: rule cannot be written in a spec"):
        bind("method", "own", own, {"rule": "a"})


def test_a_dataclass_binds_and_prints_its_keyword_only_fields():
    """print_dataclass leaves out defaults and positional fields; bind reads the rest back."""
    thing = Thing(9, period=2, paper=True)
    spec = print_dataclass("thing", thing)
    assert spec == "thing:period=2,paper=true"
    assert Thing(9, **bind("thing", "thing", Thing, parse_spec(spec, "thing")[1])) == thing


@pytest.mark.parametrize(
    ("function", "given_options", "sentence"),
    [
        (
            downpour,
            {"n_pusch": "1"},
            "unknown downpour option 'n_pusch'; did you mean 'n_push'?",
        ),
        (
            downpour,
            {"worker": "1"},
            "unknown downpour option 'worker'; choose one of decay, n_push, rule",
        ),
        (Thing, {"size": "1"}, "unknown downpour option 'size'; choose one of paper, period"),
        (downpour, {"n_push": "x"}, "downpour: n_push must be a whole number, got 'x'"),
        (lambda: None, {"a": "1"}, "method downpour takes no options, got 'a'; leave it out"),
    ],
)
def test_an_option_that_cannot_be_bound_is_refused(function, given_options, sentence):
    """Unknown keys get the nearest known one; positional parameters are no options."""
    with pytest.raises(ConfigurationError) as failure:
        bind("method", "downpour", function, given_options)
    assert str(failure.value) == sentence


@pytest.mark.parametrize(
    ("value", "below", "expected"),
    [
        (-1.0, float("inf"), "at least 0"),
        (float("inf"), float("inf"), "a finite number of at least 0"),
        (float("nan"), float("inf"), "a finite number of at least 0"),
        (1.0, 1.0, "at least 0 and below 1"),
    ],
)
def test_a_number_out_of_range_is_refused(value, below, expected):
    """The range is half-open, and neither NaN nor infinity is ever inside."""
    with pytest.raises(ConfigurationError) as failure:
        check_range("a: b", value, 0.0, below)
    assert str(failure.value) == f"a: b must be {expected}, got {value}"


def test_a_number_in_range_passes():
    """The lower end belongs to the range."""
    check_range("a: b", 0.0, 0.0)
    check_range("a: b", 0.5, 0.0, 1.0)
