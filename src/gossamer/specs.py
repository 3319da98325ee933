"""Short specs: the one way in which methods, topologies, optimisers and schedules are written down.

A spec is `name` or `name:key=value,key=value`. A bare word among the options is a flag that means
`true`. A value may contain ':' as it is, and is wrapped in parentheses when it contains commas, so
that specs nest: `d_psgd:topology=(random_regular:degree=4,seed=1)`. The empty text is `key=()`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from gossamer.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLUS = re.compile(r"\+\s*([A-Za-z_]\w*)")


def parse_spec(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """Split a spec into its name and its options, still as text; `kind` is for error messages."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not name:
        raise ConfigurationError(
            f"{kind} {text!r} has no name; write name or name:key=value,key=value"
        )
    options: dict[str, str] = {}
    for item in _split(rest, f"{kind} {text!r}") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or (equals and not value):
            raise ConfigurationError(
                f"{kind} {text!r} has an option without a {'value' if key else 'name'}; "
                "write name:key=value,key=value"
            )
        if key in options:
            raise ConfigurationError(f"{kind} {text!r} gives {key!r} twice; give it once")
        options[key] = _unwrap(value) if equals else "true"
    return name, options


def split_suffix(text: str, known: Iterable[str]) -> tuple[str, str | None]:
    """Split `first+second` at a '+' that no parenthesis encloses and a known name follows.

    A name is as long as letters, digits and underscores go on.
    """
    if "+" not in text:
        return text, None
    depths = _depths(text, repr(text))
    for match in _PLUS.finditer(text):
        if depths[match.start()] == 0 and match[1] in known:
            return text[: match.start()], text[match.start() + 1 :]
    return text, None


def print_spec(name: str, options: Mapping[str, object]) -> str:
    """The spec that `parse_spec` reads back as the same name and the same options."""
    items = [f"{key}={_wrap(_text(value))}" for key, value in options.items()]
    return f"{name}:{','.join(items)}" if items else name


def print_dataclass(name: str, instance: DataclassInstance) -> str:
    """The spec of a dataclass whose options are its keyword-only fields; defaults are left out."""
    options = {
        field.name: value
        for field in dataclasses.fields(instance)
        if field.kw_only and (value := getattr(instance, field.name)) != field.default
    }
    return print_spec(name, options)


def convert(text: str, annotation: object, where: str) -> object:
    """Read `text` as a value of the annotated type.

    Understood are bool, int, float, str, Path, Literal, unions of these and None, and
    tuple[X, ...], whose members are separated by '/'. NaN is refused: it would slip through every
    range check.
    """
    try:
        return _value(text, annotation)
    except ValueError:
        expected = _expected(annotation)
        raise ConfigurationError(f"{where} must be {expected}, got {text!r}") from None
    except TypeError:
        raise ConfigurationError(
            f"{where} cannot be written in a spec, because its type is {annotation}; "
            "set it from Python"
        ) from None


def bind(
    kind: str, name: str, function: Callable[..., object], given: Mapping[str, object]
) -> dict[str, object]:
    """Convert options to the types of the keyword-only parameters of a function or dataclass.

    A value set from Python is held to what its spelling would be; one whose type has no spelling
    is kept. Only what is given is returned: defaults, and options that must be given, are the
    function's.
    """
    return _bound(kind, name, function, given, (inspect.Parameter.KEYWORD_ONLY,))


