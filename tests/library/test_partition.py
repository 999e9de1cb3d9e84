import pytest
import torch

from ripple_attention import Partition, chebyshev, dense, foveal, logarithmic


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
    for partition in (chebyshev(1), chebyshev(5), logarithmic(1), logarithmic(9), foveal(2, 2)):
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


@pytest.mark.parametrize(
    "partition", [chebyshev(3), logarithmic(6), Partition((2, 5)), foveal(2, 2, 1)]
)
def test_pair_groups_are_the_groups_of_each_query(partition):
    height, width = 4, 7
    pairs = partition.pair_groups((height, width))
    for row in range(height):
        for column in range(width):
            expected = partition.groups((row, column), (height, width)).flatten()
            assert torch.equal(pairs[row * width + column], expected)
    assert torch.equal(pairs, pairs.T)


def test_foveal_has_exact_rings_and_beyond_them_rings_of_tiles():
    partition = foveal(3, tile=4, rings=2)
    assert partition.num_groups == 6 and partition.radii == (0, 1, 2)
    row, column, groups = 9, 6, partition.groups((9, 6), (30, 40))
    for key_row in range(30):
        for key_column in range(40):
            distance = max(abs(key_row - row), abs(key_column - column))
            tiles = max(abs(key_row // 4 - row // 4), abs(key_column // 4 - column // 4))
            expected = distance if distance < 3 else 3 + (tiles > 1) + (tiles > 3)
            assert groups[key_row, key_column] == expected


def test_bounds_say_all_of_a_partition():
    for partition in (chebyshev(3), logarithmic(9), foveal(), foveal(1, 1, 1)):
        assert Partition.from_bounds(partition.bounds) == partition


def test_tiles_smaller_than_the_exact_rings_are_refused():
    with pytest.raises(ValueError, match="tile must be at least max_distance wide; got max_dist"):
        foveal(4, 3)


@pytest.mark.parametrize(
    "options", [((0, 4), 4, (1,)), ((0,), 4), ((0,), 4, (0,)), ((0,), 0, (1,))]
)
def test_coarse_rings_that_are_none_are_refused(options):
    with pytest.raises(ValueError, match="coarse rings need a tile.*Use foveal"):
        Partition(*options)


@pytest.mark.parametrize("distance", [0, -1, 1.5, True, "4", None])
def test_a_distance_that_is_not_a_count_is_refused(distance):
    for make in (chebyshev, logarithmic, foveal):
        with pytest.raises(ValueError, match="max_distance.*must be a whole number ≥ 1; got"):
            make(distance)


@pytest.mark.parametrize("radii", [(), 5, (1, 1), (2, 1), (-1, 3), (0, 1.5)])
def test_radii_out_of_order_are_refused(radii):
    with pytest.raises(ValueError, match="strictly increasing; got radii="):
        Partition(radii)


def test_a_query_outside_the_grid_is_refused():
    with pytest.raises(ValueError, match="inside the grid; got query="):
        chebyshev(2).groups((3, 0), (3, 3))
