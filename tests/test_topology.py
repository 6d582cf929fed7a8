"""Meshes planned from links, on machines made up for it."""

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.train.topology import NETWORK, join_hosts, local_links, parse_topology, plan_groups

NV, PCIE, SYS = 450.0, 50.0, 20.0


def machine(groups, inside, between):
    """Links of ranks that are `inside` fast within a group, `between` fast across."""
    count = 1 + max(rank for group in groups for rank in group)
    home = {rank: g for g, group in enumerate(groups) for rank in group}
    return [[inside if home[a] == home[b] else between for b in range(count)] for a in range(count)]


def test_one_nvswitch_host_is_one_group_and_says_that_nothing_is_gained():
    plan = plan_groups(machine([range(8)], NV, 0), ["h"] * 8, [0] * 4 + [1] * 4)
    assert (plan.replicate, plan.shard) == (1, 8)
    assert "HSDP brings nothing" in plan.reason


def test_two_hosts_of_eight_shard_inside_a_host():
    links = machine([range(8), range(8, 16)], NV, NETWORK)
    plan = plan_groups(links, ["a"] * 8 + ["b"] * 8, [0] * 16)
    assert plan.groups == (tuple(range(8)), tuple(range(8, 16)))
    assert "at least 450 GB/s inside, at most 50 GB/s between" in plan.reason


def test_two_times_four_gpus_on_pcie_shard_inside_a_numa_node():
    links = machine([range(4), range(4, 8)], PCIE, SYS)
    plan = plan_groups(links, ["h"] * 8, [0] * 4 + [1] * 4)
    assert plan.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_pairs_joined_by_nvlink_are_found_whatever_their_numbers():
    pairs = [(0, 3), (1, 2), (4, 7), (5, 6)]
    plan = plan_groups(machine(pairs, 100.0, SYS), ["h"] * 8, [0] * 8)
    assert plan.groups == tuple(sorted(pairs))
    assert "by the fastest links" in plan.reason


def test_a_numa_node_counts_where_links_are_graded():
    """Pairs at 50, a NUMA node at 40, across at 10: no level is twice as fast but the node."""
    links = machine([range(4), range(4, 8)], 40.0, 10.0)
    for a, b in ((0, 1), (2, 3), (4, 5), (6, 7)):
        links[a][b] = links[b][a] = 50.0
    plan = plan_groups(links, ["h"] * 8, [0] * 4 + [1] * 4)
    assert (plan.replicate, plan.shard) == (2, 4)


@pytest.mark.parametrize("groups", [[range(3), range(3, 8)], [range(1), range(1, 2)]])
def test_unequal_or_single_islands_make_no_mesh(groups):
    links = machine(groups, NV, SYS)
    count = len(links)
    assert plan_groups(links, ["h"] * count, [0] * count).replicate == 1


def test_one_rank_and_what_is_refused():
    assert plan_groups([[0.0]], ["h"], [0]).groups == ((0,),)
    with pytest.raises(ConfigError, match="2 hosts need 2 NUMA nodes and 2 x 2 links, got 1"):
        plan_groups([[0, 1], [1, 0]], ["h", "h"], [0])
    with pytest.raises(ConfigError, match=r"symmetric: 2 from 1 to 0, 1 back"):
        plan_groups([[0, 1], [2, 0]], ["h", "h"], [0, 0])


TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-31\t0\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tSYS\t0-31\t0\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV18\tSYS\t32-63\t1\tN/A\n"
    "GPU3\tSYS\tSYS\tNV18\t X \tSYS\t32-63\t1\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\tSYS\t X \t\t\n\nLegend:\n\n  X    = Self\n  SYS  = across sockets\n"
)


def test_the_drivers_table_is_read():
    links, numa = parse_topology(TOPO)
    assert links[0] == [0.0, 450.0, 20.0, 20.0]
    assert numa == [0, 0, 1, 1]
    assert plan_groups(links, ["h"] * 4, numa).groups == ((0, 1), (2, 3))
    with pytest.raises(ConfigError, match="no GPU in the topology table"):
        parse_topology("No devices were found")


def test_hosts_are_joined_by_the_network():
    links, numa = parse_topology(TOPO)
    found = [(host, place, links, numa) for host in ("a", "b") for place in range(4)]
    joined, hosts, nodes = join_hosts(found)
    assert joined[0] == [0.0, 450.0, 20.0, 20.0, *[NETWORK] * 4]
    assert plan_groups(joined, hosts, nodes).replicate == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has links of its own")
def test_without_gpus_all_ranks_of_a_host_are_alike():
    found = [(host, place, *local_links(2)) for host in ("a", "b") for place in range(2)]
    plan = plan_groups(*join_hosts(found))
    assert plan.groups == ((0, 1), (2, 3))
