"""What the measuring scripts are given."""

from scripts import bench_search


def test_published_policies_are_those_of_the_papers():
    assert len(bench_search.PAPERS) == 9
    assert {source.split(",")[0] for source, *_ in bench_search.PAPERS} == {"FlexGen", "H2O"}
