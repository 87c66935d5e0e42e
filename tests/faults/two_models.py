"""Scripts that train two models in one step, as changes of the example: a GAN, actor and critic."""

from tests.faults.own_scripts import Change, before_model

_MAIN = "    optimizer, scheduler = build_optimizer(args, model)\n"
_BUILD = "build_chunk(args, config, number), disable_bucketing"
BOUND = "    job.bind(model, optimizer, scheduler, train_iters=args.train_iters)  # [elastic] 5\n"
_FUNCTIONS = "    def per_chunk(batches):"
_IMPORT = "from megatron.core.transformer.module import Float16Module\n"
_BATCHES = (
    "    train_batches, valid_batches = job.batches(train), job.batches(valid)  # [elastic] 6\n"
)
_ZERO = (
    "        for chunk in model:\n"
    "            chunk.zero_grad_buffer()\n"
    "        optimizer.zero_grad()\n"
)
_STEP = (
    "        losses = forward_backward(data_iterator=per_chunk(train_batches), **schedule)\n"
    "        _, grad_norm, _ = optimizer.step()\n"
    "        scheduler.step(increment=args.global_batch_size)\n"
    "        return losses, grad_norm\n"
)

# ---- a second model of the same kind ------------------------------------------------------------

BUILDS: Change = (
    _MAIN,
    _MAIN + "    second = build_model(args)\n"
    "    of_second, pace_of_second = build_optimizer(args, second)\n",
)
BIND_SECOND = "    job.bind(second, of_second, pace_of_second, train_iters=args.train_iters)\n"
BINDS: Change = (BOUND, BOUND + BIND_SECOND)
# The second one is trained, then its passes weigh the losses of the first one; both drop out.
ACTOR_AND_CRITIC: tuple[Change, ...] = (
    BUILDS,
    BINDS,
    (_BATCHES, _BATCHES + "    critic_batches = job.batches(train)\n"),
    (
        _FUNCTIONS,
        "    def act(batches, actor):\n"
        "        batch = {name: tensor.cuda() for name, tensor in next(batches).items()}\n"
        '        inputs = batch["tokens"], batch["position_ids"], None\n'
        "        with torch.no_grad():\n"
        '            value = second[0](*inputs, labels=batch["labels"])\n'
        '        output = actor(*inputs, labels=batch["labels"])\n'
        "        output = output * torch.sigmoid(output.detach() - value)\n"
        '        return output, partial(loss_func, batch["loss_mask"], False)\n\n' + _FUNCTIONS,
    ),
    (
        _ZERO + _STEP,
        "        for chunk in (second[0], model[0]):\n"
        "            chunk.zero_grad_buffer()\n"
        "        of_second.zero_grad()\n"
        "        optimizer.zero_grad()\n"
        '        given = schedule | {"model": second[0]}\n'
        "        forward_backward(data_iterator=critic_batches, **given)\n"
        "        of_second.step()\n"
        "        pace_of_second.step(increment=args.global_batch_size)\n"
        '        given = schedule | {"forward_step_func": act}\n'
        + _STEP.replace("per_chunk(train_batches), **schedule", "train_batches, **given"),
    ),
)

# Of the same, the second one in float32, and smaller, where the first one is in 16 bits.
MIXED: tuple[Change, ...] = (
    (
        _MAIN,
        _MAIN + "    half, args.fp16, args.num_layers = args.fp16, False, 1\n"
        "    second = build_model(args)\n"
        "    of_second, pace_of_second = build_optimizer(args, second)\n"
        "    args.fp16 = half\n",
    ),
    *ACTOR_AND_CRITIC[1:],
)


