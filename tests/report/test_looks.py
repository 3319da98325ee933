"""Colours belong to methods: on every page, in every picture, whoever leads."""

from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import SLOPES, method_of, write_comparison

from gossamer.commands.compare import DEFAULT_METHODS
from gossamer.methods import METHODS
from gossamer.report.looks import COLOURS, places
from gossamer.report.page.build import report_data
from gossamer.report.pictures.figure import look

few = settings(max_examples=50)
labels = st.lists(st.sampled_from([*METHODS, "local_sgd:period=8", "a (rate 0.1)"]), unique=True)


def test_the_default_methods_have_colours_of_their_own():
    """Nobody has to tell the first from the last by a dash."""
    found = [look(place)["color"] for place in places(DEFAULT_METHODS.split()).values()]
    assert len(set(found)) == len(found) == 8


def test_a_method_has_one_look_in_every_company():
    """Of those compared by default, whoever else of them is there."""
    names = DEFAULT_METHODS.split()
    together = places(names)
    for name in names:
        assert places([name]) == {name: together[name]}


@few
@given(labels)
def test_looks_differ_and_do_not_depend_on_the_order(found):
    """A live page whose order changes keeps its colours; up to twelve all differ in them."""
    chosen = places(found)
    assert places(reversed(found)) == chosen
    assert len({tuple(map(str, look(at).values())) for at in chosen.values()}) == len(found)
    if len(found) <= len(COLOURS):
        assert len({look(at)["color"] for at in chosen.values()}) == len(found)


def test_a_page_gives_a_method_its_look_whatever_its_rank(tmp_path):
    """The same two methods, in both orders of the race."""
    swapped = {
        ({"ad_psgd": "downpour", "downpour": "ad_psgd"}[method], rate, seed): slope
        for (method, rate, seed), slope in SLOPES.items()
    }
    pages = [
        report_data([write_comparison(tmp_path / str(at), slopes)])
        for at, slopes in enumerate((SLOPES, swapped))
    ]
    assert [method["label"] for method in pages[0]["methods"]] == ["ad_psgd", "downpour"]
    assert [method["label"] for method in pages[1]["methods"]] == ["downpour", "ad_psgd"]
    for label in ("ad_psgd", "downpour"):
        assert len({method_of(page, label)["look"] for page in pages}) == 1
