"""The methods, each one short coroutine that reads like its paper, and the table of them."""

from gossamer.methods.registry import METHODS, Method, MethodSpec, Promises, parse_method

__all__ = ["METHODS", "Method", "MethodSpec", "Promises", "parse_method"]