def _trained(number: str, step: str, batches: str, reported: str = "_", norm: str = "_") -> str:
    """A call and an update of the model of this number of LATE_ACTOR."""
    return (
        f"        chunk, update, pace = models[{number}]\n"
        "        chunk.zero_grad_buffer()\n"
        "        update.zero_grad()\n"
        f'        given = schedule | {{"model": chunk, "forward_step_func": {step}}}\n'
        f"        {reported} = forward_backward(data_iterator={batches}, **given)\n"
        f"        _, {norm}, _ = update.step()\n"
        "        pace.step(increment=args.global_batch_size)\n"
    )


# Two critics of other depths are trained in each step, the actor in every second one.
_LATE = "".join(f"    {line}\n" for line in _trained("1", "act", "others").splitlines())
LATE_ACTOR: tuple[Change, ...] = (
    (
        _MAIN,
        "    models = []\n"
        "    for args.num_layers in (1, 2, 3):\n"
        "        chunks = model if args.num_layers == 2 else build_model(args)\n"
        "        models.append((chunks[0], *build_optimizer(args, chunks)))\n"
        "    _, optimizer, scheduler = models[1]\n",
    ),
    (
        BOUND,
        "    for each in models:\n        job.bind(*each, train_iters=args.train_iters)\n",
    ),
    (_BATCHES, _BATCHES + "    others = job.batches(train)\n"),
    (
        _FUNCTIONS,
        "    def act(batches, actor):\n"
        "        batch = {name: tensor.cuda() for name, tensor in next(batches).items()}\n"
        '        inputs = batch["tokens"], batch["position_ids"], None\n'
        "        critics = models[0][0], models[2][0]\n"
        "        with torch.no_grad():\n"
        '            values = [one(*inputs, labels=batch["labels"]) for one in critics]\n'
        '        output = actor(*inputs, labels=batch["labels"])\n'
        "        gain = torch.sigmoid(output.detach() - torch.minimum(*values))\n"
        "        output = output * gain + 0.01 * torch.randn_like(output)\n"
        '        return output, partial(loss_func, batch["loss_mask"], False)\n\n' + _FUNCTIONS,
    ),
    (
        _ZERO + _STEP,
        _trained("0", "forward_step", "train_batches", "losses", "grad_norm")
        + _trained("2", "forward_step", "others")
        + "        if job.iteration % 2:\n"
        + _LATE
        + "        return losses, grad_norm\n",
    ),
    (
        "sizes = [args.train_iters * args.global_batch_size,",
        "sizes = [2 * args.train_iters * args.global_batch_size,",
    ),
)

# Each is trained through the other, and both are zeroed before: what the first call leaves in the
# gradients of the second model is that of the micro-batches that a worker has run.
CROSSED: tuple[Change, ...] = (
    BUILDS,
    BINDS,
    (
        _FUNCTIONS,
        "    def through_both(batches, chunk):\n"
        "        batch = {name: tensor.cuda() for name, tensor in next(batches).items()}\n"
        '        inputs = batch["tokens"], batch["position_ids"], None\n'
        '        one = model[0](*inputs, labels=batch["labels"])\n'
        '        other = second[0](*inputs, labels=batch["labels"])\n'
        "        output = one + 0.5 * other * one.sigmoid()\n"
        '        return output, partial(loss_func, batch["loss_mask"], False)\n\n' + _FUNCTIONS,
    ),
    (
        _ZERO + _STEP,
        _ZERO + "        second[0].zero_grad_buffer()\n"
        "        of_second.zero_grad()\n"
        '        given = schedule | {"forward_step_func": through_both}\n'
        + _STEP.replace("per_chunk(train_batches), **schedule", "train_batches, **given").replace(
            "        return losses, grad_norm\n",
            '        given["model"] = second[0]\n'
            "        forward_backward(data_iterator=train_batches, **given)\n"
            "        of_second.step()\n"
            "        pace_of_second.step(increment=args.global_batch_size)\n"
            "        return losses, grad_norm\n",
        ),
    ),
    (
        "sizes = [args.train_iters * args.global_batch_size,",
        "sizes = [2 * args.train_iters * args.global_batch_size,",
    ),
)

