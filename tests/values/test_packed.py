"""A value with tensors comes back from its bytes, and shortened ones are refused."""

import pytest
import torch

from elaswave_plugin.errors import UnreadableValueError
from elaswave_plugin.values.plain import packed, unpacked


def test_a_value_with_tensors_comes_back() -> None:
    value = {"rate": 0.5, "moments": [torch.arange(6.0).view(2, 3).t(), torch.tensor(True)]}
    found = unpacked(packed(value, "it"), "it")
    assert found["rate"] == 0.5
    assert torch.equal(found["moments"][0], value["moments"][0])  # type: ignore[index]
    assert torch.equal(found["moments"][1], torch.tensor(True))


def test_bytes_that_are_cut_off_are_refused() -> None:
    whole = packed([torch.arange(8)], "it")
    with pytest.raises(UnreadableValueError):
        unpacked(whole[:-8], "it")
