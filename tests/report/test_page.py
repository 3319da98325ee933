"""Laws of the page as a file: one, whole, asking nothing of anybody, and its data never running."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_sample import bare_method, sample_page

from gossamer.report.page.html_file import page_html, write_page

HOSTILE = "</script><img src=x onerror=\"alert('&amp;')\"><!--<script>"
ASSETS = Path(str(files("gossamer.report"))) / "assets"
# Names of XML namespaces and licences inside the plotting library; nothing is fetched from them.
NAMESPACES = ("http://www.w3.org/", "http://www.apache.org/licenses/", "https://github.com/ecomfe/")


class Elements(HTMLParser):
    """What a browser would see: every element, and the text inside of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside.append(("", ""))

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, before = self.inside[-1]
            self.inside[-1] = (tag, before + data)

    def texts(self, tag: str) -> list[str]:
        return [text for name, text in self.inside if name == tag]

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.found]


def html_of(**changes: Any) -> str:
    return page_html(cast(Any, sample_page(**changes)))


USUAL = [
    "html", "head", "meta", "meta", "meta", "meta", "link", "title", "style", "body", "noscript",
    "h1", "p", "code", "p", "div", "script", "script", "script",
]  # fmt: skip


def test_a_page_has_one_of_each_part():
    """The page is one document: one style, the data, the library, the script, no frame or form."""
    elements = Elements(html_of())
    assert elements.tags() == USUAL
    assert elements.texts("title") == ["digits-mlp on one-slow-of-16"]


def test_the_data_in_the_page_are_the_data():
    """What is embedded reads back as what was given."""
    data = elements_data(html_of())
    assert data == json.loads(json.dumps(sample_page()))


def elements_data(text: str) -> Any:
    return json.loads(Elements(text).texts("script")[0])


def without_library(**changes: Any) -> str:
    """A page of little data less the plotting library, which is most of it and the same in each."""
    library = (ASSETS / "echarts" / "echarts.min.js").read_text(encoding="utf-8")
    return html_of(**{"methods": [], **changes}).replace(library, "")


@settings(max_examples=30)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from(["", HOSTILE]))
def test_no_text_escapes_from_where_it_stands(words, more):
    """Whatever a label, title or command says, the page has the same elements as ever."""
    said = dict.fromkeys(("title", "verdict", "command"), words + more)
    text = without_library(**said, methods=[bare_method(words + more)])
    assert Elements(text).tags() == USUAL
    assert elements_data(text)["title"] == words + more


def test_a_hostile_label_adds_no_element():
    """A label that closes the script and opens an image stays inside of the data."""
    text = html_of(methods=[bare_method(HOSTILE)], notices=[HOSTILE], missing=[HOSTILE])
    assert "img" not in Elements(text).tags()
    assert text.count("</script>") == 3
    assert elements_data(text)["methods"][0]["label"] == HOSTILE


def test_what_looks_like_a_place_in_the_template_is_only_text():
    """Data that name a part of the template are not replaced by it."""
    text = html_of(title="@@script@@", verdict="@@data@@")
    assert Elements(text).texts("title") == ["@@script@@"]


@pytest.mark.parametrize("is_growing", [False, True])
def test_the_policy_lets_only_our_scripts_run(is_growing):
    """The digests in the policy are those of the two scripts, and only a growing page may ask."""
    elements = Elements(html_of(is_growing=is_growing))
    policy = next(
        attributes["content"] or ""
        for tag, attributes in elements.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    for script in elements.texts("script")[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert f"connect-src {chr(39)}{'self' if is_growing else 'none'}{chr(39)}" in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_the_page_names_no_outside_address():
    """Addresses occur as namespaces and licences of the library only; nothing links outside."""
    text = html_of()
    addresses = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z.]+/[^\s\"'<>)]*", text)
    assert [one for one in addresses if not one.startswith(NAMESPACES)] == []
    for _, attributes in Elements(text).found:
        assert attributes.get("src") is None
        assert attributes.get("href") in (None, "data:,")
    assert "@import" not in text
    assert "url(http" not in text


def test_a_page_of_eight_methods_stays_small():
    """Eight methods with strips, curves and the library are under three megabytes."""
    assert len(html_of().encode()) < 3_000_000


def test_not_a_number_becomes_null():
    """JSON knows neither NaN nor infinity; a page with them would not open."""
    text = html_of(
        target=float("nan"), tables=[{"title": "", "columns": ["x"], "rows": [[float("inf")]]}]
    )
    assert elements_data(text)["target"] is None
    assert elements_data(text)["tables"][0]["rows"] == [[None]]


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """When writing fails, the page of before stands and nothing lies beside it."""
    path = tmp_path / "deep" / "report.html"
    write_page(path, cast(Any, sample_page()))
    before = path.read_text(encoding="utf-8")
    with pytest.raises(KeyError):
        write_page(path, cast(Any, {}))
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        write_page(path, cast(Any, sample_page(title="other")))
    assert path.read_text(encoding="utf-8") == before
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_assets_are_small_files_and_the_library_keeps_its_licence():
    """Files of ours are under 400 lines; the licences of ECharts and of d3 lie beside it."""
    ours = [*ASSETS.glob("*.js"), *ASSETS.glob("*.css"), *ASSETS.glob("*.html")]
    assert len(ours) > 15
    assert [one.name for one in ours if one.read_text(encoding="utf-8").count("\n") >= 400] == []
    names = {one.name for one in (ASSETS / "echarts").iterdir()}
    assert names == {"echarts.min.js", "LICENSE", "NOTICE", "LICENSE-d3"}


def test_scripts_set_text_and_never_markup():
    """No script of ours hands a string to anything that would parse it as markup or code."""
    for path in ASSETS.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        )
        assert found == [], path.name
