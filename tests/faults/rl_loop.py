"""A loop in the shape of verl's and slime's: a rollout in memory, log-probs, mini-batches."""

from dataclasses import dataclass
from pathlib import Path

from tests.faults import own_loop, own_scripts
from tests.faults.harness import JobSpec
from tests.faults.own_scripts import Change, before_model

# Rollouts have 5 and 6 micro-batches by turns, of one or two samples each; two are the first step.
FIRST, MICROBATCHES = 2, (5, 6)

_FUNCTIONS = '''\
def rollout(number, replica):
    """Samples as a generation gives them, and which of them are a micro-batch."""
    draws = torch.Generator().manual_seed(1000 * number + replica)
    drawn = lambda least, most: int(torch.randint(least, most, (), generator=draws))
    samples, parts = {"tokens": [], "advantage": [], "old": []}, []
    for _ in range(5 + number % 2):
        parts.append([])
        for _ in range(drawn(1, 3)):
            parts[-1].append(len(samples["tokens"]))
            samples["tokens"].append(torch.randint(256, (drawn(6, 20),), generator=draws))
            samples["advantage"].append(drawn(-9, 9) / 9)
            samples["old"].append(None)
    return samples, parts


class Reader:
    """Reads micro-batches by their keys, and has an offset: no iterator of Python's."""

    def __init__(self, samples, parts):
        self.samples, self.parts, self.offset = samples, parts, 0

    def get_next(self, keys):
        part = self.parts[self.offset]
        self.offset += 1
        return {key: [self.samples[key][one] for one in part] for key in keys}

    def reset(self):
        self.offset = 0


def batches_of(reader, keys, count):
    return [reader.get_next(keys) for _ in range(count)]


def read(reader, keys):
    return reader.get_next(keys) if hasattr(reader, "get_next") else next(reader)


def losses_of(batch, model):
    length = 8 * -(-max(map(len, batch["tokens"])) // 8)
    tokens = torch.zeros(len(batch["tokens"]), length, dtype=torch.long)
    for row, one in zip(tokens, batch["tokens"]):
        row[: len(one)] = one
    positions = torch.arange(length).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1))


def of_samples(batch, losses):
    return [-row[: len(one) - 1] for row, one in zip(losses.float(), batch["tokens"])]


def log_prob_step(reader, model):
    batch = read(reader, ["tokens"])

    def report(losses):
        return losses.sum(), {"log_probs": of_samples(batch, losses)}

    return losses_of(batch, model), report


def policy_step(reader, model):
    batch = read(reader, ["tokens", "old", "advantage"])

    def loss_of(losses):
        new = of_samples(batch, losses)
        ratios = [(one - old).exp().mean() for one, old in zip(new, batch["old"])]
        gains = [ratio * gain for ratio, gain in zip(ratios, batch["advantage"])]
        loss = -sum(gains) / len(gains)
        return loss, {"loss": [float(loss), 1.0], "ratios": torch.stack(ratios).detach()}

    return losses_of(batch, model), loss_of


'''
_LOOP = """\
    del schedule["num_microbatches"], schedule["forward_step_func"]
    replica = parallel_state.get_data_parallel_rank()
    for iteration in range(args.train_iters):
        if iteration % 2 == 0:
            samples, parts = rollout(iteration // 2, replica)
            reader = Reader(samples, parts)
            with torch.no_grad():
                model[0].eval()
                reports = forward_backward(
                    data_iterator={log_probs},
                    forward_step_func=log_prob_step,
                    num_microbatches=len(parts),
                    forward_only=True,
                    **schedule,
                )
                model[0].train()
            samples["old"] = [one for report in reports for one in report["log_probs"]]
            reader.reset()
        count = 2 if iteration % 2 == 0 else len(parts) - 2
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            data_iterator={training},
            forward_step_func=policy_step,
            num_microbatches=count,
            **schedule,
        )
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        ratios = [float(one).hex() for report in reports for one in report["ratios"]]
        print(f"ratios {{replica}} {{iteration}} {{' '.join(ratios)}}\\n", end="", flush=True)


"""
READERS = {
    "get_next": ("[reader]", "[reader]"),
    "lists": (
        'iter(batches_of(reader, ["tokens"], len(parts)))',
        'iter(batches_of(reader, ["tokens", "old", "advantage"], count))',
    ),
    "generators": (
        "(reader.get_next(['tokens']) for _ in parts)",
        "(reader.get_next(['tokens', 'old', 'advantage']) for _ in range(count))",
    ),
}


