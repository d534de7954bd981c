"""Slurm's short forms, written out."""

import pytest

from mpidist.cluster_resolver.host_list import expand_host_list, expand_tasks_per_node

pytestmark = pytest.mark.no_mpi


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[001-003,7],gpu7", ["n001", "n002", "n003", "n7", "gpu7"]),
        ("n[099-101],m3", ["n099", "n100", "n101", "m3"]),
        ("t02n[13,41,43]", ["t02n13", "t02n41", "t02n43"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
        ("n[1-2].cluster.org,login.cluster.org", ["n1.cluster.org", "n2.cluster.org", "login.cluster.org"]),
        ("[1-2]n", ["1n", "2n"]),
        ("n10,n8,n9", ["n10", "n8", "n9"]),
        ("n3,n1,n3", ["n3", "n1", "n3"]),
    ],
)
def test_host_list_is_written_out_in_its_own_order(text: str, hosts: list[str]) -> None:
    assert expand_host_list(text) == hosts


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("", "character 1", "a host name is missing"),
        ("n1,,n2", "character 4", "a host name is missing"),
        ("n1,", "character 4", "a host name is missing"),
        (",n1", "character 1", "a host name is missing"),
        ("n[3-1]", "character 3", "runs backwards"),
        ("m7,n[1,9-8]", "character 8", "runs backwards"),
        ("n[1-2", "character 2", "not closed"),
        ("n1-2]", "character 5", "unexpected ']'"),
        ("n[]", "character 3", "''"),
        ("n[1,,2]", "character 5", "''"),
        ("n[1-2-3]", "character 3", "'1-2-3'"),
        ("n[-2]", "character 3", "'-2'"),
        ("(null)", "character 1", "a host name is missing"),
        ("n1 n2", "character 3", "unexpected ' '"),
    ],
)
def test_malformed_host_list_is_refused_with_its_place(text: str, place: str, why: str) -> None:
    """Reference section 7, item 16: TF takes a reversed range for an empty one."""
    with pytest.raises(ValueError, match="host list") as error:
        expand_host_list(text)
    assert repr(text) in str(error.value)
    assert f"{place}:" in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2,1,3", [2, 1, 3]), ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]), ("13(x10)", [13] * 10)],
)
def test_tasks_per_node_are_written_out(text: str, counts: list[int]) -> None:
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("text", "place"),
    [("", 1), ("2,", 3), ("2,x", 3), ("2(x)", 1), ("1,2(3)", 3), ("2(x3", 1), ("-1", 1), ("2 (x3)", 1)],
)
def test_malformed_tasks_per_node_are_refused_with_their_place(text: str, place: int) -> None:
    with pytest.raises(ValueError, match=f"at character {place}:") as error:
        expand_tasks_per_node(text)
    assert repr(text) in str(error.value)
