"""Public state that a neighbour hands to an agent that returns, as bytes.

With exact sums, everything that an optimizer keeps follows from public sums. An agent that returns
gets it from a neighbour, so that all agents go on with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from corn.distributed.messages import ProtocolError
from corn.errors import InvalidArgumentError
from corn.parsing import build, parse_json

PublicState: TypeAlias = Mapping[str, Tensor]
"""Tensors by name."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
LAST_TOTAL = "sum of the step before"
"""The name of the last sum, which other agents may lack."""

# No optimizer of torch keeps as many tensors of the size of the model, of eight bytes each.
_MAX_COPIES = 8
_MAX_INDEX_BYTES = 1 << 20


def state_limit(model: Tensor) -> int:
    """Return the most bytes of a state."""
    return _MAX_INDEX_BYTES + _MAX_COPIES * 8 * len(model)


def encode_state(state: PublicState) -> bytes:
    """Return a state as bytes.

    >>> found = decode_state(memoryview(encode_state({"memory": torch.arange(3.0)})))
    >>> found["memory"].tolist()
    [0.0, 1.0, 2.0]
    """
    index, parts = [], []
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        index.append([name, str(own.dtype).removeprefix("torch."), list(own.shape)])
        parts.append(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    head = json.dumps(index).encode()
    return b"".join([len(head).to_bytes(4, "big"), head, *parts])


def decode_state(data: memoryview) -> dict[str, Tensor]:
    """Return the state that a neighbour sent; raise ``ProtocolError`` for anything else."""
    size = int.from_bytes(data[:4], "big")
    rest, state = data[4 + size :], dict[str, Tensor]()
    try:
        kinds = tuple[tuple[str, str, tuple[int, ...]], ...]
        index = build(kinds, parse_json(bytes(data[4 : 4 + size])), "the state")
    except InvalidArgumentError as error:
        raise ProtocolError(f"sent a state that cannot be read: {error}") from error
    for name, kind, shape in index:
        dtype, count = _DTYPES.get(kind), 1
        for length in shape:
            count *= max(length, 0)
        if dtype is None or min(shape, default=0) < 0 or count * dtype.itemsize > len(rest):
            raise ProtocolError("sent a state that was cut short or is damaged")
        own = bytearray(rest[: count * dtype.itemsize])
        rest = rest[len(own) :]
        empty = torch.empty(shape, dtype=dtype)
        state[name] = torch.frombuffer(own, dtype=dtype).view(shape) if own else empty
    if len(rest):
        raise ProtocolError("sent a state that is longer than it says")
    return state
