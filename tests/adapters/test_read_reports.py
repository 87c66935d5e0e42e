"""Losses that a script reads itself are told, however it reads them; forms that it reports."""

import ast
import copy
import math
import operator
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_plugin.adapters.megatron.step.reported_losses import Reports
from elaswave_plugin.adapters.megatron_lm.losses import LossTotals
from elaswave_plugin.errors import ConfigurationError

TENSORS = [torch.tensor(1.0), torch.tensor(3.0)]
# The list's own memory is read by C code of torch and NumPy.
READS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "torch.stack": (torch.stack, TENSORS),
    "torch.hstack": (torch.hstack, TENSORS),
    "torch._foreach_mul": (lambda losses: torch.stack(torch._foreach_mul(losses, 1.0)), TENSORS),
    "torch.tensor": (torch.tensor, [1.0, 3.0]),
    "np.array": (np.array, [1.0, 3.0]),
    "np.asarray": (np.asarray, TENSORS),
    "fsum": (lambda losses: [math.fsum(losses) - 3.0, 3.0], [1.0, 3.0]),
    "mean": (lambda losses: [statistics.mean(losses) - 1.0, 3.0], [1.0, 3.0]),
    "a star": (lambda losses: [*losses], [1.0, 3.0]),
    "list.extend": (lambda losses: [].__iadd__(losses), [1.0, 3.0]),
    "a sum on its right": (lambda losses: operator.add([], losses), [1.0, 3.0]),
    "a sum on its left": (lambda losses: operator.add(losses, []), [1.0, 3.0]),
    "a product": (lambda losses: losses * 1, [1.0, 3.0]),
    "copy": (lambda losses: losses.copy(), [1.0, 3.0]),
    "copy.copy": (copy.copy, [1.0, 3.0]),
    "from behind": (lambda losses: [*reversed(losses)][::-1], [1.0, 3.0]),
    "a place": (lambda losses: [losses[0], losses[-1]], [1.0, 3.0]),
    "pop": (lambda losses: [losses.pop(0), losses.pop()], [1.0, 3.0]),
    "text": (lambda losses: ast.literal_eval(str(losses)), [1.0, 3.0]),
    "len": (lambda losses: [len(losses) - 1, len(losses) + 1], [1.0, 3.0]),
}


@pytest.mark.parametrize("name", READS)
def test_a_reader_is_told_and_gets_what_it_reads(name: str) -> None:
    read, plain = READS[name]
    asked: list[str] = []
    got = read(Reports([*plain], asked.append))
    assert {*asked} == {"losses"}
    assert type(got) is torch.Tensor or isinstance(got, list | np.ndarray)
    assert [float(one) for one in got] == [1.0, 3.0]


def test_nobody_reads_a_list_that_is_handed_on() -> None:
    asked: list[str] = []
    losses = Reports([1.0], asked.append)
    assert losses and not Reports([], asked.append)
    assert losses.plain == [1.0] and isinstance(losses, list)
    assert asked == []


@pytest.mark.parametrize(
    ("report", "said"), [(np.ones(2), "a ndarray"), (1.0, "a float"), (torch.ones(3), "3 numbers")]
)
def test_a_report_of_another_form_is_refused_in_megatron_lm(report: Any, said: str) -> None:
    microbatches: Any = SimpleNamespace(reports_losses=True, reports=(0,))
    totals = LossTotals(microbatches, num_replicas=1)
    nobody: Any = None
    with pytest.raises(ConfigurationError, match=f"reports 'lm loss' as {said}, wanted a tensor"):
        totals.agree([{"lm loss": report}], nobody)
