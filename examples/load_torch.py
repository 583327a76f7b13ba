"""Runs `regression.pt2`, which `rolecall export examples/regression.py --format torch` writes, without Rolecall."""

# region load
import torch

model = torch.export.load("regression.pt2").module()
with torch.no_grad():
    values = model(torch.tensor([[1.0, 0.5], [0.5, 2.0]]))
print(values)
# endregion
