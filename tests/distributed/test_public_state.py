"""A state that a neighbour hands over arrives as it was, and a damaged one is refused."""

import pytest
import torch
from torch import nn

from corn.distributed.messages import ProtocolError
from corn.distributed.public_state import decode_state, encode_state
from corn.errors import InvalidArgumentError
from corn.learn.own_loop import restore_state, save_state

STATE = {
    "matrix": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)),
    "step": torch.tensor(7.0),
    "flag": torch.tensor(True),
    "integers": torch.arange(4, dtype=torch.int16),
    "empty": torch.zeros(0, 3),
}


def test_every_tensor_keeps_its_bits_shape_and_type() -> None:
    found = decode_state(memoryview(encode_state(STATE)))
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: data[:10],
        lambda data: data[:0],
        lambda data: data.replace(b"float32", b"complex"),
        lambda data: data.replace(b"[3, 2]", b"[-3,2]"),
        lambda data: data.replace(b"[3, 2]", b"[99,9]"),
    ],
)
def test_a_damaged_state_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError):
        decode_state(memoryview(damage(encode_state(STATE))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensor 0 exp_avg": torch.zeros(5)},
        {"tensor 3 exp_avg": torch.zeros(2)},
        {"group 0 lr": torch.zeros(2)},
        {"group 0 params": torch.zeros(())},
        {"nonsense": torch.zeros(())},
        {"tensor -1 exp_avg": torch.zeros(2)},
    ],
)
def test_a_state_of_other_parameters_is_refused(wrong: dict[str, torch.Tensor]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    with pytest.raises(InvalidArgumentError):
        restore_state(optimizer, save_state(optimizer) | wrong)
