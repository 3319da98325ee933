"""The same with any of Gossamer's methods, under whatever starts it:

gossamer run -n 2 --method pull_gossip examples/ddp/coupled.py
torchrun --nproc-per-node 2 examples/ddp/coupled.py
mpirun -n 2 python examples/ddp/coupled.py
python examples/ddp/coupled.py
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer import make_task

torch.manual_seed(0)
digits = make_task("digits-mlp")
data = TensorDataset(digits.train.inputs, digits.train.targets)
loader = DataLoader(data, batch_size=16, shuffle=True)
model = digits.make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with gossamer.join(model, optimizer, method="ad_psgd") as worker:
    batches = worker.shard(loader)
    for _ in range(12):
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            worker.step()

right = model(digits.test.inputs).argmax(1) == digits.test.targets
if worker.is_main:
    print(f"accuracy {100 * right.float().mean():.1f} %")
