"""A static HTML report of the executed notebooks: an index of claims and figures, a page per notebook.

``python -m kvcache.paper.pages.report --profile quick`` writes ``build/quick/report``. The pages need
neither a network nor scripts: formulas are MathML, images lie beside or inside them.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pandas as pd
from bs4 import BeautifulSoup
from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from kvcache.paper.pages.notebook import build_dir, committed_form
from kvcache.paper.project import project_root
from kvcache.paper.results import PROFILES, figures_dir, read_table, results_dir, table_path

__all__ = ["build_report", "mathml", "standalone"]

TITLE = "Robust KV-cache reservation, reproduced"
_WIDGET = "application/vnd.jupyter.widget-view+json"
#: Columns of the claims that are listed, and what they are called there.
_FACTS = {"paper": "paper", "ours": "here", "tolerance": "tolerance", "evidence": "evidence"}
_FACTS |= {"source": "from", "assumptions": "choices"}
_ALPHABETS = ("double-struck", "bold", "script", "fraktur")


# ---- formulas -------------------------------------------------------------------------------------


def _styled(letter: str, variant: str) -> str:
    """The letter of a mathematical alphabet, since browsers no longer heed ``mathvariant``."""
    if len(letter) != 1 or not letter.isalnum() or not letter.isascii():
        return letter
    kind = "DIGIT" if letter.isdigit() else "CAPITAL" if letter.isupper() else "SMALL"
    name = unicodedata.name(letter).rpartition(" ")[2]
    # Unicode had some of the letters before it had the alphabets, under shorter names.
    for prefix in ("MATHEMATICAL ", ""):
        try:
            return unicodedata.lookup(f"{prefix}{variant.upper()} {kind} {name}")
        except KeyError:
            continue
    return letter


def mathml(formula: str, display: bool = False) -> str:
    """A LaTeX formula as MathML.

    Raises
    ------
    ValueError
        For a command that is not understood, rather than showing it as it is typed.
    """
    source = formula.replace("{aligned}", "{align*}")
    tree = BeautifulSoup(convert(source, display="block" if display else "inline"), "html.parser")
    for element in tree.find_all(mathvariant=list(_ALPHABETS)):
        element.string = "".join(_styled(letter, element["mathvariant"]) for letter in element.get_text())
        del element["mathvariant"]
    # Needless within HTML, and read as a prefix by what nbconvert parses headings with.
    del tree.math["xmlns"]
    unknown = re.findall(r"\\[A-Za-z]+", tree.get_text())
    if unknown:
        raise ValueError(f"formula {formula!r}: {', '.join(unknown)} has no MathML")
    return str(tree)


class _Renderer(IPythonRenderer):
    """nbconvert's Markdown, with formulas as MathML instead of left to a script."""

    def inline_math(self, body: str) -> str:
        return mathml(body)

    def block_math(self, body: str) -> str:
        return mathml(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)


class _Exporter(HTMLExporter):
    """The body of a notebook without nbconvert's scripts and style sheets."""

    def __init__(self, **options: object) -> None:
        super().__init__(
            template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True, **options
        )

    @pass_context
    def markdown2html(self, context: object, source: str) -> str:
        return MarkdownWithMath(renderer=_Renderer(escape=False)).render(source)


# ---- pages ----------------------------------------------------------------------------------------


def _readable(executed: NotebookNode) -> NotebookNode:
    """The notebook as it is committed, and of a widget what stands for it."""
    book = committed_form(executed)
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        for output in list(cell.get("outputs", [])):
            if output.get("data", {}).pop(_WIDGET, None) and set(output.data) <= {"text/plain"}:
                cell.outputs.remove(output)
    return book


def _heading(body: str, name: str) -> BeautifulSoup:
    """The first heading of a page, without its anchor; the notebook's name where it has none."""
    heading = BeautifulSoup(body, "html.parser").find(re.compile("^h[1-6]$"))
    if heading is None:
        return BeautifulSoup(html.escape(name), "html.parser")
    for anchor in heading.find_all("a"):
        anchor.decompose()
    return heading


