"""What of an executed notebook is committed."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import v4

from kvcache.paper.pages import notebook
from kvcache.paper.pages.notebook import build_dir, committed_form, embed


def executed_book():
    cells = [
        v4.new_markdown_cell("# Title", metadata={"papermill": {"duration": 1.0}}),
        v4.new_code_cell('PROFILE = "quick"', execution_count=4, metadata={"tags": ["parameters"]}),
        v4.new_code_cell('PROFILE = "quick"', execution_count=5, metadata={"tags": ["injected-parameters"]}),
        v4.new_code_cell(
            "1 + 1",
            execution_count=9,
            metadata={"papermill": {"start_time": "2026-01-01T00:00:00"}, "execution": {}},
            outputs=[
                v4.new_output("stream", name="stderr", text="50 %"),
                v4.new_output("stream", name="stdout", text="two"),
                v4.new_output("execute_result", data={"text/plain": "2"}, execution_count=9),
            ],
        ),
    ]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    metadata = {
        "papermill": {"input_path": "/home/me/x.ipynb"},
        "language_info": {"name": "python", "version": "3.11.7"},
        "kernelspec": {"name": "other", "display_name": "Other", "language": "python"},
        "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}},
    }
    return v4.new_notebook(cells=cells, metadata=metadata)


def test_committed_form_has_outputs_but_no_trace_of_the_run():
    book = committed_form(executed_book())
    nbformat.validate(book)
    title, parameters, code = book.cells
    assert title.metadata == {}
    assert parameters.metadata == {"tags": ["parameters"]}
    assert (parameters.execution_count, code.execution_count) == (1, 2)
    assert code.metadata == {}
    assert [output.output_type for output in code.outputs] == ["stream", "execute_result"]
    assert code.outputs[0].text == "two"
    assert code.outputs[1].execution_count == 2
    assert book.metadata.kernelspec.name == "python3"
    assert book.metadata.language_info == {"name": "python"}
    assert set(book.metadata) == {"kernelspec", "language_info", "widgets"}
    assert committed_form(book) == book


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    build_dir("quick").mkdir(parents=True)
    nbformat.write(executed_book(), build_dir("quick") / "01_data.ipynb")
    source = executed_book()
    del source.cells[2]
    for cell in source.cells[1:]:
        cell.outputs, cell.execution_count = [], None
    path = tmp_path / "notebooks" / "01_data.ipynb"
    nbformat.write(source, path)
    return path


def test_embedding_takes_the_outputs_and_keeps_the_executed_copy_up_to_date(project):
    embed(project)
    assert nbformat.read(project, as_version=4) == committed_form(executed_book())
    executed = build_dir("quick") / project.name
    assert executed.stat().st_mtime_ns >= project.stat().st_mtime_ns


def test_embedding_refuses_outputs_of_other_sources(project):
    book = nbformat.read(project, as_version=4)
    book.cells[-1].source = "1 + 2"
    nbformat.write(book, project)
    before = project.read_bytes()
    with pytest.raises(ValueError, match="run it again first"):
        embed(project)
    assert project.read_bytes() == before


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="'fast'; expected one of quick, full"):
        build_dir("fast")


def test_a_failing_cell_gives_exit_code_one(project, capsys):
    book = v4.new_notebook(
        cells=[
            v4.new_code_cell('PROFILE = "quick"', metadata={"tags": ["parameters"]}),
            v4.new_code_cell("raise KeyError(PROFILE)"),
        ]
    )
    path = project.with_name("03_bad.ipynb")
    nbformat.write(book, path)
    assert notebook.main(["run", str(path), "--profile", "full"]) == 1
    assert "KeyError: 'full'" in capsys.readouterr().err
    assert [file.name for file in build_dir("full").iterdir()] == ["03_bad.failed.ipynb"]
