"""What an ONNX graph may not have: params in other files, which a crafted one could take from anywhere on the disk.

Newer versions of ONNX Runtime refuse paths that lead out of the folder; here no version is asked to. The file is
walked as protobuf, message by message, down to every tensor; nothing but Python is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

# Field number -> kind of message, for every message that has a tensor somewhere below it (onnx.proto).
_BELOW = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "function": {7: "node", 11: "attribute"},
    "training": {1: "graph", 2: "graph"},
    "tensor": {},
}
_EXTERNAL = {13, 14}  # of a tensor: where its values lie, and that they lie elsewhere
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of fixed length
_DEEPEST = 64  # messages inside each other; real graphs have some ten


def refuse_external_data(graph: bytes) -> None:
    """Raise if a tensor of the graph lies in another file, or if the graph cannot be read."""
    try:
        _walk(memoryview(graph), "model", 0)
    except (IndexError, RecursionError) as error:
        raise ValueError("it is no ONNX graph") from error


def _walk(message: memoryview, kind: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError("it is no ONNX graph")
    for field, value in _fields(message):
        if kind == "tensor" and field in _EXTERNAL and (isinstance(value, memoryview) or value):
            raise ValueError("its params lie in another file")
        below = _BELOW[kind].get(field)
        if below is not None and isinstance(value, memoryview):
            _walk(value, below, depth + 1)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and value of each field: bytes, or a whole number."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        length, at = (_FIXED[wire], at) if wire in _FIXED else _varint(message, at)
        if wire not in (1, 2, 5) or at + length > len(message):
            raise IndexError
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError
