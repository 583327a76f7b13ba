"""A capture: what was there at its moment, whatever changes while it is read, and within its bound of memory."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from rolecall.checkpoint.capture import Capture, CaptureError, Rows


def small(columns: dict[str, Rows], least: int = 2**20, patience: float = 60.0) -> Capture:
    """With blocks of a few rows, and only single rows copied at once."""
    return Capture(columns, patience, block=64, eager=4, least=least, share=0)


def column(capture_bytes: list[Tensor], like: Tensor, skipped: int = 0) -> Tensor:
    data = torch.cat(capture_bytes)[skipped : skipped + like.nbytes]
    return data.view(like.dtype).view(like.shape)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_one_share_are_put_into_any_other(seed: int) -> None:
    chance = random.Random(seed)
    total, width = chance.randrange(1, 60), chance.randrange(1, 3)
    whole = torch.arange(total * width).view(total, width)
    first, step = chance.randrange(total), chance.randrange(1, 7)
    source = whole[first::step]
    first_here, step_here = chance.randrange(total), chance.randrange(1, 7)
    expected = torch.full_like(whole, -1)
    expected[first::step] = source
    cut = chance.randrange(len(range(first_here, total, step_here)) + 1)
    target = torch.full_like(whole[first_here::step_here], -1)
    rows = Rows((target[:cut], target[cut:]), total, first_here, step_here)
    size = chance.randrange(1, 9)
    for begin in range(0, len(source), size):
        rows.put(source[begin : begin + size], begin, first, step)
    assert torch.equal(target, expected[first_here::step_here])


@pytest.mark.parametrize("seed", range(5))
def test_ranges_that_change_while_it_is_read(seed: int) -> None:
    chance = random.Random(seed)
    parts, state = (torch.randn(37), torch.randn(120)), torch.randn(157)
    before, count = torch.cat(parts), torch.zeros(1)
    capture = small({"p": Rows(parts, 157), "m": Rows((state,), 157), "n": Rows((count,), 1)})
    blocks = []
    for block in capture.read():
        blocks.append(block)
        begin = chance.randrange(157)
        end = chance.randrange(begin, 158)
        capture.before(begin, end)
        for _, view in Rows(parts, 157).pieces(begin, end):
            view.zero_()
        count += 1
        if len(blocks) == 3:
            changed = state.clone()
            capture.before(0, 157)
            state.zero_()
    assert torch.equal(column(blocks, before), before)
    assert torch.equal(column(blocks, changed, before.nbytes), changed)
    assert float(column(blocks, count, 2 * before.nbytes)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_single_rows_that_change_while_it_is_read(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, squares = torch.randn(200, 3), torch.randn(200)
    before = weight.clone(), squares.clone()
    capture, blocks = small({"w": Rows((weight,), 200), "s": Rows((squares,), 200)}), []
    for block in capture.read():
        blocks.append(block)
        rows = torch.randperm(200, generator=generator)[:20]
        capture.before_rows(rows)
        weight[rows] += 1
        squares[rows] = 0
    assert torch.equal(column(blocks, weight), before[0])
    assert torch.equal(column(blocks, squares, weight.nbytes), before[1])


@pytest.mark.parametrize("single", [False, True])
def test_beyond_its_bound_a_change_waits_for_the_reader(single: bool) -> None:
    weight = torch.randn(100, 4)
    before = weight.clone()
    capture = small({"w": Rows((weight,), 100)}, least=256)  # 16 rows
    changed = threading.Event()

    def change() -> None:
        if single:
            for rows in torch.randperm(100).split(30):
                capture.before_rows(rows)
                weight[rows] = 0
        else:
            capture.before(0, 100)
            weight.zero_()
        changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    assert not changed.wait(0.05), "100 rows fit into the room for 16"
    blocks = list(capture.read())
    thread.join(60)
    assert torch.equal(column(blocks, before), before)
    assert not weight.any()
    assert capture.stalled > 0


def test_a_reader_that_is_too_slow_holds_nobody_up() -> None:
    weight = torch.randn(100, 4)
    capture = small({"w": Rows((weight,), 100)}, least=256, patience=0.01)
    capture.before_rows(torch.arange(100))
    capture.before(0, 100)
    with pytest.raises(CaptureError, match="the disk is slower than the training"):
        list(capture.read())


@pytest.mark.parametrize("frozen", [False, True])
def test_one_that_was_given_up_reads_no_copies_either(frozen: bool) -> None:
    capture = Capture({"w": Rows((torch.zeros(100),), 100, frozen=frozen)}, 60.0, block=64)
    read = capture.read()
    next(read)
    capture.give_up("a newer checkpoint was begun")
    with pytest.raises(CaptureError, match="a newer checkpoint was begun"):
        next(read)


def test_changes_from_another_thread_are_never_seen() -> None:
    """Whole blocks and a reader that runs at the same time: every value read is the one before."""
    weight = torch.zeros(4000, 16)
    capture = Capture({"w": Rows((weight,), 4000)}, 60.0, block=4096, eager=0)
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            rows = torch.randperm(4000)[:500]
            capture.before_rows(rows)
            weight[rows] += 1

    thread = threading.Thread(target=change)
    thread.start()
    blocks = list(capture.read())
    ended.set()
    thread.join(60)
    assert not torch.cat(blocks).any()
    assert weight.any()


def test_a_capture_leaves_alone_what_does_not_change() -> None:
    """It has other rows than the columns beside it."""
    rows, cells = torch.arange(40), torch.arange(1000)
    taken = small({"rows": Rows((rows,), 40), "cells": Rows((cells,), 1000, frozen=True)})
    taken.before_rows(torch.tensor([39, 0]))
    rows[[39, 0]] = -1
    read = taken.read()
    first = [next(read) for _ in range(6)]  # all of one column, and the beginning of the other
    taken.before_rows(torch.tensor([39]))
    whole = torch.cat([*first, *read]).view(torch.int64)
    assert torch.equal(whole, torch.cat([torch.arange(40), cells]))