def standalone(executed: NotebookNode, title: str) -> str:
    """One page of a notebook's prose and outputs without its code, which needs no other file.

    Links to files of the project are left as their text.
    """
    body, _ = _Exporter(exclude_input=True).from_notebook_node(_readable(executed))
    tree = BeautifulSoup(body, "html.parser")
    for link in tree.find_all("a", href=True):
        if not urlsplit(link["href"]).scheme and not link["href"].startswith("#"):
            link.unwrap()
    return _page(title, str(tree), (), "").replace(
        '<link rel="stylesheet" href="report.css">', f"<style>{_style()}</style>"
    )


def _style() -> str:
    sheet = files("kvcache.paper").joinpath("data/report.css").read_text(encoding="utf-8")
    return sheet + HtmlFormatter(style="friendly").get_style_defs(".highlight") + "\n"


def _page(title: str, body: str, pages: Sequence[tuple[str, str]], current: str) -> str:
    """A whole page: ``pages`` are (file, label) of the menu at its top."""
    menu = "\n".join(
        f'<a href="{file}"{" aria-current=page" if file == current else ""}>{html.escape(label)}</a>'
        for file, label in pages
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="report.css">
</head>
<body>
<nav class="top">
{menu}
</nav>
<main>
{body}
</main>
</body>
</html>
"""


def _settle_links(body: str, folder: Path, target: Path, pages: Iterable[str]) -> str:
    """Point the links of a notebook at pages of the report, or at copies of the project's files.

    Raises
    ------
    FileNotFoundError
        For a link to a file that the project does not have.
    """
    tree = BeautifulSoup(body, "html.parser")
    root = project_root()
    for element in tree.find_all(["a", "img"]):
        attribute = "href" if element.name == "a" else "src"
        address = urlsplit(element.get(attribute, ""))
        if address.scheme or address.netloc or not address.path:
            continue
        source = (folder / unquote(address.path)).resolve()
        if source.stem in pages and source.suffix == ".ipynb":
            element[attribute] = f"{source.stem}.html" + (f"#{address.fragment}" if address.fragment else "")
            continue
        if not source.is_file() or not source.is_relative_to(root):
            raise FileNotFoundError(f"link to {address.path}: the project has no such file")
        copy = Path("files") / source.relative_to(root)
        (target / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / copy)
        element[attribute] = copy.as_posix()
    return str(tree)


# ---- index ----------------------------------------------------------------------------------------


def _claims(profile: str) -> str:
    if not table_path("claims.csv", profile).is_file():
        return '<p class="quiet">No claim has been judged yet.</p>'
    claims = read_table("claims.csv", profile).fillna("").astype(str)
    slugs = claims["verdict"].str.replace(" ", "-")
    counts = "".join(
        f'<li class="{slug}">{verdict} {count}</li>'
        for (slug, verdict), count in pd.DataFrame({"slug": slugs, "verdict": claims["verdict"]})
        .value_counts(sort=False)
        .items()
    )
    items = []
    for slug, (_, claim) in zip(slugs, claims.iterrows(), strict=True):
        facts = "".join(
            f"<dt>{label}</dt><dd>{html.escape(claim[name])}</dd>"
            for name, label in _FACTS.items()
            if claim.get(name)
        )
        items.append(
            f'<li id="{claim["id"]}"><b>{claim["id"]}</b> {html.escape(claim.get("where", ""))} '
            f'<span class="verdict {slug}">{claim["verdict"]}</span>'
            f"<p>{html.escape(claim.get('claim', ''))}</p><dl>{facts}</dl></li>"
        )
    return f'<ul class="counts">{counts}</ul>\n<ol class="claims">{"".join(items)}</ol>'


def _figures(profile: str, target: Path) -> str:
    """The gallery; copies the figures and the tables they were drawn from."""
    shown = []
    (target / "figures").mkdir()
    for png in sorted(figures_dir(profile).glob("*.png")):
        shutil.copyfile(png, target / "figures" / png.name)
        links = [f'<a href="figures/{png.name}">PNG</a>']
        if png.with_suffix(".svg").is_file():
            shutil.copyfile(png.with_suffix(".svg"), target / "figures" / f"{png.stem}.svg")
            links.append(f'<a href="figures/{png.stem}.svg">SVG</a>')
        if (results_dir(profile) / f"{png.stem}.csv").is_file():
            links.append(f'<a href="tables/{png.stem}.csv">data</a>')
        shown.append(
            f'<figure id="{png.stem}"><a href="figures/{png.name}"><img src="figures/{png.name}" '
            f'alt="{png.stem}"></a><figcaption><b>{png.stem}</b> · {" · ".join(links)}</figcaption></figure>'
        )
    return f'<div class="gallery">{"".join(shown)}</div>' if shown else '<p class="quiet">None yet.</p>'


def _tables(profile: str, target: Path) -> str:
    (target / "tables").mkdir()
    names = []
    for path in sorted(results_dir(profile).glob("*.csv")):
        shutil.copyfile(path, target / "tables" / path.name)
        names.append(f'<a href="tables/{path.name}">{path.name}</a>')
    return f"<p>{' · '.join(names)}</p>" if names else '<p class="quiet">None yet.</p>'


def build_report(executed: Sequence[Path], profile: str, target: Path) -> Path:
    """Write the report of executed notebooks.

    Parameters
    ----------
    executed : paths
        Executed notebooks; their links are taken as relative to ``notebooks/``.
    profile : {"quick", "full"}
        Whose tables and figures the index shows.
    target : Path
        The folder of the report. What it held before goes once the new report is whole.

    Returns
    -------
    Path
        The index, ``target/index.html``.

    Raises
    ------
    ValueError
        For a formula that has no MathML; the message names the notebook.
    FileNotFoundError
        For a link to a file that is not there; the message names the notebook.
    """
    fresh = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write(executed, profile, fresh)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target / "index.html"


def _write(executed: Sequence[Path], profile: str, target: Path) -> None:
    (target / "report.css").write_text(_style())
    books = {path.stem: nbformat.read(path, as_version=4) for path in executed}
    menu = [("index.html", "Index"), *((f"{name}.html", name.replace("_", " ")) for name in books)]
    entries = []
    for name, book in books.items():
        try:
            body, _ = _Exporter().from_notebook_node(_readable(book))
            body = _settle_links(body, project_root() / "notebooks", target, books)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{name}: {error}") from error
        heading = _heading(body, name)
        page = _page(heading.get_text(), body, menu, f"{name}.html")
        (target / f"{name}.html").write_text(page, encoding="utf-8")
        seconds = book.metadata.get("papermill", {}).get("duration")
        took = f' <span class="quiet">{seconds:.0f} s</span>' if seconds is not None else ""
        entries.append(f'<li><a href="{name}.html">{name}</a> {heading.decode_contents()}{took}</li>')
    figures = _figures(profile, target)
    body = f"""<h1>{TITLE}</h1>
<p>Profile <b>{profile}</b>. <a href="#claims">Claims</a> · <a href="#notebooks">Notebooks</a> ·
<a href="#figures">Figures</a> · <a href="#tables">Tables</a></p>
<h2 id="claims">Claims</h2>
{_claims(profile)}
<h2 id="notebooks">Notebooks</h2>
<ul class="plain">{"".join(entries)}</ul>
<h2 id="figures">Figures</h2>
{figures}
<h2 id="tables">Tables</h2>
{_tables(profile, target)}"""
    (target / "index.html").write_text(_page(TITLE, body, menu, "index.html"), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: the report of the given executed notebooks, into ``build/<profile>/report``."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.pages.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("notebooks", type=Path, nargs="*", help="the executed notebooks")
    parser.add_argument("--profile", choices=PROFILES, default="quick")
    options = parser.parse_args(arguments)
    index = build_report(options.notebooks, options.profile, build_dir(options.profile) / "report")
    print(f"report: {index}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
