"""Scripts as people write them: `examples/train_gpt.py` with what they change in a step's state."""

import hashlib
from pathlib import Path

from tests.faults.harness import SCRIPT

Change = tuple[str, str]

_BODY = "        log_loss(args.log_losses, report.loss)\n"
_MAIN = "    optimizer, scheduler = build_optimizer(args, model)\n"
_BUILD = "build_chunk(args, config, number), disable_bucketing"
_STEP = "    def train_step():\n"
_FORWARD = "    output = model(batch["
_TRAIN = "job.batches(train)"
_DEF = "def build_chunk(args"
_IMPORTS = "import torch\n"


def script(*changes: Change) -> str:
    """The example with each text in place of another that is there once."""
    text = SCRIPT.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return text


def write(folder: Path, *changes: Change) -> str:
    """The path of such a script, beside the folder of a test.

    The same script has the same path in all tests: they have one reference.
    """
    text = script(*changes)
    path = folder.parent / hashlib.sha256(text.encode()).hexdigest()[:16] / "train_gpt.py"
    if not path.exists():
        path.parent.mkdir()
        path.write_text(text)
    return str(path)


def in_body(code: str) -> Change:
    """Code that runs between two steps."""
    return _BODY, _BODY + code


def before_model(code: str) -> Change:
    """Code in front of the functions that build the model."""
    return _DEF, code + _DEF


# What a weight is that only rank 0 knows, and that is not trained: a frozen encoder, say.
FROZEN = """def with_frozen(chunk):
    for name, param in chunk.named_parameters():
        if "mlp.linear_fc1" in name:
            torch.manual_seed(7 + torch.distributed.get_rank())
            param.data.normal_(0, 0.03)
            {share}
            param.requires_grad = False
    return chunk


"""
SHARED = "torch.distributed.broadcast(param.data, 0)"
FREEZES = (
    before_model(FROZEN.format(share=SHARED)),
    (_BUILD, "with_frozen(build_chunk(args, config, number)), disable_bucketing"),
)
# Other values in each layer, and one of the layers is trained whole.
BY_LAYER = """def with_frozen(chunk):
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in (one for one in chunk.modules() if isinstance(one, TransformerLayer)):
        if layer.layer_number != 2:
            torch.manual_seed(7 + layer.layer_number)
            layer.mlp.linear_fc1.weight.data.normal_(0, 0.03)
            layer.mlp.linear_fc1.weight.requires_grad = False
    return chunk


"""
FREEZES_BY_LAYER = (before_model(BY_LAYER), FREEZES[1])
# The first layer whole, as of a model that is fine-tuned.
FIRST = """def with_frozen(chunk):
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in (one for one in chunk.modules() if isinstance(one, TransformerLayer)):
        if layer.layer_number == 1:
            layer.requires_grad_(False)
    return chunk


"""
FREEZES_FIRST = (before_model(FIRST), FREEZES[1])


def freezes_later(number: int) -> tuple[Change, ...]:
    """The layer of this number, in the body; a loss there is met there."""
    return (
        in_body(
            "        for layer in model[0].module.modules():\n"
            f"            if iteration == 1 and getattr(layer, 'layer_number', 0) == {number}:\n"
            "                layer.requires_grad_(False)\n"
            "        torch.distributed.barrier()\n"
        ),
    )


FREEZES_EACH = (before_model(FROZEN.format(share="pass")), FREEZES[1])

_LOSS = """    reported = (float(total), float(tokens))
    if per_token:
        return total, tokens.to(torch.int), reported
    return total / tokens, reported
"""


def reports(code: str) -> tuple[Change, ...]:
    """A loss function that ends with this line, or these, where it has ``total`` and ``tokens``."""
    shown = "validation loss {loss:.6f}", "validation loss {loss.hex()}"
    return (_LOSS, f"    {code}\n"), shown


