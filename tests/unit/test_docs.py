"""What the documents say of the code: printed from it, or checked against it."""

import re
from pathlib import Path

import pytest

from kvrelay.cli.main import ExitCode
from kvrelay.connector.handoff import render_mermaid

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


def test_the_hand_off_s_diagram_is_the_one_printed_from_its_tables() -> None:
    assert f"\n\n{render_mermaid()}\n\n" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_readme_has_every_exit_code() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"\n| {code.value} | " in readme for code in ExitCode)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_finds_one(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_every_known_fault_names_a_test_that_is_there() -> None:
    table = (ROOT / "docs" / "known-faults.md").read_text()
    rows = re.findall(r"^\| ([A-G]\d\d) \|.*\| `(.+)::(test_\w+)` \|$", table, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [A-G]\d\d \|", table, re.MULTILINE))
    assert rows
    for fault, file, test in rows:
        source = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in source, fault
        assert fault in source, fault