def bind_own(
    kind: str, name: str, function: Callable[..., object], given: Mapping[str, object]
) -> dict[str, object]:
    """As `bind`, for a user's function: every parameter with a name is an option, one without an
    annotation has the type of its default, and what must be given is asked for."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = _bound(kind, name, function, given, kinds)
    for parameter in inspect.signature(function).parameters.values():
        must = parameter.default is parameter.empty and parameter.kind in kinds
        if must and parameter.name not in options:
            raise ConfigurationError(
                f"{kind} {name} needs {parameter.name}; write {name}:{parameter.name}=VALUE, or "
                f"give {parameter.name} a default"
            )
    return options


def _bound(
    kind: str,
    name: str,
    function: Callable[..., object],
    given: Mapping[str, object],
    kinds: tuple[object, ...],
) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    for key in given:
        if not known:
            raise ConfigurationError(f"{kind} {name} takes no options, got {key!r}; leave it out")
        if key not in known:
            raise unknown_name(f"{name} option", key, known)
    annotations = _annotations(function, given)
    return {
        key: value
        if not (isinstance(value, str) or _has_spelling(annotations[key]))
        else convert(_text(value), annotations[key], f"{name}: {key}")
        for key, value in given.items()
    }


def check_range(where: str, value: float, least: float, below: float = math.inf) -> None:
    """Refuse a number outside [least, below); NaN and infinity are outside every range."""
    if not least <= value < below:
        kind = "" if math.isfinite(value) else "a finite number of "
        end = f" and below {below:g}" if below < math.inf else ""
        raise ConfigurationError(f"{where} must be {kind}at least {least:g}{end}, got {value}")


def _split(text: str, where: str) -> list[str]:
    """The parts of `text` between those commas that no parenthesis encloses."""
    parts, start = list[str](), 0
    for index, depth in enumerate(_depths(text, where)):
        if text[index] == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _depths(text: str, where: str) -> list[int]:
    """How many parentheses are open after each character."""
    depths, depth = list[int](), 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        depths.append(depth)
    if depth:
        raise ConfigurationError(
            f"{where} has parentheses that do not match; close each '(' with one ')'"
        )
    return depths


def _unwrap(value: str) -> str:
    """Remove parentheses around the whole value, but not those of "(a)(b)"."""
    if not value.startswith("("):
        return value
    is_wrapped = _depths(value, f"value {value!r}").index(0) == len(value) - 1
    return value[1:-1] if is_wrapped else value


def _wrap(value: str) -> str:
    _depths(value, f"value {value!r}")
    needs_wrapping = not value or value != value.strip() or any(c in value for c in ",()")
    return f"({value})" if needs_wrapping else value


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # numpy's float64 is a float too, but its own repr names the type.
        return repr(float(value))
    if isinstance(value, tuple):
        return "/".join(_text(member) for member in typing.cast(tuple[object, ...], value))
    return str(value)


def _value(text: str, annotation: object) -> object:
    """As `convert`; ValueError: the text does not fit; TypeError: the type is not understood."""
    if annotation is str:
        return text
    if annotation is Path:
        return Path(text)
    if annotation is int:
        return int(text)
    if annotation is float:
        number = float(text)
        if math.isnan(number):
            raise ValueError
        return number
    if annotation is bool:
        return _one_of(text, (True, False))
    if annotation is None or annotation is types.NoneType:
        return _one_of(text, (None,))
    return _composite_value(text, annotation)


def _composite_value(text: str, annotation: object) -> object:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _one_of(text, arguments)
    if origin is tuple and arguments[1:] == (...,):
        return tuple(_value(part, arguments[0]) for part in text.split("/")) if text else ()
    if origin in (Union, types.UnionType):
        # None comes first, or `str | None` would read "none" as a string.
        for member in sorted(arguments, key=lambda member: member is not types.NoneType):
            try:
                return _value(text, member)
            except ValueError:
                continue
        raise ValueError
    raise TypeError


def _has_spelling(annotation: object) -> bool:
    try:
        _value("", annotation)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def _one_of(text: str, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if _text(choice) == text:
            return choice
    raise ValueError


def _expected(annotation: object) -> str:
    names: dict[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
        None: "none",
        types.NoneType: "none",
    }
    if annotation in names:
        return names[annotation]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        choices = ", ".join(_text(choice) for choice in arguments)
        return f"one of {choices}" if len(arguments) > 1 else choices
    if typing.get_origin(annotation) is tuple:
        return f"a list, separated by '/', of which each is {_expected(arguments[0])}"
    return " or ".join(_expected(member) for member in arguments)


def _annotations(function: Callable[..., object], keys: Mapping[str, object]) -> dict[str, Any]:
    """The resolved annotations of the parameters named in `keys`.

    Those of other parameters stay untouched: they may name types that are imported for the type
    checker alone. A class is resolved as a whole, for its fields may come from several modules.
    """
    if isinstance(function, type):
        return typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    wanted = types.SimpleNamespace(
        __annotations__={key: _annotation(parameters[key]) for key in keys}
    )
    return typing.get_type_hints(wanted, getattr(inspect.unwrap(function), "__globals__", {}))


def _annotation(parameter: inspect.Parameter) -> object:
    """What is written, else the type of the default, else text."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    kinds = (bool, int, float, Path)
    return next((kind for kind in kinds if isinstance(parameter.default, kind)), str)