# As some give them to every schedule: the model and its data in lists, also where there is one.
LISTS = (
    ('"model": model if interleaved else model[0],', '"model": model,'),
    ("return [batches] * len(model) if interleaved else batches", "return [batches] * len(model)"),
)
# Masked language modelling: draws before the model.
MASKS = (
    (
        _FORWARD,
        '    hidden = torch.rand(batch["tokens"].shape) < 0.3\n'
        '    batch["tokens"] = batch["tokens"].masked_fill(hidden, 0)\n' + _FORWARD,
    ),
)
# A step that keeps what it has asked for in its first pass, in whatever view that was.
KEEPS_WHAT_IT_ASKED = (
    (
        "    forward_backward = job.forward_backward(get_forward_backward_func())  # [elastic] 7\n",
        "    asked = []\n\n"
        "    def forward_backward(**given):\n"
        "        if not asked:\n"
        "            width = parallel_state.get_data_parallel_world_size()\n"
        "            asked.append(job.forward_backward(get_forward_backward_func()))\n"
        "            asked.append(args.global_batch_size // args.micro_batch_size // width)\n"
        "        return asked[0](num_microbatches=asked[1], **given)\n\n",
    ),
)
# What is drawn between the passes and the update, as gradient noise is.
NOISES = (
    (
        "        _, grad_norm, _ = optimizer.step()\n",
        "        for param in model[0].parameters():\n"
        "            param.main_grad.add_(torch.randn_like(param.main_grad), alpha=1e-3)\n"
        "        _, grad_norm, _ = optimizer.step()\n",
    ),
)
# A step whose update the script leaves out, as some do where the loss has leapt.
SKIPS = (
    (
        "        _, grad_norm, _ = optimizer.step()\n",
        "        grad_norm = 0.0\n"
        "        if job.iteration % 4 != 2:\n"
        "            _, grad_norm, _ = optimizer.step()\n",
    ),
)
NOISY = '''class Noisy(torch.utils.data.Dataset):
    """Drops tokens, by all generators that a dataset may draw from."""

    def __init__(self, data):
        self.data, self.np_rng = data, np.random.RandomState(5)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        sample = dict(self.data[number])
        tokens = sample["tokens"].clone()
        own, of_torch = self.np_rng.rand, torch.rand(()).item
        for draw in (np.random.rand, random.random, own, of_torch):
            tokens[int(draw() * len(tokens))] = 0
        return sample | {"tokens": tokens}


'''
AUGMENTS = (
    before_model(NOISY),
    (_TRAIN, "job.batches(Noisy(train))"),
    (_IMPORTS, "import random\n\nimport numpy as np\nimport torch\n"),
)