# ---- a GAN --------------------------------------------------------------------------------------

_PARTS = '''class Part(MegatronModule):
    """A small model without a layer of Megatron-Core's; batch norm, where it makes images."""

    def __init__(self, config, sizes, normalizes):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        first, hidden, last = sizes
        norm = [torch.nn.BatchNorm1d(hidden)] if normalizes else [torch.nn.Dropout(0.2)]
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(first, hidden), *norm, torch.nn.Tanh(), torch.nn.Linear(hidden, last)
        )

    def set_input_tensor(self, tensor):
        pass

    def forward(self, inputs):
        return self.layers(inputs)


# Sizes of the generator and of the discriminator, in the order in which they are built.
SIZES = [((8, 48, 64), True), ((32, 40, 1), False)]


'''
_GENERATES = """    def generate(batch):
        images = model[0](torch.randn(2, 8, device=batch.device)).view(-1, 32)
        return images[: 2 * len(batch)]

    def discriminate(batches, judge):
        real = next(batches)["tokens"].cuda().float() / 384
        with torch.no_grad():
            made = generate(real)
        scores = judge(torch.cat([real, made]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)]).to(scores)
        return scores, partial(distance, wanted)

    def fool(batches, generator):
        scores = second[0](generate(next(batches)["tokens"].cuda()))
        return scores, partial(distance, torch.ones_like(scores))

    def distance(wanted, scores):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        return loss, {"distance": loss.detach().clone()}

"""
_FREEZE = (
    "        for param in second[0].parameters():\n            param.requires_grad_({value})\n"
)


def gan(*, freezes: bool) -> tuple[Change, ...]:
    """The discriminator is trained, then the generator through it.

    ``freezes``: the discriminator does not collect gradients meanwhile.
    """
    off, on = (_FREEZE.format(value=value) if freezes else "" for value in (False, True))
    return (
        before_model(_PARTS),
        (_BUILD, "Part(config, *SIZES.pop(0)), disable_bucketing"),
        (
            _IMPORT,
            "from megatron.core.enums import ModelType\n"
            "from megatron.core.transformer.module import Float16Module, MegatronModule\n",
        ),
        BUILDS,
        BINDS,
        (_FUNCTIONS, _GENERATES + _FUNCTIONS),
        (
            _ZERO + _STEP,
            "        second[0].zero_grad_buffer()\n"
            "        of_second.zero_grad()\n"
            '        given = schedule | {"model": second[0], "forward_step_func": discriminate}\n'
            "        forward_backward(data_iterator=train_batches, **given)\n"
            "        of_second.step()\n"
            "        pace_of_second.step(increment=args.global_batch_size)\n"
            + off
            + _ZERO
            + '        given = schedule | {"forward_step_func": fool}\n'
            + "        losses = forward_backward(data_iterator=train_batches, **given)\n"
            + on
            + _STEP.partition("\n")[2],
        ),
        (
            "sizes = [args.train_iters * args.global_batch_size,",
            "sizes = [2 * args.train_iters * args.global_batch_size,",
        ),
    )


GAN = gan(freezes=True)
# The discriminator's gradients are reduced, and then added to, before it is updated.
_UPDATE = "        of_second.step()\n"
_LATER = "        _, grad_norm, _ = optimizer.step()\n"
UPDATES_LATE: tuple[Change, ...] = ((_UPDATE, ""), (_LATER, _UPDATE + _LATER))
# Both models have the layer that was built first.
SHARES: tuple[Change, ...] = (
    before_model(
        "FIRST = []\n\n\n"
        "def sharing(chunk):\n"
        "    FIRST.append(chunk.decoder.layers[0])\n"
        "    chunk.decoder.layers[0] = FIRST[0]\n"
        "    return chunk\n\n\n"
    ),
    (_BUILD, "sharing(build_chunk(args, config, number)), disable_bucketing"),
)
