"""The methods, each one short coroutine that reads like its paper, and the table of them."""

from gossamer.methods.method import Method, Promises, for_role
from gossamer.methods.registry import METHODS
from gossamer.methods.spec import MethodSpec, parse_method

__all__ = ["METHODS", "Method", "MethodSpec", "Promises", "for_role", "parse_method"]
