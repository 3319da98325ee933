"""A small training on one process: `python examples/ddp/plain.py`."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gossamer import make_task

torch.manual_seed(0)
digits = make_task("digits-mlp")
data = TensorDataset(digits.train.inputs, digits.train.targets)
loader = DataLoader(data, batch_size=16, shuffle=True)
model = digits.make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(12):
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

right = model(digits.test.inputs).argmax(1) == digits.test.targets
print(f"accuracy {100 * right.float().mean():.1f} %")
