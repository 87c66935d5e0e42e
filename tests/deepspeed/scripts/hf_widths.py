"""A transformers.Trainer whose callback, loss and log follow the number of workers.

Lines that have to be told are marked. What each process counted goes to widths-RANK-PID.json beside
the configuration: samples by the width, and the means of the losses by the job.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist
from transformers import Trainer, TrainerCallback, set_seed
from transformers.trainer_pt_utils import distributed_concat

import elaswave_plugin.deepspeed

sys.path.append(str(Path(__file__).parent))
from hf_trainer import TextDataset, build_model, collate, parse_arguments, training_arguments


class Samples(TrainerCallback):
    """Counts samples as callbacks do, and by a width from before the loop."""

    def __init__(self):
        self.each = self.once = self.width = self.by_state = self.by_trainer = 0
        self.trainer = None

    def on_train_begin(self, args, state, control, **given):
        """Ask once."""
        self.width = args.world_size

    def on_step_end(self, args, state, control, **given):
        """Ask each time."""
        own = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.each += own * args.world_size  # told: world_size
        self.once += own * self.width
        self.by_state += own * args.distributed_state.num_processes  # told: num_processes
        whole = self.trainer.get_total_train_batch_size(args)  # told: get_total_train_batch_size
        self.by_trainer += whole


class Means(Trainer):
    """Takes means over the workers of its losses."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.by_job, self.by_accelerate = [], []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean of a batch."""
        loss = super().compute_loss(model, inputs)
        own, step = loss.detach(), self.state.global_step
        if model.training:
            mean = elaswave_plugin.deepspeed.mean(self.model_wrapped, own)
            other = self.accelerator.reduce(own, "mean")  # told: reduce
            sums = own.clone()
            dist.all_reduce(sums)  # told: all_reduce
            several = self.accelerator.num_processes  # told: num_processes
            listed = distributed_concat(own[None])  # told: distributed_concat
            assert len(listed) == several
            assert abs(float(sums) / several - float(other)) < 1e-5
            self.by_job.append((step, float(mean)))
            self.by_accelerate.append((step, float(other)))
        return loss


def main():
    """Train."""
    args = parse_arguments()
    place = Path(args.deepspeed_config).parent
    set_seed(7)
    model = build_model(Namespace(num_layers=2, hidden_size=64, seq_length=32))
    samples = Samples()
    trainer = Means(
        model=model,
        args=training_arguments(args, place / "trainer"),
        train_dataset=TextDataset(None, 32, args.limit),
        data_collator=collate,
        callbacks=[samples],
    )
    samples.trainer = trainer
    trainer.train()
    found = {"each": samples.each, "once": samples.once}
    found |= {"by_state": samples.by_state, "by_trainer": samples.by_trainer}
    found |= {"by_job": trainer.by_job, "by_accelerate": trainer.by_accelerate}
    name = f"widths-{dist.get_rank()}-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
