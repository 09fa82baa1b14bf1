import torch
from torch import nn

import gpipe

model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
pipe = gpipe.GPipe(model, balance=[2, 1], chunks=4)  # a GPU a stage, or CPU workers
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001)
output = pipe(torch.randn(20, 10))
loss = nn.functional.mse_loss(output, torch.randn(20, 5, device=output.device))
loss.backward()
optimizer.step()
print(f"loss {loss.item():.3f}")
