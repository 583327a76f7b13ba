"""Runs `regression.safetensors`, which `rolecall export examples/regression.py --format safetensors` writes, without
Rolecall: the module of that shape is built here.
"""

# region load
import torch
from safetensors.torch import load_file

model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model.load_state_dict(load_file("regression.safetensors"))
values = model(torch.tensor([[1.0, 0.5], [0.5, 2.0]]))
# endregion
print(values)
