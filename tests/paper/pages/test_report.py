"""The static report: whole, without broken links, and readable on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from IPython.core.formatters import format_display_data
from IPython.display import Image
from nbformat import v4

from kvcache.paper.pages.report import build_report, mathml
from kvcache.paper.results import figures_dir, write_table

ROOT = Path(__file__).resolve().parents[3]
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
FORMULA = r"\sup_{Q} \mathbb{E}_Q\left[c_p(\xi-\eta)^+\right], \qquad q^* = \frac{\rho}{1+\rho}"


def toy_project(root: Path) -> list[Path]:
    """A project with two executed notebooks, a figure, a wide table and a ledger; their paths."""
    figure, ax = plt.subplots(figsize=(12, 4))
    ax.plot([1, 2, 3])
    figures = figures_dir("quick")
    figures.mkdir(parents=True)
    for kind in ("png", "svg"):
        figure.savefig(figures / f"fig2a.{kind}")
    plt.close(figure)
    wide = pd.DataFrame({f"a rather long column {i}": [1.5] for i in range(30)})
    write_table(pd.DataFrame({"x": [1]}), "fig2a.csv", "quick")
    claims = {"id": ["C01", "C02"], "where": "Table II", "claim": ["a < b", "c"], "paper": "1", "ours": "2"}
    verdicts = {
        "verdict": ["reproduced", "not reproduced"],
        "evidence": "So " * 60,
        "assumptions": [None, "A1"],
    }
    write_table(pd.DataFrame(claims | verdicts), "claims.csv", "quick")

    table, _ = format_display_data(wide)
    image, _ = format_display_data(Image(figures / "fig2a.png"))
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}, "text/plain": "interactive(...)"}
    cells = [
        v4.new_markdown_cell(
            f"# First, with $\\eta^*$\n\n$$\n{FORMULA}\n$$\n\n| a | b |\n| - | - |\n| {'x' * 200} | 2 |\n\n"
            "[next](02_second.ipynb#there), [ledger](../data/results/claims.csv)\n\n"
            "![it](../figures/fig2a.png)"
        ),
        v4.new_code_cell('PROFILE = "full"', metadata={"tags": ["injected-parameters"]}),
        v4.new_code_cell(
            f"x = '{'long ' * 60}'",
            outputs=[
                v4.new_output("stream", name="stderr", text="50 %|#####"),
                v4.new_output("stream", name="stdout", text="word " * 80),
                v4.new_output("display_data", data=table),
                v4.new_output("display_data", data={"image/png": image["image/png"]}),
                v4.new_output("display_data", data=widget),
            ],
        ),
    ]
    second = [v4.new_markdown_cell('# Second\n\n<a id="there"></a>')]
    paths = []
    for name, content in [("01_first", cells), ("02_second", second)]:
        book = v4.new_notebook(cells=content, metadata={"papermill": {"duration": 61.2}})
        paths.append(root / "build" / "quick" / f"{name}.ipynb")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, paths[-1])
    return paths


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    executed = toy_project(tmp_path)
    return build_report(executed, "quick", tmp_path / "build" / "quick" / "report").parent


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """The report of the committed notebooks, with their embedded outputs."""
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    return build_report(notebooks, "quick", tmp_path / "report").parent


def soup_of(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def broken_links(report: Path) -> list[str]:
    pages = {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in report.glob("*.html")
    }
    found = []
    for path, page in pages.items():
        for element in page.find_all(["a", "img", "link", "script", "iframe"]):
            address = element.get("href") or element.get("src")
            if address is None:
                continue
            parts = urlsplit(address)
            if parts.scheme in ("http", "https", "data", "mailto") or (parts.netloc and element.name == "a"):
                continue
            target = (path.parent / parts.path).resolve() if parts.path else path
            anchors = {tag.get("id") for tag in pages[target].find_all(id=True)} if target in pages else set()
            if not target.is_file() or (parts.fragment and parts.fragment not in anchors):
                found.append(f"{path.name}: {address}")
    return found


def test_what_a_page_shows_and_leaves_out(toy):
    page = (toy / "01_first.html").read_text(encoding="utf-8")
    soup = BeautifulSoup(page, "html.parser")
    assert [element.name for element in soup.find_all(["script", "iframe"])] == []
    assert "50 %|" not in page
    assert "interactive(" not in page
    assert "PROFILE" not in page
    assert len(soup.find_all("math")) == 2
    assert "𝔼" in soup.find("math", display="block").get_text()
    assert {image["src"][:10] for image in soup.find_all("img")} == {"data:image", "files/figu"}
    assert soup.find("a", string="next")["href"] == "02_second.html#there"
    assert soup.find("a", string="ledger")["href"] == "files/data/results/claims.csv"


def test_the_index_has_the_ledger_the_figures_and_the_tables(toy):
    soup = soup_of(toy / "index.html")
    assert [item.get_text() for item in soup.select(".counts li")] == ["reproduced 1", "not reproduced 1"]
    assert "a < b" in soup.find(id="C01").get_text()
    assert "choices" not in soup.find(id="C01").get_text()
    assert "A1" in soup.find(id="C02").get_text()
    assert [a.get_text() for a in soup.select("#fig2a figcaption a")] == ["PNG", "SVG", "data"]
    assert "First, with η*" in soup.select_one("ul.plain li").get_text()
    assert "61 s" in soup.select_one("ul.plain li").get_text()


@pytest.mark.parametrize("report", ["toy", "committed"])
def test_no_link_is_broken(report, request):
    assert broken_links(request.getfixturevalue(report)) == []


def test_a_broken_link_is_found(toy):
    (toy / "figures" / "fig2a.svg").unlink()
    assert broken_links(toy) == ["index.html: figures/fig2a.svg"]


def test_a_link_to_nothing_stops_the_report_and_keeps_the_old_one(toy, tmp_path):
    path = tmp_path / "build" / "quick" / "02_second.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("[gone](../docs/gone.md)")]), path)
    with pytest.raises(FileNotFoundError, match=r"02_second: link to \.\./docs/gone\.md"):
        build_report([path], "quick", toy)
    assert (toy / "01_first.html").is_file()
    assert [entry.name for entry in toy.parent.iterdir() if entry.is_dir()] == ["report"]


def test_formulas():
    assert mathml(r"\mathbb{R}\mathbf{x}") == (
        '<math display="inline"><mrow><mi>ℝ</mi><mi>𝐱</mi></mrow></math>'
    )
    rows = BeautifulSoup(mathml(r"\begin{aligned} a &= b \\ c &= d \end{aligned}"), "html.parser")
    assert len(rows.find_all("mtr")) == 2
    with pytest.raises(ValueError, match=r"\\nosuch has no MathML"):
        mathml(r"\nosuch + x")


# Loads each page in frames of both widths and reports, per page and width, what is wrong.
HARNESS = """<!DOCTYPE html><body><pre id="result">unfinished</pre><script>
const pages = PAGES, widths = [1280, 390], wrong = [];
async function check(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  const loaded = new Promise((done) => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  const inner = frame.contentDocument, root = inner.documentElement;
  const say = (what) => wrong.push(`${page} at ${width}: ${what}`);
  if (root.clientWidth !== width && root.clientWidth < width - 20) say(`viewport ${root.clientWidth}`);
  if (root.scrollWidth > root.clientWidth) say(`scrolls sideways, ${root.scrollWidth} px`);
  for (const image of inner.images)
    if (!image.complete || image.naturalWidth === 0) say(`missing ${image.getAttribute("src").slice(0, 60)}`);
  for (const text of inner.querySelectorAll("p, li, td, dd, pre, figcaption"))
    if (text.innerText.trim() && parseFloat(frame.contentWindow.getComputedStyle(text).fontSize) < 11)
      { say(`small text: ${text.innerText.slice(0, 40)}`); break; }
  if (inner.querySelector("main").innerText.trim() === "") say("empty");
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await check(page, width);
  document.getElementById("result").textContent = JSON.stringify(wrong);
})();
</script></body>"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def seen_in_chromium(report: Path, profile: Path) -> list[str]:
    """What is wrong with the pages at 1280 and 390 pixels, as a headless browser lays them out."""
    pages = sorted(path.name for path in report.glob("*.html"))
    (report / "harness.html").write_text(HARNESS.replace("PAGES", json.dumps(pages)), encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(report)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        shown = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--window-size=1400,1000", "--virtual-time-budget=120000", f"--user-data-dir={profile}"),
                *("--dump-dom", f"http://127.0.0.1:{server.server_port}/harness.html"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    finally:
        server.shutdown()
        server.server_close()
        (report / "harness.html").unlink()
    result = re.search(r'<pre id="result">(.*?)</pre>', shown.stdout, re.DOTALL)[1]
    return json.loads(BeautifulSoup(result, "html.parser").get_text())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("report", ["toy", "committed"])
def test_pages_are_readable_at_both_widths(report, request, tmp_path):
    assert seen_in_chromium(request.getfixturevalue(report), tmp_path / "profile") == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_browser_finds_what_is_wrong(toy, tmp_path):
    (toy / "02_second.html").write_text(
        '<main style="width:800px;font-size:8px"><p>tiny</p><img src="gone.png"></main>', encoding="utf-8"
    )
    wrong = "\n".join(seen_in_chromium(toy, tmp_path / "profile"))
    assert re.findall(r"(\w+)\.html at (\d+): (scrolls|missing|small)", wrong) == [
        ("02_second", "1280", "missing"),
        ("02_second", "1280", "small"),
        ("02_second", "390", "scrolls"),
        ("02_second", "390", "missing"),
        ("02_second", "390", "small"),
    ]
