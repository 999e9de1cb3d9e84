import pytest
import torch

from ripple_attention import Partition, chebyshev, dense, logarithmic


def test_chebyshev_has_a_ring_for_each_distance_and_the_rest():
    partition = chebyshev(3)
    assert partition.radii == (0, 1, 2)
    assert partition.num_groups == 4
    expected = [[2, 2, 2, 2, 2, 3], [2, 1, 1, 1, 2, 3], [2, 1, 0, 1, 2, 3], [2, 1, 1, 1, 2, 3]]
    assert partition.groups((2, 2), (4, 6)).tolist() == expected


def test_logarithmic_rings_double_until_the_distance_is_covered():
    assert logarithmic(1).radii == (0, 1)
    assert logarithmic(3).radii == (0, 1, 3)
    assert logarithmic(4).radii == (0, 1, 3, 7)
    row = logarithmic(7).groups((0, 0), (1, 10))[0]
    assert row.tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4]


def test_the_query_itself_is_a_group_of_its_own():
    for partition in (chebyshev(1), chebyshev(5), logarithmic(1), logarithmic(9)):
        groups = partition.groups((1, 2), (5, 5))
        assert (groups == 0).sum() == 1
        assert groups[1, 2] == 0


def test_dense_gives_every_distance_of_the_grid_a_group():
    partition = dense((3, 6))
    assert partition.groups((0, 0), (3, 6))[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert partition.num_groups == 6
    assert dense((1, 1)).num_groups == 2


def test_a_distance_larger_than_the_grid_is_legal():
    groups = chebyshev(50).groups((0, 0), (2, 3))
    assert groups.tolist() == [[0, 1, 2], [1, 1, 2]]


@pytest.mark.parametrize("partition", [chebyshev(3), logarithmic(6), Partition((2, 5))])
def test_pair_groups_are_the_groups_of_each_query(partition):
    height, width = 4, 7
    pairs = partition.pair_groups((height, width))
    for row in range(height):
        for column in range(width):
            expected = partition.groups((row, column), (height, width)).flatten()
            assert torch.equal(pairs[row * width + column], expected)
    assert torch.equal(pairs, pairs.T)


@pytest.mark.parametrize("distance", [0, -1, 1.5, True, "4", None])
def test_a_distance_that_is_not_a_count_is_refused(distance):
    for make in (chebyshev, logarithmic):
        with pytest.raises(ValueError, match="max_distance.*must be a whole number ≥ 1; got"):
            make(distance)


@pytest.mark.parametrize("radii", [(), 5, (1, 1), (2, 1), (-1, 3), (0, 1.5)])
def test_radii_out_of_order_are_refused(radii):
    with pytest.raises(ValueError, match="strictly increasing; got radii="):
        Partition(radii)


def test_a_query_outside_the_grid_is_refused():
    with pytest.raises(ValueError, match="inside the grid; got query="):
        chebyshev(2).groups((3, 0), (3, 3))
