"""A layer that is run twice alike: what does not repeat is named, and nothing else has a trace."""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from elaswave_plugin.adapters.repeated_layer import (
    LayerCall,
    advice,
    first_call,
    may_differ,
    switches_left,
)

DETERMINISTIC = "torch.use_deterministic_algorithms(True)"


class Unsteady(torch.autograd.Function):
    """A kernel as of a GPU: sums in an order of its own, unless torch asks for one that repeats."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, where: str, heeds: bool) -> torch.Tensor:
        ctx.where, ctx.heeds = where, heeds
        return hidden + Unsteady.noise(heeds) if where == "forward" else hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        noise = Unsteady.noise(ctx.heeds) if ctx.where == "backward" else 0.0
        return gradients[0] + noise, None, None

    @staticmethod
    def noise(heeds: bool) -> float:
        if heeds and torch.are_deterministic_algorithms_enabled():
            return 0.0
        Unsteady.calls += 1
        return 1e-3 * (Unsteady.calls % 2)


class Layer(torch.nn.Module):
    """Products, dropout, a buffer that passes change, and a kernel that repeats or does not."""

    def __init__(self, where: str = "", *, heeds: bool = True) -> None:
        super().__init__()
        self.expand, self.contract = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.BatchNorm1d(16)
        self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self.where, self.heeds = where, heeds

    def forward(self, hidden: torch.Tensor, *, scale: tuple[float, torch.Tensor]) -> Any:
        hidden = self.norm(self.expand(hidden)) * scale[1]
        hidden = Unsteady.apply(hidden, self.where, self.heeds)  # type: ignore[no-untyped-call]
        return self.contract(torch.nn.functional.dropout(hidden, 0.5)) * self.frozen, None


@contextmanager
def undone() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def called(layer: torch.nn.Module) -> LayerCall:
    """The first call of a layer in a pass, with its gradients left where the pass leaves them."""
    hidden = torch.randn(4, 8, requires_grad=True) * 2
    with first_call(layer) as kept:
        for number in range(2):
            output, _ = layer(hidden + number, scale=(0.5, torch.tensor(0.5)))
            output.sum().backward(retain_graph=True)
    (call,) = kept
    assert torch.equal(call.args[0], hidden) and call.args[0].grad_fn is None
    return call


def state(layer: torch.nn.Module) -> dict[str, Any]:
    """All that a job has of a layer and its draws, by values."""
    gradients = {f"gradient of {name}": one.grad for name, one in layer.named_parameters()}
    attributes = {f"of {name}": vars(one) for name, one in layer.named_parameters()}
    values = {**layer.state_dict(), **gradients, **attributes, "draws": torch.get_rng_state()}
    return {name: copy.deepcopy(one) for name, one in values.items()}


def check_equal(before: dict[str, Any], after: dict[str, Any]) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_a_layer_that_repeats_leaves_no_trace() -> None:
    layer = Layer()
    call = called(layer)
    before = state(layer)
    assert call.difference(undone) is None
    assert call.repeating(undone) == [DETERMINISTIC]
    check_equal(before, state(layer))
    assert not torch.are_deterministic_algorithms_enabled()


def test_generators_that_are_not_put_back_are_seen() -> None:
    @contextmanager
    def sabotage() -> Iterator[None]:
        yield

    assert called(Layer()).difference(sabotage) == "output 0"


@pytest.mark.parametrize(
    ("where", "named"),
    [("forward", "output 0"), ("backward", "the gradient of input 0")],
)
def test_a_kernel_that_does_not_repeat_is_named_with_its_switch(where: str, named: str) -> None:
    layer = Layer(where)
    call = called(layer)
    before = state(layer)
    assert call.difference(undone) == named
    assert call.repeating(undone) == [DETERMINISTIC]
    check_equal(before, state(layer))


def test_a_switch_that_does_not_help_is_not_said_to() -> None:
    layer = Layer("backward", heeds=False)
    call = called(layer)
    assert call.difference(undone) is not None
    assert call.repeating(undone) == []
    assert advice(layer, []).startswith(f"set {DETERMINISTIC} and CUBLAS_WORKSPACE_CONFIG=:4096:8")


def test_gradients_of_fused_kernels_are_compared_where_they_are_added() -> None:
    class Fused(torch.autograd.Function):
        """As Megatron-Core's: adds the weight's gradient to `main_grad`, and returns a dummy."""

        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden, weight)
            return hidden @ weight.t()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            hidden, weight = ctx.saved_tensors
            weight.main_grad.add_(gradients[0].t() @ hidden + Unsteady.noise(heeds=True))
            weight.grad_added_to_main_grad = True
            return gradients[0] @ weight, torch.full_like(weight, Unsteady.calls)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, hidden: torch.Tensor) -> Any:
            return Fused.apply(hidden, self.weight)  # type: ignore[no-untyped-call]

    layer = Product()
    main_grad = torch.full((8, 8), 3.0)
    layer.weight.main_grad = main_grad  # type: ignore[attr-defined]
    layer.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    call = LayerCall(layer, (torch.randn(4, 8),), {})
    assert call.difference(undone) == "the gradient of weight"
    assert call.repeating(undone) == [DETERMINISTIC]
    assert torch.equal(main_grad, torch.full((8, 8), 3.0)) and layer.weight.grad is None
    assert not layer.weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_hooks_of_gradients_see_no_copy() -> None:
    layer, seen = Layer(), list[str]()
    for name, weight in layer.named_parameters():
        if weight.requires_grad:
            watch: Any = weight.register_post_accumulate_grad_hook
            watch(lambda one, name=name: seen.append(name))
    call = LayerCall(layer, (torch.randn(4, 8),), {"scale": (0.5, torch.tensor(0.5))})
    assert call.difference(undone) is None
    assert seen == []


def test_passes_that_recompute_are_compared_too() -> None:
    class Recomputed(torch.nn.Module):
        """Reentrant recomputation as Megatron-Core has it: refuses any other backward."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer("backward")

        def forward(self, hidden: torch.Tensor) -> Any:
            scale = torch.tensor(0.5)
            return torch.utils.checkpoint.checkpoint(
                lambda hidden: self.layer(hidden, scale=(0.5, scale)), hidden, use_reentrant=True
            )

    layer = Recomputed()
    call = LayerCall(layer, (torch.randn(4, 8),), {})
    before = state(layer)
    assert call.difference(undone) == "the gradient of input 0"
    check_equal(before, state(layer))


