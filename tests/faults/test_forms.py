"""Forms that scripts have: a loader, an own model, timers, numbers by name; a loss, and equal."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.own_scripts import Change, before_model, write
from tests.proofs import Kind, Promise, proves

_TRAIN = "job.batches(train)"
_LOADER = "torch.utils.data.DataLoader({data}, batch_size=args.micro_batch_size, {options})"
# Without a layer of Megatron-Core's: an embedding and a head.
SMALL = '''class Small(MegatronModule):
    """Guesses a byte from the one before."""

    def __init__(self, config):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.table = torch.nn.Embedding(384, 64)
        self.drop = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(64, 384)

    def set_input_tensor(self, tensor):
        pass

    def forward(self, tokens, positions, mask, labels):
        logits = self.head(self.drop(self.table(tokens)))
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none"
        )
        return losses


'''
_BUILD = "build_chunk(args, config, number), disable_bucketing"
_STEP = "        losses = forward_backward(data_iterator=per_chunk(train_batches), **schedule)\n"
FORMS: dict[str, tuple[Change, ...]] = {
    "a loader that shuffles": (
        (_TRAIN, f"job.batches({_LOADER.format(data='train', options='shuffle=True')})"),
    ),
    "a loader with processes": (
        (
            _TRAIN,
            f"job.batches({_LOADER.format(data='train', options='shuffle=True, num_workers=2')})",
        ),
    ),
    # Its third step begins the second pass.
    "a loader shorter than the run": (
        (
            _TRAIN,
            "job.batches("
            + _LOADER.format(data="[train[i] for i in range(14)]", options="shuffle=True")
            + ")",
        ),
    ),
    "a model without a layer of Megatron-Core": (
        before_model(SMALL),
        (_BUILD, "Small(config), disable_bucketing"),
        (
            "from megatron.core.transformer.module import Float16Module\n",
            "from megatron.core.enums import ModelType\n"
            "from megatron.core.transformer.module import Float16Module, MegatronModule\n",
        ),
    ),
    "timers of its own": (
        (
            "    def train_step():\n",
            "    from megatron.core.timers import Timers\n\n"
            "    timers = Timers(2, 'minmax')\n"
            "    timers('all').start()\n\n"
            "    def train_step():\n",
        ),
        (_STEP, "        timers('step').start()\n" + _STEP + "        timers('step').stop()\n"),
    ),
    "no parser": (
        (
            "job = elaswave.attach(args)",
            "job = elaswave.attach(global_batch_size=args.global_batch_size, micro_batch_size=1,"
            " seed=args.seed)",
        ),
    ),
    "gradients that it never zeroes": (
        ("            chunk.zero_grad_buffer()", "            pass"),
    ),
    "no schedule, and gradients that it finalizes itself": (
        ("job.bind(model, optimizer, scheduler,", "job.bind(model, optimizer,"),
        ("    config.finalize_model_grads_func = finalize_model_grads\n", ""),
        (_STEP, _STEP + "        finalize_model_grads(model)\n"),
    ),
}


# Forms that train as another one does, or as the example itself.
LIKE = {
    "a loader with processes": FORMS["a loader that shuffles"],
    "timers of its own": (),
    "no parser": (),
    "gradients that it never zeroes": (),
    "no schedule, and gradients that it finalizes itself": (),
}


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:forward")
@pytest.mark.parametrize("form", FORMS)
def test_a_form_loses_a_worker_and_is_equal(
    run: Launch, reference: Reference, tmp_path: Path, form: str
) -> None:
    spec = JobSpec(nproc=3, global_batch=6, steps=5)
    own, like = (write(tmp_path, *one) for one in (FORMS[form], LIKE.get(form, FORMS[form])))
    killed = run(replace(spec, script=own, kills=("1@3:forward",)))
    check_equal(killed, reference(replace(spec, script=like)))


# Sample i is read in step i // 6, in the order of the data.
_ELSEWHERE = """class Elsewhere(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 1000

    def __getitem__(self, number):
        assert number < 18 or torch.utils.data.get_worker_info() is not None, number
        return self.data[number]


"""


@proves(Kind.NOTHING, Promise.SAME)
def test_processes_of_a_loader_read_from_the_fourth_step_on(run: Launch, tmp_path: Path) -> None:
    data = _LOADER.format(data="Elsewhere(train)", options="num_workers=2")
    script = write(tmp_path, before_model(_ELSEWHERE), (_TRAIN, f"job.batches({data})"))
    done = run(JobSpec(nproc=3, global_batch=6, steps=5, script=script))
    assert done.returncode == 0, done.output[-3000:]


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
def test_gradients_that_are_finalized_twice_are_refused(run: Launch, tmp_path: Path) -> None:
    script = write(tmp_path, (_STEP, _STEP + "        finalize_model_grads(model)\n"))
    refused = run(JobSpec(nproc=2, global_batch=4, script=script))
    assert refused.returncode == 2, refused.output[-3000:]
    assert "would add gradients up twice: delete that line" in refused.output
