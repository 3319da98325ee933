"""An Accelerate loop: `gossamer run -n 2 examples/integrations/accelerate_loop.py`.

It clips and accumulates as it does alone: one exchange to four batches.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.accelerate import JoinedAccelerator

torch.manual_seed(0)
inputs = torch.randn(256, 10)
data = TensorDataset(inputs, inputs[:, :3].argmax(1))
loader = DataLoader(data, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.5)

accelerator = JoinedAccelerator(
    method=sys.argv[1] if sys.argv[1:] else "all_reduce",
    cpu=True, gradient_accumulation_steps=4,
)  # fmt: skip
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
norms = []
for _ in range(2):
    for batch, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.25)
                squares = [p.grad.square().sum() for p in model.parameters()]
                norms.append(float(sum(squares).sqrt()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
accelerator.end_training()
loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
worker = accelerator.worker
steps = worker.observer.metrics.workers[worker.rank].steps
norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
print(
    f"worker {gossamer.rank()} of {gossamer.size()}: {steps} steps, gradients of at most "
    f"{max(norms):.4f}, loss {loss:.4f}, model {norm:.9f}"
)
