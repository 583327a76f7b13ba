"""The formulas and the simulation of `ps` with many trainers and servers, which docs/scale.md shows."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from bench import costs_ps
from bench.growth_ps import layout
from bench.scale_model import Costs, MessageCosts, Plan, Work, formula
from bench.scale_simulation import Queue, Simulation
from rolecall.wire.connecting import Kind

PLAIN = MessageCosts(call_s=6e-5, serve_s=6e-5, tensor_s=2e-5, send_byte_s=3e-10, receive_byte_s=3e-10)
COSTS = Costs(
    messages={"unix": PLAIN, "tcp": PLAIN, "tls": replace(PLAIN, send_byte_s=1e-9, receive_byte_s=1e-9)},
    apply_s=5e-10,
    step_s=1e-9,
    ledger_s=2e-5,
    ledger_trainer_s=1e-7,
    order_key_s=2e-6,
    complete_key_s=2e-6,
    arrived_key_s=1e-6,
)
SMALL = Plan(20, 4, 1_200_000, compute_s=0.03, link_bits_s=1e10, delay_s=1e-4)
HERE = Plan(8, 1, 1_200_000, connection="unix", server_cores=1, trainer_cores=1)


def test_the_costs_that_were_measured() -> None:
    costs = Costs.load()
    assert set(costs.messages) == set(get_args(Kind))
    assert formula(costs, SMALL).pushes_per_s < formula(costs, replace(SMALL, connection="tcp")).pushes_per_s
    assert all(seconds > 0 for seconds in costs_ps.update_seconds())


def test_a_queue_serves_one_thing_at_a_time() -> None:
    queue = Queue()
    assert [queue.take(now, 2.0) for now in (0.0, 1.0, 10.0)] == [2.0, 4.0, 12.0]
    assert queue.busy_s == 6.0


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        HERE,
        replace(HERE, servers=4),
        replace(HERE, trainers=1),
        SMALL,
        replace(SMALL, servers=10, compute_s=0.0),
        replace(SMALL, link_bits_s=1e8, delay_s=0.02),
        replace(SMALL, bytes_each=1.0),
        replace(SMALL, compute_s=3.0),
        replace(SMALL, trainers=100, servers=40),
    ],
)
def test_formulas_and_simulation_agree(plan: Plan, mode: str, overlap: bool) -> None:
    plan = replace(plan, mode=mode, overlap=overlap)
    simulated = Simulation(COSTS, plan).run(9)
    # trainers that are answered early compute early, which the formulas leave out
    assert 0.85 < simulated / formula(COSTS, plan).pushes_per_s < 1.35


def test_a_simulation_is_the_same_each_time() -> None:
    assert Simulation(COSTS, SMALL).run(6) == Simulation(COSTS, SMALL).run(6)


def test_a_single_push_takes_what_its_parts_take() -> None:
    plan = replace(SMALL, trainers=1, servers=1, connection="tcp", delay_s=0.5, link_bits_s=1e6)
    work = Work.of(COSTS, plan)
    parts = [plan.compute_s, work.trainer, 2 * work.link, work.server_in, work.ledger, work.update, work.server_out]
    assert 1 / Simulation(COSTS, plan).run(3) == pytest.approx(sum(parts) + 2 * plan.delay_s)


def test_a_thin_link_is_the_limit_and_fewer_bytes_help_as_much() -> None:
    thin = replace(SMALL, link_bits_s=1e8, compute_s=0.0)
    assert formula(COSTS, thin).limit == "servers' links"
    quarter = Simulation(COSTS, replace(thin, bytes_each=1.0)).run(6) / Simulation(COSTS, thin).run(6)
    assert quarter == pytest.approx(4, rel=0.1)


def test_reports_grow_while_the_lead_is_busy_so_that_they_limit_async_alone() -> None:
    def gradients(plan: Plan) -> float:
        """In a report."""
        simulation = Simulation(COSTS, plan)
        simulation.run(6)
        return simulation.reported / simulation.reports

    assert gradients(replace(SMALL, trainers=1)) == 1
    many = replace(SMALL, trainers=100, servers=40)
    assert gradients(many) > 5
    one_by_one = replace(many, mode="async")
    assert gradients(one_by_one) < 1.5, "after the first gradients, which come at the same time, one"
    assert formula(COSTS, one_by_one).limit == "the lead"
    assert Simulation(COSTS, many).run(3) > 5 * Simulation(COSTS, one_by_one).run(3)


def test_inner_steps_hide_the_exchange() -> None:
    local = replace(SMALL, compute_s=3.0, overlap=True)
    assert formula(COSTS, local).limit == "computation"
    assert Simulation(COSTS, local).run(6) == pytest.approx(local.trainers / 3.0, rel=0.02)


def test_servers_have_their_own_cores_if_there_are_enough() -> None:
    assert layout(1, [0, 1]) == ([[0]], [1])
    assert layout(4, [0, 1]) == ([[0]] * 4, [1])
    assert layout(2, [0, 1, 2, 3]) == ([[0], [1]], [2, 3])
    assert layout(3, [5]) == ([[5]] * 3, [5])
