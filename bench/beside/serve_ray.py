"""A served model, by Ray Serve, whose proxy takes the requests."""

import torch
from ray import serve
from starlette.requests import Request
from torch import nn


@serve.deployment(num_replicas=3)
class Model:
    def __init__(self):
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    async def __call__(self, request: Request):
        rows = torch.tensor(await request.json(), dtype=torch.float)
        with torch.inference_mode():
            return self.network(rows)[:, 0].tolist()


serve.run(Model.bind(), route_prefix="/predict", blocking=True)
