"""A served model: `rolecall run examples/serve.py --models 3`, then `curl -d '[[1, 2]]' localhost:8080/predict`. Rank 0
hands each request to the model with the fewest. Models may die, join and leave; POST /replace replaces all in turn."""

import asyncio

import torch
from aiohttp import web
from torch import nn

from rolecall import Context, Job, PeerLostError, Role, Settings, remote


class Serve(Settings):
    models: int = 3
    http_port: int = 8080


class Model:
    def __init__(self, context: Context[Serve]) -> None:  # before it joins: it answers at once when it is called
        torch.manual_seed(0)  # load a checkpoint here
        self.network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    @remote(idempotent=True)  # called again at another model, if this one is lost
    def predict(self, rows: list[list[float]]) -> list[float]:
        with torch.inference_mode():
            return self.network(torch.tensor(rows, dtype=torch.float).reshape(-1, 2))[:, 0].tolist()


async def serve(context: Context[Serve]) -> None:
    async def predict(request: web.Request) -> web.Response:
        try:
            rows = [[float(x), float(y)] for x, y in await request.json()]
        except (ValueError, TypeError, OverflowError) as error:
            return web.Response(text=f"send rows of two numbers, such as [[1, 2]]: {error}\n", status=400)
        while True:
            try:
                return web.json_response(await context.call_any(Model.predict, rows))
            except PeerLostError:  # no model is left at this moment
                await asyncio.sleep(0.1)

    async def replace(_: web.Request) -> web.Response:
        for peer in (peers := context.peers("model")):
            context.replace(peer)
            async with asyncio.timeout(60):  # a role that is scaled down meanwhile has fewer for good
                while len(context.peers("model")) < len(peers):
                    await asyncio.sleep(0.1)
        return web.Response(text=f"{len(peers)} replaced\n")

    async def ready(_: web.Request) -> web.Response:
        count = 0 if context.draining else len(context.peers("model"))
        return web.Response(text=f"{count} models\n", status=200 if count else 503)

    app = web.Application()
    app.add_routes([web.post("/predict", predict), web.post("/replace", replace), web.get("/ready", ready)])
    await (runner := web.AppRunner(app, access_log=None, shutdown_timeout=10)).setup()
    # this machine only: /replace asks for no password
    await web.TCPSite(runner, "127.0.0.1", context.settings.http_port).start()
    context.start(0)
    await asyncio.to_thread(context.await_drain)  # Ctrl-C, SIGTERM
    await runner.cleanup()  # no new requests; those under way are answered


ROLES = [Role("router", lambda context: asyncio.run(serve(context))), Role("model", Model, count="models", minimum=1)]
JOB = Job(ROLES, settings=Serve, steps=False)
