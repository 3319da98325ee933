"""Hugging Face's Trainer: `gossamer run -n 2 examples/integrations/hf_trainer.py`.

It clips and accumulates as it does alone: one exchange to four batches.
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import gossamer
from gossamer.integrations.transformers import JoinedTrainer

torch.manual_seed(0)
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)
tokens = (torch.arange(8) + torch.arange(128).unsqueeze(1)) % 16
data = [{"input_ids": row, "labels": row} for row in tokens]


class Watch(TrainerCallback):
    """Looks at the gradient that a step is made with."""

    norms: list[float] = []  # noqa: RUF012

    def on_pre_optimizer_step(self, args, state, control, model=None, **named):  # noqa: ANN001, ANN003, ANN201
        """After clipping."""
        squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(sum(squares).sqrt()))


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2,
        gradient_accumulation_steps=4, max_grad_norm=0.25, save_strategy="no", report_to="none",
        eval_strategy="epoch", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = JoinedTrainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data[:16],
        callbacks=[Watch()], method=sys.argv[1] if sys.argv[1:] else "all_reduce",
    )  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
steps = trainer.worker.observer.metrics.workers[trainer.worker.rank].steps
norm = sum(float(p.detach().double().square().sum()) for p in trainer.model.parameters())
print(
    f"worker {gossamer.rank()} of {gossamer.size()}: {steps} steps, gradients of at most "
    f"{max(Watch.norms):.4f}, loss {loss:.4f}, model {norm:.9f}"
)
