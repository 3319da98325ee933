"""The methods, each one short coroutine that reads like its paper, and the table of them."""

from gossamer.methods.method import WAITS_FOR, Method, Promises, for_role
from gossamer.methods.registry import METHODS
from gossamer.methods.spec import MethodSpec, find_method, parse_method

__all__ = [
    "METHODS",
    "WAITS_FOR",
    "Method",
    "MethodSpec",
    "Promises",
    "find_method",
    "for_role",
    "parse_method",
]
