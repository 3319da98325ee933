"""The same with PyTorch's DDP: `torchrun --nproc-per-node 2 examples/ddp/ddp.py`."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gossamer import make_task

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = make_task("digits-mlp")
data = TensorDataset(digits.train.inputs, digits.train.targets)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DistributedDataParallel(digits.make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(12):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

right = model(digits.test.inputs).argmax(1) == digits.test.targets
if dist.get_rank() == 0:
    print(f"accuracy {100 * right.float().mean():.1f} %")
dist.destroy_process_group()
