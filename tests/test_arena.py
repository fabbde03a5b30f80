"""Tensors of an emulated launch lie far apart, wherever the heap has put them."""

import ctypes

from lessonkit.cuda.arena import ALIGNED, GUARD, apart

import pytest
import torch


def test_neighbours_lie_apart_and_come_back():
    pool = torch.arange(64.0)
    x, y = pool[:16], pool[16:32]  # y begins where x ends
    with apart((x, y, None, 7, x.new_empty(0))) as (at_x, at_y, null, number, _):
        assert at_y - at_x >= GUARD + 64
        assert (null, number) == (0, 7)
        assert at_x % ALIGNED == 0
        assert at_y % ALIGNED == 64
        ctypes.memmove(at_y, at_x, 64)
        assert (ctypes.c_char * GUARD).from_address(at_x + 64).raw.count(0) == GUARD
    assert pool.tolist() == [*range(16), *range(16), *range(32, 64)]


def test_distances_do_not_depend_on_the_heap():
    pool = torch.empty(1000)
    distances = set()
    for first, second in ((0, 16), (500, 16), (16, 0), (40, 300)):
        with apart((pool[first : first + 3].clone(), pool[second : second + 5].clone())) as (at_x, at_y):
            distances.add(at_y - at_x)
    assert len(distances) == 1


def test_views_of_one_another_stay_so():
    pool = torch.zeros(6, 8)
    rows, columns, same = pool[2:4], pool[:, 1:3], pool
    with apart((columns, rows, same)) as (at_columns, at_rows, at_pool):
        assert at_columns - at_pool == 4
        assert at_rows - at_pool == 2 * 8 * 4


def test_what_was_written_before_an_error_is_there():
    def kernel(at):
        ctypes.memset(at + 1, 9, 2)
        raise RuntimeError("of a kernel")

    x = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="of a kernel"), apart((x,)) as (at,):
        kernel(at)
    assert x.tolist() == [0, 9, 9, 0]
