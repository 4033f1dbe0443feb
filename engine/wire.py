"""Records as bytes: MessagePack of the dataclasses, arrays as their raw memory. Decoding makes records and runs nothing."""

import math
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
_KINDS = "biuf"  # booleans, integers, floats: an array of objects has no bytes of its own


def pack(value: Any) -> bytes:
    """A record, or JSON-like values with records and arrays in them, as bytes.

    Raises:
        ValueError: something in it has no representation, such as a function or an array of objects.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_encode)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"cannot be sent to another process ({error})") from None


def unpack(payload: bytes, kind: type[T]) -> T:
    """The value of type ``kind`` that ``pack`` wrote; its arrays are writable.

    Raises:
        ValueError: the bytes hold no such value.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind, dec_hook=_decode)
    except msgspec.DecodeError as error:
        raise ValueError(f"no {getattr(kind, '__name__', kind)}: {error}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__module__}.{type(value).__qualname__} has no representation as bytes")


def _decode(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(kind)
    try:
        dtype, shape, data = value
        kind_of = np.dtype(dtype)
        if kind_of.kind not in _KINDS or math.prod(shape) * kind_of.itemsize != len(data):
            raise ValueError("dtype, shape and size do not go together")
        return np.frombuffer(bytearray(data), kind_of).reshape(shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no array ({error})") from None
