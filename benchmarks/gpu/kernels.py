"""A check that kernels repeat their bits: forward, backward and optimizer of a layer, run twice."""

import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes

# Tokens, width, heads and vocabulary: enough for split-K products and atomic sums.
TOKENS, WIDTH, HEADS, VOCABULARY = 4096, 1024, 16, 50_304
SMALL_TOKENS, SMALL_WIDTH, SMALL_VOCABULARY = 128, 64, 512
RUNS = 3


class Layer(torch.nn.Module):
    """Embedding, attention, a mixture by indices and a loss: the kernels of a step."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.queries = torch.nn.Linear(width, 3 * width)
        self.norm = torch.nn.LayerNorm(width)
        self.expand = torch.nn.Linear(width, 4 * width)
        self.contract = torch.nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next token, shape ()."""
        hidden = self.embedding(tokens)
        parts = self.queries(self.norm(hidden)).chunk(3, dim=-1)
        shape = (1, tokens.numel(), HEADS, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape_as(hidden)
        hidden = hidden + self.contract(torch.nn.functional.gelu(self.expand(hidden)))
        # As a mixture of experts brings tokens back: an indexed sum, by atomics on a GPU.
        back = torch.zeros_like(hidden).index_add_(0, tokens % tokens.numel(), hidden)
        logits = (hidden + back) @ self.embedding.weight.t()
        return torch.nn.functional.cross_entropy(logits.float(), tokens.roll(1))


def repeat(device: Device, notes: Notes) -> None:
    """Run the same step several times in each precision, with and without torch's switch."""
    differing: dict[str, list[str]] = {}
    for switched in (False, True):
        how = "with" if switched else "without"
        # A process each: cuBLAS reads its variable once.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(differing_by_precision, device, switched).result()
        for name, parts in found.items():
            differing[f"{name} {how} the switch"] = parts
            verdict = "bits differ in " + ", ".join(parts) if parts else "all bits repeat"
            notes.say(f"{name}, {how} torch.use_deterministic_algorithms: {verdict}")
            if switched:
                notes.check(f"{name}: with the switch all bits repeat", not parts)
    notes.figure("differing", differing)


def differing_by_precision(device: Device, switched: bool) -> dict[str, list[str]]:
    """Return what differs in each precision; `switched`: torch asks for kernels that repeat."""
    if switched:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {name: differing_parts(device, dtype) for name, dtype in kinds.items()}


def differing_parts(device: Device, dtype: torch.dtype) -> list[str]:
    """Return which parts of a step had other bits in a second or third run; [] where none had."""
    first = _step(device, dtype)
    found: list[str] = []
    for _ in range(RUNS - 1):
        other = _step(device, dtype)
        found += [name for name, one in first.items() if not torch.equal(one, other[name])]
    return sorted(set(found))


def _step(device: Device, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Loss, gradients and weights after Adam of one step from the same start."""
    small = device.is_stand_in
    width, vocabulary = (SMALL_WIDTH, SMALL_VOCABULARY) if small else (WIDTH, VOCABULARY)
    torch.manual_seed(11)
    layer = Layer(width, vocabulary).to(device=device.kind, dtype=dtype)
    tokens = torch.randint(vocabulary, (SMALL_TOKENS if small else TOKENS,)).to(device.kind)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=not small)
    loss = layer(tokens)
    loss.backward()
    found = {"forward": loss.detach().cpu()}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        found[f"backward of {name}"] = parameter.grad.cpu()
    optimizer.step()
    for name, parameter in layer.named_parameters():
        found[f"optimizer of {name}"] = parameter.detach().cpu()
    return found
