"""How fast `ps` is with any number of trainers and servers: closed formulas, fed with the costs that `costs_ps`
measures. `scale_simulation` checks them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolecall.wire.connecting import Kind

COSTS = Path(__file__).with_name("costs_ps.json")


@dataclass(frozen=True)
class MessageCosts:
    """Seconds of one processor for a message, which is a call and its answer, by one kind of connection."""

    call_s: float  # without tensors, at its caller
    serve_s: float  # the same, at the called process
    tensor_s: float  # a tensor more in it, at either end
    send_byte_s: float
    receive_byte_s: float


@dataclass(frozen=True)
class Costs:
    """Seconds of one processor."""

    messages: dict[Kind, MessageCosts]  # by the kind of connection between two workers
    apply_s: float  # an element of one gradient joins the mean
    step_s: float  # an element's optimizer step
    ledger_s: float  # a gradient, at the lead
    ledger_trainer_s: float  # sync: for each trainer that the ledger knows, again for each gradient
    order_key_s: float  # a gradient that an order names, at the lead for each server
    complete_key_s: float  # a gradient in a server's report, at the lead: to unpickle it
    arrived_key_s: float  # the same: to count it

    @staticmethod
    def load(path: Path = COSTS) -> Costs:
        """The costs that were measured."""
        costs = json.loads(path.read_text())["costs"]
        return Costs(**{**costs, "messages": {kind: MessageCosts(**each) for kind, each in costs["messages"].items()}})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """A cluster and what it trains. Links are full duplex; `inf` for one that is not there."""

    trainers: int
    servers: int
    parameters: int
    mode: str = "sync"  # or async
    compute_s: float = 0.0  # from parameters to a gradient; of `local`, all its inner steps
    overlap: bool = False  # computes on while its gradient travels, as `local` does
    bytes_each: float = 4.0  # of a parameter on the wire, either way
    link_bits_s: float = float("inf")
    delay_s: float = 0.0  # one way
    connection: Kind = "tls"
    parts: int = 1  # that a server's share travels in
    server_cores: int = 0  # that all servers share; 0: each has its own
    trainer_cores: int = 0

    @property
    def share(self) -> float:
        """Bytes of one server's share of a gradient."""
        return self.parameters / self.servers * self.bytes_each


@dataclass(frozen=True)
class Work:
    """Seconds that one push occupies each kind of queue, one report of a server to the lead, and one update."""

    trainer: float
    link: float  # of a server, each way; a trainer's carries all shares, of one push
    trainer_link: float
    server_in: float
    server_out: float
    report_out: float  # a report, at the server; the lead makes itself none
    report_in: float  # the same, at the lead
    key_in: float  # a gradient in a report, at the lead
    ledger: float  # a gradient, at the lead
    order: float  # at the lead, for all other servers
    update: float  # at a server: one update of as many gradients

    @staticmethod
    def of(costs: Costs, plan: Plan) -> Work:
        """The work of `plan`: of async an update is one gradient."""
        c, m, others = costs, costs.messages[plan.connection], plan.servers - 1
        gradients = plan.trainers if plan.mode == "sync" else 1
        elements, message = plan.parameters / plan.servers, 8 * plan.share / plan.link_bits_s
        return Work(
            trainer=plan.servers * (plan.parts * (m.call_s + 2 * m.tensor_s)
                                    + plan.share * (m.send_byte_s + m.receive_byte_s)),
            link=message, trainer_link=plan.servers * message,
            server_in=plan.parts * (m.serve_s + m.tensor_s) + plan.share * m.receive_byte_s,
            server_out=plan.parts * m.tensor_s + plan.share * m.send_byte_s,
            report_out=m.call_s * (others > 0), report_in=m.serve_s, key_in=c.complete_key_s + c.arrived_key_s,
            ledger=c.ledger_s + (c.ledger_trainer_s * plan.trainers if plan.mode == "sync" else 0.0),
            order=others * (m.call_s + gradients * c.order_key_s),
            update=elements * (gradients * c.apply_s + c.step_s),
        )  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """Pushes a second of all trainers together, and what limits them."""

    pushes_per_s: float
    limit: str
    update_s: float  # sync: from one update to the next


def formula(costs: Costs, plan: Plan) -> Rate:
    """The closed formulas. Of sync: the busiest queue's work on all trainers' pushes, both ways, and what nothing
    overlaps with: the computation, the last trainer's way up, the reports that are under way then and its own, the
    orders, the update, the delays. While the last trainers are answered, the first ones push again, so both directions
    of a link are busy at the same time. Of async, where pushes come one by one: the busiest queue, with one report of
    each server for each. Neither is faster than a push that meets no queue.
    """
    w, n = Work.of(costs, plan), plan.trainers
    server = w.server_in + w.server_out + w.report_out + w.update
    once = (plan.servers - 1) * w.report_in  # the lead, for one report of each other server
    alone = w.trainer + 2 * w.trainer_link + server + once + lead_in(w, plan) + w.order + 4 * plan.delay_s
    if plan.mode == "sync":
        crowd = _crowd(plan.server_cores, plan.servers)
        flows = {"trainers' processors": w.trainer * _crowd(plan.trainer_cores, n), "trainers' links": w.trainer_link,
                 "servers' links": n * w.link, "servers' processors": n * (w.server_in + w.server_out) * crowd,
                 "the lead": n * (lead_in(w, plan) + w.server_in + w.server_out)}  # fmt: skip
        count = reports(w, plan, max(flows.values()) - flows["the lead"])
        flows["the lead"] += count * once
        flows["servers' processors"] += count * w.report_out * crowd
        limit = max(flows, key=lambda name: flows[name])
        after = {limit: flows[limit], "the last reports": min(n, 2) * once, "the lead's orders": w.order,
                 "the update": w.update * crowd}  # fmt: skip
        last = w.trainer / 2 + w.trainer_link if n > 1 else 0.0
        travel = max(sum(after.values()) + last + 4 * plan.delay_s, alone)
        seconds = max(plan.compute_s, travel) if plan.overlap else plan.compute_s + travel
        limit = max(after, key=lambda name: after[name])
        return Rate(n / seconds, "computation" if plan.compute_s >= after[limit] else limit, seconds)
    busy = {"trainers' processors": w.trainer / (plan.trainer_cores or n), "trainers' links": w.trainer_link / n,
            "servers' links": w.link, "servers' processors": server * _crowd(plan.server_cores, plan.servers),
            "the lead": once + lead_in(w, plan) + w.order + server - w.report_out,
            "computation": plan.compute_s / n}  # fmt: skip
    alone = max(alone, plan.compute_s) if plan.overlap else alone + plan.compute_s
    limit = max(busy, key=lambda name: busy[name])
    if alone / n > busy[limit]:
        return Rate(n / alone, "the round trip", 0.0)
    return Rate(1 / busy[limit], limit, 0.0)


def lead_in(w: Work, plan: Plan) -> float:
    """Seconds of the lead for one gradient, without the messages that report it."""
    return (plan.servers - 1) * w.key_in + w.ledger


def reports(w: Work, plan: Plan, idle: float) -> float:
    """How many reports each server makes in an update of sync where the lead has `idle` seconds for them: with all
    gradients at least, one for each at most.
    """
    once = (plan.servers - 1) * w.report_in
    return min(plan.trainers, max(1.0, idle / once)) if once else 0.0


def _crowd(cores: int, users: int) -> float:
    """How many times longer something takes that `users` do at the same time on `cores`; 0: each has its own."""
    return users / cores if cores else 1.0
