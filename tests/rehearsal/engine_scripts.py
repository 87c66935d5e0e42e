"""DeepSpeed scripts as people write them: `examples/train_deepspeed.py`, with what they change."""

from pathlib import Path

from tests.deepspeed.harness import EXAMPLE

Change = tuple[str, str]

_STEP = "            engine.step()\n"
_MODEL = "        self.head = nn.Linear(args.hidden_size, VOCABULARY_SIZE)\n"
_FORWARD = "        x = self.tokens(tokens) + self.positions(places)\n"
_LOOP = "    while engine.global_steps < args.steps:\n"

# A second model that the loop trains, with an engine of its own that has no section.
SECOND_ENGINE = (
    (
        _LOOP,
        "    torch.manual_seed(5)\n"
        "    judge = nn.Linear(4, 1)\n"
        "    second, *_ = deepspeed.initialize(\n"
        "        model=judge,\n"
        "        model_parameters=judge.parameters(),\n"
        "        config={\n"
        '            "train_micro_batch_size_per_gpu": 1,\n'
        '            "gradient_accumulation_steps": 1,\n'
        '            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},\n'
        "        },\n"
        "    )\n" + _LOOP,
    ),
    (
        _STEP,
        _STEP + "            second.backward(second(torch.ones(2, 4)).square().mean())\n"
        "            second.step()\n",
    ),
)
# A running mean of what passes through, which the next pass uses.
RUNNING_MEAN = (
    (_MODEL, _MODEL + '        self.register_buffer("usual", torch.zeros(args.hidden_size))\n'),
    (
        _FORWARD,
        _FORWARD + "        if self.training:\n"
        "            self.usual.lerp_(x.detach().mean((0, 1)), 0.1)\n"
        "        x = x - self.usual\n",
    ),
)
# A teacher inside of the module that follows the student once a step.
TEACHER = (
    (
        _MODEL,
        _MODEL + "        self.teacher = nn.Linear(args.hidden_size, VOCABULARY_SIZE)\n"
        "        self.teacher.requires_grad_(False)\n",
    ),
    ("    while engine.global_steps", "    last = 0\n    while engine.global_steps"),
    (
        _STEP,
        _STEP + "            if engine.global_steps != last:\n"
        "                last = engine.global_steps\n"
        "                model.teacher.weight.data.lerp_(model.head.weight.data, 0.2)\n",
    ),
)


def write(folder: Path, *changes: Change) -> str:
    """The path of the example in a folder, with each text in place of another."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    path = folder / "train_deepspeed.py"
    path.write_text(text)
    return str(path)
