"""A tensor's elements as a row: one element of any stride, and of others the order."""

import pytest
import torch

from elaswave_plugin.communicator.links.buffers import flat_bytes
from elaswave_plugin.step_state.step_state import digest_of
from elaswave_plugin.values.plain import decode, encode, row_of

SCALAR = torch.tensor(3.5)


@pytest.mark.parametrize(
    "tensor",
    [SCALAR, SCALAR.expand(1), SCALAR.expand(1, 1), torch.arange(6.0)[4::3], torch.empty(0, 2)],
    ids=lambda one: f"{tuple(one.shape)} by {one.stride()}",
)
def test_bytes_do_not_depend_on_strides(tensor: torch.Tensor) -> None:
    plain = torch.tensor(tensor.tolist())
    row = row_of(tensor).view(torch.uint8)
    assert row.tolist() == list(plain.numpy().tobytes())
    assert digest_of(tensor) == digest_of(plain)
    assert torch.equal(decode(encode(tensor)), tensor)
    if tensor.is_contiguous():
        assert bytes(flat_bytes(tensor)) == bytes(row.numpy())


def test_a_row_is_in_order() -> None:
    assert row_of(torch.arange(6).view(2, 3).T).tolist() == [0, 3, 1, 4, 2, 5]
