"""Python functions as JavaScript: a small part of the language, for arithmetic on plain values.

What is translated is short, pure and annotated: functions and frozen dataclasses, conditions and
loops, comprehensions, tuples. Everything else is refused with the place where it stands. Where the
languages differ (what counts as true, negative indices, rounding to even) the text calls `py`, the
object in `assets/planner/python.js`. Lists and tuples become arrays; nothing changes its arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

from gossamer.errors import ConfigurationError

_RESERVED = frozenset({"case", "default", "delete", "function", "new", "switch", "this", "var"})
_BUILTINS = frozenset({
    "abs", "combinations", "enumerate", "len", "list", "max", "min", "pairwise", "range",
    "reversed", "round", "sorted", "sum", "tuple", "zip",
})  # fmt: skip
"""Functions of Python that `py` has under the same name."""
_MATHS = {"sqrt": "Math.sqrt", "comb": "py.comb"}
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.LShift: "<<",
}  # fmt: skip
_CALLED: dict[type[ast.operator], str] = {ast.FloorDiv: "py.floor_div", ast.Mod: "py.modulo"}
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "===", ast.NotEq: "!==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "==", ast.IsNot: "!=",
}  # fmt: skip
_METHODS = {"append": "push"}

Translated = type[Any] | FunctionType
"""A function or a dataclass."""


def javascript(
    roots: Iterable[Translated],
    *,
    provided: Collection[str] = (),
    ignored: Collection[str] = (),
) -> str:
    """The text of these functions and dataclasses and of all that they call.

    `provided` are names that the page defines itself, and `ignored` are functions that only check
    their arguments, whose calls are left out.
    """
    module = _Module(frozenset(provided), frozenset(ignored))
    for root in roots:
        module.name_of(root)
    return module.text()


class _Module:
    """The texts so far, and what still waits to be translated."""

    def __init__(self, provided: frozenset[str], ignored: frozenset[str]) -> None:
        self.provided, self.ignored = provided, ignored
        self._found: dict[str, Translated] = {}

    def name_of(self, one: Translated) -> str:
        """The name of a function or a class in the text, which will contain it."""
        name = one.__name__
        if self._found.setdefault(name, one) is not one:
            other = self._found[name]
            raise ConfigurationError(
                f"{one.__module__} and {other.__module__} both have a {name}, and a page has one; "
                "rename one of them"
            )
        return name

    def text(self) -> str:
        texts: list[str] = []
        for name in self._waiting():
            one = self._found[name]
            texts.append(_class(one, self) if isinstance(one, type) else _function(one, self))
        return "\n".join(texts)

    def _waiting(self) -> Iterable[str]:
        """Names in the order in which they were met, those that are met meanwhile too."""
        done = 0
        while done < len(self._found):
            yield list(self._found)[done]
            done += 1


def _tree(one: Translated) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]


def _function(one: FunctionType, module: _Module) -> str:
    scope = _Scope(one.__globals__, module, f"{one.__module__}.{one.__name__}")
    return f"function {one.__name__}{scope.function(_tree(one))}"


def _class(one: type[Any], module: _Module) -> str:
    """A dataclass as a class whose constructor takes its fields in order."""
    if not dataclasses.is_dataclass(one):
        raise ConfigurationError(f"{one.__name__} is no dataclass; a page knows no other classes")
    globals_ = vars(inspect.getmodule(one))
    fields: list[str] = []
    for entry in dataclasses.fields(one):
        has_default = entry.default is not dataclasses.MISSING
        fields.append(f"{entry.name} = {json.dumps(entry.default)}" if has_default else entry.name)
    names = [entry.name for entry in dataclasses.fields(one)]
    kept = " ".join(f"this.{name} = {_safe(name)};" for name in names)
    lines = [f"class {one.__name__} {{", f"constructor({', '.join(fields)}) {{ {kept} }}"]
    for node in _tree(one).body:
        # Values of a page come from sliders with ends, so checks stay in Python.
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        getter = "get " if any(_named(one) == "property" for one in node.decorator_list) else ""
        scope = _Scope(globals_, module, f"{one.__module__}.{one.__name__}.{node.name}")
        lines.append(f"{getter}{node.name}{scope.function(node, is_method=True)}")
    return "\n".join([*lines, "}"])


def _named(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _safe(name: str) -> str:
    """A name that JavaScript does not keep for itself."""
    return f"{name}_" if name in _RESERVED else name


def _parameters(one: Translated) -> list[str]:
    return list(inspect.signature(cast(Callable[..., Any], one)).parameters)


class _Scope:
    """The translation of one function; its names are arguments, its own, or of its module."""

    def __init__(self, globals_: Mapping[str, Any], module: _Module, where: str) -> None:
        self._globals, self._module, self._where = globals_, module, where
        self._own: set[str] = set()

    def refused(self, node: ast.AST, why: str) -> ConfigurationError:
        line = getattr(node, "lineno", 0)
        return ConfigurationError(
            f"{self._where}, line {line} of it, cannot be put into JavaScript: {why}; write it in "
            "the words that gossamer.plan.page.javascript knows"
        )

    def function(self, node: ast.FunctionDef, *, is_method: bool = False) -> str:
        """The text of a function from the parenthesis to the closing brace."""
        given = node.args
        if given.vararg or given.kwarg:
            raise self.refused(node, "it takes any number of arguments")
        names = [one.arg for one in (*given.args, *given.kwonlyargs)]
        defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
        shown = [
            _safe(name) if default is None else f"{_safe(name)} = {self.value(default)}"
            for name, default in zip(
                names, [*defaults, *given.defaults, *given.kw_defaults], strict=True
            )
        ]
        if is_method:
            shown = shown[1:]
        self._own |= set(names)
        local = sorted(_assigned(node.body) - set(names))
        self._own |= set(local)
        body = [f"let {', '.join(map(_safe, local))};"] if local else []
        if is_method:
            body.insert(0, "const self = this;")
        return "\n".join([f"({', '.join(shown)}) {{", *body, self.block(node.body), "}"])

    # ------------------------------------------------------------------ statements

    def block(self, nodes: Sequence[ast.stmt]) -> str:
        return "\n".join(filter(None, (self.statement(node) for node in nodes)))

    def statement(self, node: ast.stmt) -> str:
        match node:
            case ast.Expr(ast.Constant()):
                return ""
            case ast.Expr(ast.Call(func=ast.Name(name))) if name in self._module.ignored:
                return ""
            case ast.Expr(value):
                return f"{self.value(value)};"
            case ast.Return(None):
                return "return null;"
            case ast.Return(ast.expr() as value):
                return f"return {self.value(value)};"
            case ast.Assign(targets, value):
                into = " = ".join(self.target(one) for one in targets)
                return f"{into} = {self.value(value)};"
            case ast.AnnAssign(target, _, ast.expr() as value):
                return f"{self.target(target)} = {self.value(value)};"
            case ast.AugAssign(target, op, value):
                place = self.target(target)
                return f"{place} = {self.binary(node, op, place, self.value(value))};"
            case ast.If(test, body, other):
                rest = f" else {{\n{self.block(other)}\n}}" if other else ""
                return f"if ({self.test(test)}) {{\n{self.block(body)}\n}}{rest}"
            case ast.For(target, values, body, []):
                each = f"for ({self.target(target)} of {self.value(values)})"
                return f"{each} {{\n{self.block(body)}\n}}"
            case ast.While(test, body, []):
                return f"while ({self.test(test)}) {{\n{self.block(body)}\n}}"
            case ast.Break():
                return "break;"
            case ast.Continue():
                return "continue;"
            case ast.Raise(ast.Call() as raised, None):
                return f"throw {self.value(raised)};"
            case _:
                raise self.refused(node, f"it knows no {type(node).__name__}")

    def target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(name):
                return _safe(name)
            case ast.Tuple(elements):
                return f"[{', '.join(map(self.target, elements))}]"
            case _:
                raise self.refused(node, "only names are assigned to")

    # ------------------------------------------------------------------ expressions

    def test(self, node: ast.expr) -> str:
        """A condition, as what JavaScript counts as true."""
        match node:
            case ast.Compare():
                return self.value(node)
            case ast.UnaryOp(ast.Not(), inside):
                return f"!({self.test(inside)})"
            case ast.BoolOp(op, values):
                joined = " && " if isinstance(op, ast.And) else " || "
                return f"({joined.join(map(self.test, values))})"
            case _:
                return f"py.truth({self.value(node)})"

    def value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(bool() | None | str() | int() | float() as plain):
                return json.dumps(plain)
            case ast.Name(name):
                return self.name(node, name)
            case ast.Attribute(ast.Name("math"), name) if name in _MATHS:
                return _MATHS[name]
            case ast.Attribute(of, name):
                return f"{self.value(of)}.{name}"
            case ast.Subscript(of, index):
                return self.item(of, index)
            case ast.BinOp(ast.List() | ast.Tuple() as repeated, ast.Mult(), count):
                return f"py.repeat({self.value(repeated)}, {self.value(count)})"
            case ast.BinOp(left, op, right):
                return self.binary(node, op, self.value(left), self.value(right))
            case ast.UnaryOp(ast.Not()) | ast.Compare() | ast.BoolOp():
                return self.logic(node)
            case ast.UnaryOp(ast.USub(), inside):
                return f"(-{self.value(inside)})"
            case ast.IfExp(test, yes, no):
                return f"({self.test(test)} ? {self.value(yes)} : {self.value(no)})"
            case ast.Tuple(elements) | ast.List(elements):
                return f"[{', '.join(map(self.value, elements))}]"
            case ast.ListComp(element, generators) | ast.GeneratorExp(element, generators):
                return self.comprehension(node, element, generators)
            case ast.JoinedStr(parts):
                return " + ".join(['""', *map(self.shown, parts)])
            case ast.Call():
                return self.call(node)
            case _:
                raise self.refused(node, f"it knows no {type(node).__name__}")

    def name(self, node: ast.AST, name: str) -> str:
        if name in self._own or name in self._module.provided:
            return _safe(name)
        if name in _BUILTINS:
            return f"py.{name}"
        found = self._globals.get(name)
        if isinstance(found, int | float | str):
            return json.dumps(found)
        if isinstance(found, type) and issubclass(found, Exception):
            return name
        if isinstance(found, FunctionType | type):
            return self._module.name_of(found)
        raise self.refused(node, f"{name} is neither translated nor provided")

    def binary(self, node: ast.AST, op: ast.operator, left: str, right: str) -> str:
        if type(op) in _CALLED:
            return f"{_CALLED[type(op)]}({left}, {right})"
        if type(op) not in _BINARY:
            raise self.refused(node, f"it knows no {type(op).__name__}")
        return f"(({left}) {_BINARY[type(op)]} ({right}))"

    def logic(self, node: ast.expr) -> str:
        match node:
            case ast.BoolOp(op, values):
                way = "py.both" if isinstance(op, ast.And) else "py.either"
                shown = [self.value(one) for one in values]
                joined = shown[-1]
                for one in reversed(shown[:-1]):
                    joined = f"{way}({one}, () => {joined})"
                return joined
            case ast.Compare(left, ops, others):
                values = [left, *others]
                pairs = zip(ops, values, others, strict=False)
                return f"({' && '.join(self.compared(node, *one) for one in pairs)})"
            case _:
                return self.test(node)

    def compared(self, node: ast.AST, op: ast.cmpop, one: ast.expr, other: ast.expr) -> str:
        if type(op) not in _COMPARED:
            raise self.refused(node, f"it knows no {type(op).__name__}")
        return f"{self.value(one)} {_COMPARED[type(op)]} {self.value(other)}"

    def item(self, of: ast.expr, index: ast.expr) -> str:
        if isinstance(index, ast.Slice):
            ends = [None if end is None else self.value(end) for end in (index.lower, index.upper)]
            return f"{self.value(of)}.slice({ends[0] or 0}{f', {ends[1]}' if ends[1] else ''})"
        return f"py.item({self.value(of)}, {self.value(index)})"

    def comprehension(
        self, node: ast.expr, element: ast.expr, generators: Sequence[ast.comprehension]
    ) -> str:
        if len(generators) != 1:
            raise self.refused(node, "one comprehension has one loop")
        loop = generators[0]
        self._own |= _names_in(loop.target)
        each = f"({self.target(loop.target)})"
        values = self.value(loop.iter)
        for condition in loop.ifs:
            values += f".filter({each} => {self.test(condition)})"
        return f"{values}.map({each} => {self.value(element)})"

    def shown(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(text):
                return json.dumps(text)
            case ast.FormattedValue(value, -1, None):
                return f"String({self.value(value)})"
            case ast.FormattedValue(value, -1, ast.JoinedStr([ast.Constant(".1f")])):
                return f"({self.value(value)}).toFixed(1)"
            case _:
                raise self.refused(node, "it knows no such format")

    def call(self, node: ast.Call) -> str:
        given = [self.value(one) for one in node.args]
        match node.func:
            case ast.Attribute(of, "get"):
                return f"py.get({', '.join([self.value(of), *given])})"
            case ast.Attribute(of, "bit_length"):
                return f"py.bit_length({self.value(of)})"
            case ast.Attribute(of, name) if name in _METHODS:
                return f"{self.value(of)}.{_METHODS[name]}({', '.join(given)})"
            case ast.Name("max" | "min" as name) if len(given) == 1:
                rest = [self.value(one.value) for one in node.keywords if one.arg == "default"]
                return f"py.{name}_of({', '.join([*given, *rest])})"
            case ast.Name(name):
                return self.named_call(node, name, given)
            case _ if not node.keywords:
                return f"{self.value(node.func)}({', '.join(given)})"
            case _:
                raise self.refused(node, "only functions by name take named arguments")

    def named_call(self, node: ast.Call, name: str, given: list[str]) -> str:
        called = self.name(node, name)
        found = self._globals.get(name)
        if called.startswith("py.") or name in self._own or name in self._module.provided:
            if any(one.arg != "strict" for one in node.keywords):
                raise self.refused(node, f"{name} takes no named arguments here")
            return f"{called}({', '.join(given)})"
        named = {one.arg: self.value(one.value) for one in node.keywords}
        is_error = isinstance(found, type) and issubclass(found, Exception)
        order = [] if is_error else _parameters(cast(Translated, found))
        if None in named or not set(named) <= set(order):
            raise self.refused(node, f"{name} does not take these arguments")
        if named:
            last = max(order.index(cast(str, one)) for one in named)
            given += [named.get(one, "undefined") for one in order[len(given) : last + 1]]
        new = "new " if isinstance(found, type) else ""
        return f"{new}{called}({', '.join(given)})"


def _names_in(target: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def _assigned(nodes: Iterable[ast.stmt]) -> set[str]:
    """The names that a function assigns to, but for those of its comprehensions."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Assign(targets):
                found |= set[str]().union(*map(_names_in, targets))
            case ast.AnnAssign(target) | ast.AugAssign(target):
                found |= _names_in(target)
            case ast.For(target, _, body):
                found |= _names_in(target) | _assigned(body)
            case ast.If(_, body, other):
                found |= _assigned(body) | _assigned(other)
            case ast.While(_, body):
                found |= _assigned(body)
            case _:
                pass
    return found