SETS_LR = (
    in_body(
        "        for group in optimizer.param_groups:\n"
        '            group["lr"] = 2e-3 / (iteration + 2)\n'
    ),
)
RESETS_MOMENTS = (
    in_body(
        "        if iteration == 3:\n"
        "            inner = optimizer.chained_optimizers[0].optimizer\n"
        "            for state in inner.state.values():\n"
        '                state["exp_avg"].zero_()\n'
    ),
)
CLAMPS = (
    in_body(
        "        for param in model[0].parameters():\n            param.data.clamp_(-0.03, 0.03)\n"
    ),
)
# Sequences that get longer, by the number of the step.
WARMS_UP = (
    (_STEP, _STEP + "        length[0] = 16 if job.iteration < 4 else 32\n"),
    (
        "    def per_chunk(batches):",
        "    length = [32]\n\n"
        "    def shortened(batches, model):\n"
        "        batch = {n: one[:, : length[0]].cuda() for n, one in next(batches).items()}\n"
        '        output = model(batch["tokens"], batch["position_ids"], None, '
        'labels=batch["labels"])\n'
        '        return output, partial(loss_func, batch["loss_mask"], False)\n\n'
        '    schedule["forward_step_func"] = shortened\n\n'
        "    def per_chunk(batches):",
    ),
)
# A variable that bodies have set, which a worker that comes back has not.
TURNS_UP = (
    before_model("SCALE = [1.0]\n\n\n"),
    in_body("        SCALE[0] = 1.0 if iteration < 3 else 1.5\n"),
    (
        '    return output, partial(loss_func, batch["loss_mask"], ',
        "    output = output * SCALE[0]\n"
        '    return output, partial(loss_func, batch["loss_mask"], ',
    ),
)
# What no plugin carries: a count of passes, a generator of one's own, and both in backward passes.
_SCALED = "    output = output * {scale}\n"
_RETURNS = '    return output, partial(loss_func, batch["loss_mask"], '
COUNTS_PASSES = (
    before_model("PASSES = [0]\n\n\n"),
    (_FORWARD, "    PASSES[0] += 1\n" + _FORWARD),
    (_RETURNS, _SCALED.format(scale="(1 + 0.01 * PASSES[0])") + _RETURNS),
)
_GENERATOR = "DRAWS = torch.Generator().manual_seed(5)\n\n\n"
# A part of a pass that is compiled in the first step, and changes no bit.
COMPILES = (
    before_model('SAME = torch.compile(lambda one: one * 1.0, backend="eager")\n\n\n'),
    (_RETURNS, "    output = SAME(output)\n" + _RETURNS),
)
DRAWS_BY_ITSELF = (
    before_model(_GENERATOR),
    (_RETURNS, _SCALED.format(scale="torch.rand((), generator=DRAWS)") + _RETURNS),
)
UNSTEADY_GRADIENT = (
    before_model(
        _GENERATOR + "def unsteady(chunk):\n"
        "    def hook(gradient):\n"
        "        return gradient * (1 + 1e-3 * torch.rand((), generator=DRAWS))\n\n"
        "    for name, param in chunk.named_parameters():\n"
        '        if name.endswith("final_layernorm.weight"):\n'
        "            param.register_hook(hook)\n"
        "    return chunk\n\n\n"
    ),
    (_BUILD, "unsteady(build_chunk(args, config, number)), disable_bucketing"),
)
# A kernel as of a GPU: its bits are other ones in each call, unless torch asks for a better one.
_KERNEL = """class Unsteady(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        if torch.are_deterministic_algorithms_enabled():
            return gradient
        return gradient * (1 + 1e-6 * torch.rand((), generator=DRAWS))


def unsteady(chunk):
    for name, module in chunk.named_modules():
        if name.endswith("input_layernorm"):
            module.register_forward_hook(lambda module, inputs, output: Unsteady.apply(output))
    return chunk


"""
UNSTEADY_KERNEL = (before_model(_GENERATOR + _KERNEL), UNSTEADY_GRADIENT[1])
REPEATING_KERNEL = (
    before_model(_GENERATOR + "torch.use_deterministic_algorithms(True)\n\n\n" + _KERNEL),
    UNSTEADY_GRADIENT[1],
)
AVERAGE = '''class Average:
    """An exponential moving average of the weights, beside the model."""

    def __init__(self, model):
        self.values = [param.detach().clone() for param in model.parameters()]

    def update(self, model):
        for value, param in zip(self.values, model.parameters(), strict=True):
            value.lerp_(param.detach(), 0.2)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        for value, new in zip(self.values, state["values"], strict=True):
            value.copy_(new)


'''
AVERAGES = (
    before_model(AVERAGE),
    (_MAIN, _MAIN + '    average = elaswave_plugin.keep("average", Average(model[0]))\n'),
    in_body(
        "        average.update(model[0])\n"
        "        if iteration + 1 == args.train_iters:\n"
        '            with open(f"average-{os.environ[\'RANK\']}", "w") as file:\n'
        "                json.dump([float(v.double().sum()) for v in average.values], file)\n"
    ),
    (_IMPORTS, "import json\n\nimport torch\n\nimport elaswave_plugin\n"),
)


