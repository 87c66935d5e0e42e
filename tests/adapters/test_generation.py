"""Samples that a Trainer generates: shares of any size, in order, whole."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("trl")

from trl.trainer.utils import split_tensor_dict

from elaswave_plugin.adapters.deepspeed.hf_trainer import generation
from elaswave_plugin.adapters.deepspeed.hf_trainer.generation import Generation
from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob
from elaswave_plugin.adapters.deepspeed.hf_trainer.pieces import intervals, sizes, weight
from elaswave_plugin.errors import ConfigurationError, EpochChanged

ACCUMULATION = 2
# By rank: after the loss of worker 1, the last one has its rank.
SLOTS, LENGTHS = (0, 3, 2), (3, 2, 3)


class Job(TrainerJob):
    """As much of a job as is asked: worker 3 of those that are left."""

    is_as_launched = False
    generated = 3, 8

    def __init__(self) -> None:
        self._engine = SimpleNamespace(device="cpu")
        self._worker: Any = SimpleNamespace(slot=3, view=SimpleNamespace(ranks=SLOTS))


def generating(**trainer: Any) -> Generation:
    """As much of it as does not ask the job."""
    made = Generation.__new__(Generation)
    made._job, made._trainer = Job(), SimpleNamespace(**trainer)
    return made


def test_micro_batches_of_any_share_weigh_as_their_samples() -> None:
    """The mean over workers and micro-batches of weighted means is that over all samples."""
    rewards = [0.5, 2.0, 3.0, 1.0, 4.0, 0.25, 6.0, 1.5]
    for shares in ((2, 2, 2, 2), (3, 3, 2), (5, 3)):
        total, first = 0.0, 0
        for size in shares:
            mine = first, first + size
            own = rewards[slice(*mine)]
            for number, cut in enumerate(intervals(sizes(*mine, ACCUMULATION))):
                piece = own[slice(*cut)]
                share = size * len(shares) / len(rewards)
                factor = share * weight(number, *mine, pieces=ACCUMULATION)
                total += factor * sum(piece) / len(piece) / ACCUMULATION
            first += size
        assert total / len(shares) == pytest.approx(sum(rewards) / len(rewards))


def test_no_sample_of_a_share_is_dropped() -> None:
    samples = {
        "advantages": torch.arange(5),
        "prompts": [*"abcde"],
        "items": torch.tensor(7),
        "images": None,
    }
    ours = generating().split(split_tensor_dict, samples, 2)
    assert [one["advantages"].tolist() for one in ours] == [[0, 1], [2, 3, 4]]
    assert [one["prompts"] for one in ours] == [["a", "b"], ["c", "d", "e"]]
    assert all(int(one["items"]) == 7 and one["images"] is None for one in ours)
    natives = split_tensor_dict(samples, 2)
    assert sum(len(one["advantages"]) for one in natives) == 4


def test_each_worker_has_the_advantages_of_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [torch.tensor([length]) for length in LENGTHS]
    monkeypatch.setattr(generation, "gathered_pieces", lambda mine: pieces)
    everyone = [float(number) for number in range(sum(LENGTHS))]
    logs: dict[str, Any] = {"advantages": [9.0]}

    def native(inputs: Any) -> dict[str, torch.Tensor]:
        logs["advantages"].extend(everyone)
        # The slice of equal shares, by rank.
        return {"advantages": torch.tensor(everyone[2:4])}

    generation_of_two = generating(_logs=logs, model=SimpleNamespace(training=True))
    generation_of_two.pieces = ACCUMULATION
    made = generation_of_two._in_order(native, ["a prompt", "a prompt"])
    assert made["advantages"].tolist() == [6.0, 7.0]
    assert logs["advantages"] == [9.0, *everyone]


def test_what_workers_have_follows_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [torch.tensor([0, 1, 2]), torch.tensor([6, 7]), torch.tensor([3, 4, 5])]
    monkeypatch.setattr(generation, "gathered_pieces", lambda own: pieces)
    made = generating()
    assert made.gather(lambda tensor: tensor, pieces[1]).tolist() == [*range(8)]
    texts = [["a", "b"], ["e"], ["c", "d"]]
    assert made.gather_object(lambda mine: texts, texts[1]) == [*"abcde"]


def test_a_generation_that_a_loss_interrupts_leaves_the_model_as_it_was() -> None:
    model = SimpleNamespace(is_gradient_checkpointing=True, training=False)
    model.gradient_checkpointing_enable = lambda given: vars(model).update(again=given)
    args = SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False})

    def native(inputs: Any) -> Any:
        model.is_gradient_checkpointing = False
        raise EpochChanged(2)

    made = generating(model=model, args=args)
    made._in_order = lambda native, inputs: native(inputs)
    with pytest.raises(EpochChanged):
        made._generate(native, [])
    assert model.again == {"use_reentrant": False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_vllm": True}, "use_vllm is True"),
        ({"environment_factories": {"a": 1}}, "environment_factories is"),
        ({"gathers": False}, "ds3_gather_for_generation is False"),
        ({"eval_dataset": {"short": iter(())}}, "iterable dataset"),
    ],
)
def test_what_is_not_carried_is_refused(changes: dict[str, Any], words: str) -> None:
    from trl import GRPOTrainer

    args = SimpleNamespace(
        steps_per_generation=2,
        num_iterations=1,
        gradient_accumulation_steps=2,
        ds3_gather_for_generation=changes.pop("gathers", True),
    )
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    vars(trainer).update({"args": args, "train_dataset": [], "eval_dataset": None, **changes})
    with pytest.raises(ConfigurationError, match=words):
        generation._check(trainer, 3)


def test_trainers_that_generate_are_known_by_their_buffer() -> None:
    from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

    sources = [inspect.getsource(one.__init__) for one in (GRPOTrainer, RLOOTrainer, DPOTrainer)]
    assert ["self._buffered_inputs = " in one for one in sources] == [True, True, False]


def test_a_trainer_that_generates_in_its_own_way_is_refused() -> None:
    from trl import GRPOTrainer

    class Own(GRPOTrainer):
        """Generates otherwise."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return inputs

    trainer = Own.__new__(Own)
    trainer.args = None
    with pytest.raises(ConfigurationError, match="wanted _generate_and_score_completions"):
        generation._check(trainer, 3)
