"""A digest of a tensor's bits: by xxh3 on the host, by sums on the device that holds it."""

import torch
import xxhash

# Odd and far from a power of two, so that no two places within a row weigh the same modulo 2**64.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_ROW = 1 << 20


@torch.no_grad()
def digest_of(tensor: torch.Tensor) -> int:
    """63 bits; two workers get the same for the same bits on the same kind of device."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_cuda:
        return _on_device(flat)
    data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return xxhash.xxh3_64_intdigest(data) >> 1


def _on_device(flat: torch.Tensor) -> int:
    """A sum of the bits, weighted by their places: it needs no copy to the host."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.element_size()])
    weights = torch.arange(1, min(_ROW, len(bits)) + 1, device=bits.device) * _STRIDE
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _ROW):
        row = bits[start : start + _ROW].to(torch.int64)
        total = total * 31 + (row * weights[: len(row)]).sum()
    return int(total) & ((1 << 63) - 1)
