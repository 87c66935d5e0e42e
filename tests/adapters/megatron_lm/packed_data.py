"""Runs pretrain_gpt.py --sft on a CPU: with conversations, a tokenizer and attention made here.

Megatron-LM reads its conversations by a package, and runs packed sequences by kernels of a GPU.
"""

import json
import random
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

NUM_WORDS = 100
# Beside words, whose numbers begin at 10.
PAD, EOD, FIRST = 0, 1, 10
ROLES = {"system": 2, "user": 3, "assistant": 4}
# Of a label that no loss is computed of, as Megatron-LM has it.
IGNORED = -100


def write_conversations(path: Path) -> None:
    """Write 160 lines of one to three conversations, of 8 to 30 tokens a line."""
    draw = random.Random(3)
    lines = []
    for _ in range(160):
        messages = []
        for _ in range(draw.randrange(1, 4)):
            for role in ROLES:
                words = (str(draw.randrange(NUM_WORDS)) for _ in range(draw.randrange(1, 3)))
                messages.append({"role": role, "content": " ".join(words)})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


class Words:
    """A tokenizer of numbers written out: a token for each role, and one for each word."""

    pad, eod, vocab_size = PAD, EOD, FIRST + NUM_WORDS
    unique_identifiers: Mapping[str, str] = {"class": "Words"}

    def tokenize_conversation(
        self, conversation: Sequence[Mapping[str, str]], return_target: bool, **_: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, and what is to be learnt of them: what assistants say."""
        tokens, targets = [], []
        for turn in conversation:
            said = [ROLES[turn["role"]], *(FIRST + int(word) for word in turn["content"].split())]
            tokens += said
            targets += said if turn["role"] == "assistant" else [IGNORED] * len(said)
        return np.array(tokens), np.array(targets)


def reader() -> ModuleType:
    """Return a module with the one function of the package `datasets` that is called."""
    module = ModuleType("datasets")
    vars(module)["load_dataset"] = lambda kind, data_files, split: [
        json.loads(line) for line in Path(data_files).read_text().splitlines()
    ]
    return module


def packing(native: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of packed sequences: each token sees its own one only, up to itself."""

    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        import torch

        if packed_seq_params is None:
            return native(self, query, key, value, attention_mask, attn_mask_type, attention_bias)
        length = query.size(0)
        ends = packed_seq_params.cu_seqlens_q.flatten()[1:].long()
        of = torch.bucketize(torch.arange(length), ends, right=True)
        hidden = (of[:, None] != of[None, :]) | torch.ones(length, length).triu(1).bool()
        rows = (one.unsqueeze(1) for one in (query, key, value))
        return native(self, *rows, hidden[None, None], attn_mask_type, attention_bias)

    return forward


def main() -> None:
    """Run the script beside this file."""
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    sys.modules["datasets"] = reader()
    from megatron.core.tokenizers.text.utils import build_tokenizer
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build_tokenizer.build_tokenizer = lambda args: Words()
    attention: Any = DotProductAttention
    attention.forward = packing(attention.forward)
    runpy.run_path(str(folder / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