_OLD = '            samples["old"] = '
_LOOKS = "    del schedule"
# A second model without an optimizer, whose log-probabilities change the advantages.
REFERENCE: tuple[Change, ...] = (
    (_LOOKS, "    torch.manual_seed(7)\n    reference = build_model(args)[0].eval()\n" + _LOOKS),
    (
        _OLD,
        """\
            reader.reset()
            with torch.no_grad():
                told = forward_backward(
                    data_iterator=[reader],
                    forward_step_func=log_prob_step,
                    num_microbatches=len(parts),
                    forward_only=True,
                    **{**schedule, "model": reference},
                )
            told = [one for report in told for one in report["log_probs"]]
            gains = zip(samples["advantage"], told)
            samples["advantage"] = [gain - float(one.mean()) for gain, one in gains]
"""
        + _OLD,
    ),
)


# Batches of classes of the script's own, one like a dict, with samples that are dataclasses.
_READS = "        return {key: [self.samples[key][one] for one in part] for key in keys}\n"
CLASSES: tuple[Change, ...] = (
    before_model(
        """\
import collections, dataclasses


class Rows(collections.UserDict):
    def __init__(self, rows, *, count):
        super().__init__(rows)
        self.count = count


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    tokens: torch.Tensor

    def __len__(self):
        return len(self.tokens)


"""
    ),
    (
        _READS,
        _READS.replace("return", "rows =")
        + """\
        rows["tokens"] = [Sample(one) for one in rows["tokens"]]
        return Rows(rows, count=len(part))
""",
    ),
    ("        row[: len(one)] = one\n", "        row[: len(one)] = one.tokens\n"),
)


# A loop that trains on samples with old log-probabilities, as from a file: it evaluates nothing.
_OF_A_FILE = "torch.full((len(samples['tokens'][-1]) - 1,), -5.5)"
UNEVALUATED: tuple[Change, ...] = (
    (
        '            samples["old"].append(None)\n',
        f'            samples["old"].append({_OF_A_FILE})\n',
    ),
    ("            with torch.no_grad():\n", "            if samples['old'][0] is None:\n"),
    (_OLD + "[one for", "    " + _OLD + "[one for"),
)
# What an evaluation returns that is too large to be kept.
LARGE: Change = (
    '{"log_probs": of_samples(batch, losses)}',
    '{"log_probs": of_samples(batch, losses), "all": torch.zeros(1 << 17)}',
)


# Stages tell each other tensors of one size, and only the last one has log-probabilities.
STAGES: tuple[Change, ...] = (
    ("        for _ in range(drawn(1, 3)):\n", "        for _ in range(1):\n"),
    ('8 * -(-max(map(len, batch["tokens"])) // 8)', "32"),
    (
        _OLD + '[one for report in reports for one in report["log_probs"]]\n',
        _OLD + '[one for report in reports for one in report["log_probs"]]\n'
        '            samples["old"] = samples["old"] or [None] * len(parts)\n',
    ),
)


# Each token weighs the same, however many a replica has.
PER_TOKEN: tuple[Change, ...] = (
    (
        "        return loss, {",
        "        tokens = sum(map(len, new))\n"
        "        return loss * tokens, torch.tensor(tokens, dtype=torch.int), {",
    ),
)