def without_keep(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The same for somebody who has not read of `elaswave_plugin.keep`."""
    kept = 'elaswave_plugin.keep("average", Average(model[0]))'
    return tuple((old, new.replace(kept, "Average(model[0])")) for old, new in changes)


COUNTS = (
    before_model(
        "def counting(chunk):\n"
        '    chunk.register_buffer("seen", torch.zeros(()))\n'
        "    chunk.register_forward_pre_hook(lambda module, inputs: module.seen.add_(1) and None)\n"
        "    return chunk\n\n\n"
    ),
    (_BUILD, "counting(build_chunk(args, config, number)), disable_bucketing"),
)
# Barriers and sums of a script's own between two steps, and a scale that one rank decides.
MEETS = (
    in_body(
        "        torch.distributed.barrier()\n"
        '        numbers = torch.tensor([report.loss, float(os.environ["RANK"])])\n'
        "        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN)\n"
        "        scale = torch.tensor([float(numbers[0]) * 1e-4])\n"
        "        torch.distributed.broadcast(scale, 0)\n"
        "        for group in optimizer.param_groups:\n"
        '            group["lr"] = float(scale)\n'
    ),
)
GATHERS = (
    in_body(
        "        everyone = [None] * torch.distributed.get_world_size()\n"
        "        torch.distributed.all_gather_object(everyone, iteration)\n"
    ),
)
# Who answers yes to the questions by which scripts choose who logs and who saves.
ANSWERS = (
    in_body(
        "        weights = [float(p.detach().double().sum()) for p in model[0].parameters()]\n"
        "        said = {\n"
        '            "iteration": iteration,\n'
        '            "rank": torch.distributed.get_rank(),\n'
        '            "size": torch.distributed.get_world_size(),\n'
        '            "replica": parallel_state.get_data_parallel_rank(),\n'
        '            "tp": parallel_state.get_tensor_model_parallel_rank(),\n'
        '            "stage": parallel_state.get_pipeline_model_parallel_rank(),\n'
        '            "first": parallel_state.is_pipeline_first_stage(),\n'
        '            "last": parallel_state.is_pipeline_last_stage(),\n'
        '            "weights": weights,\n'
        "        }\n"
        '        with open(f"said-{os.environ[\'RANK\']}", "a") as file:\n'
        '            file.write(json.dumps(said) + "\\n")\n'
    ),
    (_IMPORTS, "import json\n\nimport torch\n"),
)
# A table that a first pass makes, as rotary embeddings and masks are.
TABLES = (
    before_model(
        "def tabled(chunk):\n"
        "    def hook(module, inputs, output):\n"
        '        if not hasattr(module, "table"):\n'
        '            module.register_buffer("table", torch.full((), 1.1), persistent=False)\n'
        "        return output * module.table\n\n"
        "    chunk.register_forward_hook(hook)\n"
        "    return chunk\n\n\n"
    ),
    (_BUILD, "tabled(build_chunk(args, config, number)), disable_bucketing"),
)
# Batch norm, a mean that a pass uses and changes, and a power iteration as spectral norm has one.
NORMALIZED = '''class Normalized(torch.nn.Module):
    """Buffers that each pass changes, and that change what later passes compute."""

    def __init__(self, size):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(size, affine=False)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("vector", torch.ones(size))

    def forward(self, hidden):
        if self.training:
            with torch.no_grad():
                flat = hidden.detach().reshape(-1, hidden.shape[-1]).to(self.mean.dtype)
                self.mean.lerp_(flat.mean(0), 0.1)
                turned = flat.T @ (flat @ self.vector)
                self.vector.copy_(turned / turned.norm())
        scale = 1 + 0.1 * torch.outer(self.vector, self.vector).sum(0)
        normed = self.norm(hidden.reshape(-1, hidden.shape[-1])).view_as(hidden)
        return ((hidden - self.mean) * scale + 0.1 * normed).to(hidden.dtype)


def normalizing(chunk):
    chunk.normalized = Normalized(chunk.config.hidden_size)
    getattr(chunk, "module", chunk).decoder.layers[0].register_forward_hook(
        lambda module, inputs, output: (chunk.normalized(output[0]), *output[1:])
    )
    return chunk


'''
NORMALIZES = (
    before_model(NORMALIZED),
    (_BUILD, "normalizing(build_chunk(args, config, number)), disable_bucketing"),
    in_body(
        "        if iteration + 1 == args.train_iters:\n"
        '            with open(f"buffers-{torch.distributed.get_rank()}", "w") as file:\n'
        "                named = dict(model[0].named_buffers())\n"
        "                json.dump({k: v.double().tolist() for k, v in named.items()}, file)\n"
    ),
    (_IMPORTS, "import json\n\nimport torch\n"),
)
# The first of these only, which fast mode averages.
RUNNING_MEANS = (
    before_model(
        NORMALIZED.replace("self.mean.lerp_(flat.mean(0), 0.1)", "pass").replace(
            "self.vector.copy_(turned / turned.norm())", "pass"
        )
    ),
    *NORMALIZES[1:],
)

# A pass of the same data before each step, as of a teacher: the iterator goes on with it.
TWICE_THE_DATA = (
    "sizes = [args.train_iters * args.global_batch_size,",
    "sizes = [2 * args.train_iters * args.global_batch_size,",
)
PASSES = (
    TWICE_THE_DATA,
    (
        _STEP,
        _STEP + "        with torch.no_grad():\n"
        "            seen = forward_backward(\n"
        "                data_iterator=per_chunk(train_batches), forward_only=True, **schedule\n"
        "            )\n"
        "        assert all(total > 0 for total, _ in seen)\n",
    ),
)
# Two updates in one step, each with the next batch.
UPDATES_TWICE = (
    TWICE_THE_DATA,
    (
        _STEP,
        _STEP + "        for chunk in model:\n"
        "            chunk.zero_grad_buffer()\n"
        "        optimizer.zero_grad()\n"
        "        forward_backward(data_iterator=per_chunk(train_batches), **schedule)\n"
        "        optimizer.step()\n",
    ),
)


def climbs(by: str) -> tuple[Change, ...]:
    """Sharpness-aware minimization: a second call with weights that are moved ``by`` something."""
    return (
        TWICE_THE_DATA,
        (
            "        _, grad_norm, _ = optimizer.step()\n",
            "        with torch.no_grad():\n"
            f"            moved = [(p, 0.01 * {by}.sign()) for p in model[0].parameters()]\n"
            "            for param, by in moved:\n"
            "                param.add_(by)\n"
            "            for chunk in model:\n"
            "                chunk.zero_grad_buffer()\n"
            "            optimizer.zero_grad()\n"
            "        forward_backward(data_iterator=per_chunk(train_batches), **schedule)\n"
            "        with torch.no_grad():\n"
            "            for param, by in moved:\n"
            "                param.sub_(by)\n"
            "        _, grad_norm, _ = optimizer.step()\n",
        ),
    )


_LOAD = '''def load_checkpoint(folder, model, optimizer, scheduler):
    """Load the newest checkpoint; returns the steps that it has behind it."""
    done = int(Path(folder, "latest_checkpointed_iteration.txt").read_text())
    state = {"model": model[0].module.sharded_state_dict(), "scheduler": scheduler.state_dict()}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    (distributed,) = optimizer.chained_optimizers
    if not distributed.optimizer.state:  # torch's Adam has none before a step
        distributed._init_optimizer_states_with_dummy_values()
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    state = dist_checkpointing.load(state, str(Path(folder) / f"iter_{done:07d}"))
    model[0].module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return done


'''
_BIND = "    job.bind(model, optimizer, scheduler, train_iters=args.train_iters)  # [elastic] 5\n"
_RESUMED = (
    "    job.bind(model, optimizer, scheduler, train_iters=args.train_iters, start_step={done})\n"
)
_LOADED = "load_checkpoint({folder!r}, model, optimizer, scheduler)\n"


PLACES = ("before bind", "after bind", "in job.run")


def resumes(folder: Path, done: int, *, place: str) -> tuple[Change, ...]:
    """A script that loads what another one has saved after ``done`` steps."""
    bind, load = _RESUMED.format(done=done), _LOADED.format(folder=str(folder))
    lines = {
        "before bind": "    done = " + load + _RESUMED.format(done="done"),
        "after bind": bind + "    " + load,
        "in job.run": bind
        + "    job.run(\n        lambda: "
        + load.rstrip()
        + ', phase="load"\n    )\n',
    }
    return (before_model(_LOAD), (_BIND, lines[place]))


def reads_passes(size: int) -> Change:
    """A DataLoader over so few samples that the run reads several passes of them."""
    data = f"[train[i] for i in range({size})]"
    loader = f"torch.utils.data.DataLoader({data}, batch_size=args.micro_batch_size, shuffle=True)"
    return _TRAIN, f"job.batches({loader})"


def goes_on(folder: Path) -> tuple[Change, ...]:
    """A script that begins at the newest checkpoint of a folder, where there is one."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    load = _LOADED.format(folder=str(folder)).rstrip()
    line = f"    done = {load} if Path({str(tracker)!r}).exists() else 0\n"
    return (before_model(_LOAD), (_BIND, line + _RESUMED.format(done="done")))


# A second model and its optimizer, of torch's, beside the bound one, as a GAN has.
SECOND = (
    (
        _STEP,
        "    critic = torch.nn.Linear(4, 1)\n"
        "    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)\n\n"
        + _STEP
        + "        critic(torch.ones(4)).sum().backward()\n"
        "        critic_optimizer.step()\n"
        "        critic_optimizer.zero_grad()\n",
    ),
)
# An optimizer that the bound one drives: its step is a part of the other's.
NESTED = (
    (
        _STEP,
        "    inner = optimizer.chained_optimizers[0]\n"
        "    averaged = torch.nn.Parameter(torch.ones(4))\n"
        "    beside = torch.optim.SGD([averaged], lr=0.0)\n"
        "    update = inner.step\n\n"
        "    def step_both():\n"
        "        averaged.grad = torch.zeros(4)\n"
        "        beside.step()\n"
        "        return update()\n\n"
        "    inner.step = step_both\n\n" + _STEP,
    ),
)
# A model beside the bound one, whose passes draw from Megatron-Core's streams.
TEACHES = (
    (
        _MAIN,
        _MAIN + "    global teacher\n"
        "    teacher = build_chunk(args, model[0].config, 0).requires_grad_(False)\n",
    ),
    (
        _FORWARD,
        "    with torch.no_grad():\n"
        "        known = teacher(\n"
        '            batch["tokens"], batch["position_ids"], None, labels=batch["labels"]\n'
        "        )\n" + _FORWARD,
    ),
    (
        "    return output, partial(loss_func,",
        "    output = output + 0.1 * (output - known).abs()\n    return output, partial(loss_func,",
    ),
)