def test_a_layer_that_cannot_be_run_apart_says_what_was_tried() -> None:
    class Once(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("only once")

    with pytest.raises(RuntimeError, match="only once") as raised:
        LayerCall(Once(2, 2), (torch.ones(2),), {}).difference(undone)
    assert "rehearse_first_step off leaves that out" in raised.value.__notes__[0]


def test_switches_are_those_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    for name in ("transformer_engine", "megatron.training"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    product, convolution = torch.nn.Linear(2, 2), torch.nn.Conv1d(1, 1, 1)
    cublas, cudnn = "CUBLAS_WORKSPACE_CONFIG=:4096:8", "torch.backends.cudnn.deterministic = True"
    assert [one.text for one in switches_left(product)] == [DETERMINISTIC, cublas]
    assert [one.text for one in switches_left(convolution)] == [DETERMINISTIC, cublas, cudnn]
    for name in ("transformer_engine", "megatron.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    of_megatron = f"{DETERMINISTIC} (--deterministic-mode of Megatron-LM)"
    te = "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
    assert [one.text for one in switches_left(product)] == [of_megatron, cublas, te]
    assert advice(product, [DETERMINISTIC]) == (
        f"with {DETERMINISTIC} they do repeat: set it, and {cublas}, which it needs"
    )
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert advice(product, [DETERMINISTIC]) == f"with {DETERMINISTIC} they do repeat: set it"
    torch.use_deterministic_algorithms(True)
    try:
        assert switches_left(product) == []
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_cpu_is_not_asked() -> None:
    assert not may_differ(torch.nn.Linear(2, 2))
