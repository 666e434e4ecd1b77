"""Plain data as JSON, between a program that is not trusted and the tests that judge it.

Only data crosses: an object with an `__eq__` of its own arrives as a number that stands for it (a handle), never as
something that decides a comparison. Standard library only: it is loaded by processes that see nothing else.
"""

from collections.abc import Callable
from typing import Any


def encode(value: Any, handle_of: Callable[[Any], int]) -> Any:
    """JSON for None, bool, numbers, str, bytes, range and list, tuple, set, frozenset, dict of these; else a handle."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return encode(value.item(), handle_of)
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item, handle_of) for item in list(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, handle_of), encode(item, handle_of)] for key, item in dict(value).items()]}
    return {"handle": handle_of(value)}


def decode(value: Any, object_of: Callable[[int], Any]) -> Any:
    """What `encode` was given; raises ValueError or TypeError for anything else."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without its kind")
        return value
    ((name, content),) = value.items()
    if name == "bytes":
        return bytes.fromhex(content)
    if name in ("complex", "range"):
        return {"complex": complex, "range": range}[name](*content)
    if name == "dict":
        return {decode(key, object_of): decode(item, object_of) for key, item in content}
    if name == "handle":
        return object_of(content)
    return _COLLECTIONS[name](decode(item, object_of) for item in content)


_COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