# Between two phases nothing of the model and its optimizer is on the device, as verl and ROLL do
# it: weights are in a copy of the host's, masters and moments in other tensors. What computes
# log-probabilities has the weights alone.
_ROLLS = "            samples, parts = rollout(iteration // 2, replica)\n"
_TRAINS = "        count = 2 if"
_SLEEPS = """\
def sleep(model, optimizer):
    for buffer in (one for chunk in model for one in chunk.buffers):
        buffer.param_data.on_host = buffer.param_data.detach().cpu().clone()
        for name in ("param_data", "grad_data"):
            storage = getattr(buffer, name).untyped_storage()
            setattr(buffer, f"bytes_of_{name}", storage.nbytes())
            storage.resize_(0)
    before = [one.untyped_storage()._weak_ref() for one in parts_of(optimizer)]
    move_optimizer(optimizer, "cpu")
    freed = sum(map(torch.UntypedStorage._expired, before))
    print(f"freed {freed} of {len(before)}\\n", end="")


def parts_of(optimizer):
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from (one for one in sum(part.shard_fp32_from_float16_groups, []) if one is not None)
        for state in part.optimizer.state.values():
            yield from (state[one] for one in ("exp_avg", "exp_avg_sq") if one in state)


def move_optimizer(optimizer, device):
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for main in sum(part.shard_fp32_from_float16_groups, []):
            if main is not None:
                main.data = main.data.to(device, copy=True)
        for state in part.optimizer.state.values():
            for name in {"exp_avg", "exp_avg_sq"} & state.keys():
                state[name] = state[name].to(device, copy=True)


def wake(model, name):
    for buffer in (one for chunk in model for one in chunk.buffers):
        data = getattr(buffer, name)
        if data.untyped_storage().nbytes() == 0:
            data.untyped_storage().resize_(getattr(buffer, f"bytes_of_{name}"))
            if name == "param_data":
                with torch.no_grad():
                    data.copy_(data.on_host)
            else:
                data.zero_()


"""
OFFLOAD: tuple[Change, ...] = (
    before_model(_SLEEPS),
    (
        _ROLLS,
        "            sleep(model, optimizer)\n"
        + _ROLLS
        + "            wake(model, 'param_data')\n",
    ),
    (
        _TRAINS,
        "        if iteration % 2 == 0:\n"
        "            wake(model, 'grad_data')\n"
        "            move_optimizer(optimizer, model[0].buffers[0].param_data.device)\n" + _TRAINS,
    ),
)
# A worker that is lost in the second rollout; the others have weights by the time they find out.
LOST_IN_ROLLOUT: Change = (
    _ROLLS,
    _ROLLS + '            if (iteration, os.environ["ELASWAVE_SLOT"]) == (2, "1"):\n'
    "                os.kill(os.getpid(), 9)\n",
)
LONG_ROLLOUTS: Change = (_ROLLS, _ROLLS + '            os.system("sleep 0.3")\n')
# All meet while they have none.
MEETING: Change = (
    "            wake(model, 'param_data')\n",
    "            torch.distributed.barrier()\n            wake(model, 'param_data')\n",
)


def write(folder: Path, reads: str, *more: Change) -> str:
    """The path of such a script, which gives its batches in one of these ways."""
    log_probs, training = READERS[reads]
    loop = _LOOP.format(log_probs=log_probs, training=training)
    changes = (*own_loop.changes(), before_model(_FUNCTIONS), (own_loop.LOOP, loop), *more)
    return own_scripts.write(folder, *changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec(JobSpec):
    """A job of such a script, over four replicas or less."""

    replicas: int = 4

    @property
    def batches(self) -> list[int]:
        """Micro-batches of each step, which count as samples."""
        counts = (
            MICROBATCHES[step // 2 % 2] - FIRST if step % 2 else FIRST for step in range(self.steps)
        )
        return [count * self.replicas for count in counts]
