"""What the documents say of the code: printed from it, or checked against it."""

import re
from pathlib import Path

import pytest
from support import documents
from support.documents import RUN, SHOWN, Block, blocks, exception, says, steps

from kvrelay.cli import main, reference
from kvrelay.cli.main import ExitCode
from kvrelay.connector.handoff import render_mermaid

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {"README.md", "operating.md", "llm.md", "glossary.md"}  # whose flags are all of the `kvrelay` command
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


def test_the_hand_off_s_diagram_is_the_one_printed_from_its_tables() -> None:
    assert f"\n\n{render_mermaid()}\n\n" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_exit_codes_are_all_told() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    assert all(f"\n| {code.value} | " in text for code in ExitCode)


def test_the_configuration_s_page_is_the_one_printed_from_the_classes() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference.render(), "stale: run make docs"


def test_the_configuration_s_page_has_every_command_and_every_flag_s_sentence() -> None:
    headings = set(re.findall(r"^## (.+)$", reference.render(), re.MULTILINE))
    groups = {"model": main._MODEL_COMMANDS, "bench": main._BENCH_COMMANDS}
    commands = {f"{group} {name}" for group, names in groups.items() for name in names}
    assert commands | (set(main._COMMANDS) - set(groups)) <= headings
    assert not re.search(r"\| *\|$", reference.render(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_finds_one(document: Path) -> None:
    assert [target for target, _ in links(document) if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_section_finds_one(document: Path) -> None:
    wrong = []
    for target, section in links(document):
        file = (document.parent / target).resolve() if target else document
        if section and file.suffix == ".md" and file.exists() and section not in sections(file):
            wrong.append(f"{target}#{section}")
    assert wrong == []


def test_every_document_is_reached_from_the_readme() -> None:
    reached, found = set[Path](), [ROOT / "README.md"]
    while found:
        document = found.pop().resolve()
        if document.suffix == ".md" and document.exists() and document not in reached:
            reached.add(document)
            found += [document.parent / target for target, _ in links(document) if target]
    assert sorted(set(DOCUMENTS) - reached - set(ROOT.glob("docs/adr/*.md"))) == []
    assert ROOT / "docs" / "adr" in {(ROOT / target).resolve() for target, _ in links(ROOT / "CONTRIBUTING.md")}


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_flag_that_the_text_names_is_one(document: Path) -> None:
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", document.read_text())
    named = {f"kvrelay {name}" for text in inline for name in re.findall(r"\bkvrelay ([a-z]+)", text)}
    commands = {f"kvrelay {name}" for name in (*main._COMMANDS, "COMMAND")}
    assert named - commands == set()
    flags = {flag for text in inline for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", text)}
    known = {"--help", "--version", *re.findall(r"--[a-z][a-z0-9-]*", reference.render())}
    if document.name in PRODUCT:
        assert flags - known == set()


def links(document: Path) -> list[tuple[str, str]]:
    """Those to files and sections here: (file, or nothing; section, or nothing)."""
    found = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text())
    return [(target, section) for target, section in found if "://" not in target]


def sections(document: Path) -> set[str]:
    """By the names that links give them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


# --- code blocks; tests/e2e/test_docs_run.py runs them


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in blocks()])
def test_every_block_is_run_or_is_of_a_kind_that_cannot_be(block: Block) -> None:
    assert block.language in (*RUN, *SHOWN), f"{block.name}: nobody runs {block.language!r}"
    if block.language not in RUN:
        hidden = re.findall(
            r"^\s*(?:[$] )?(?:kvrelay|make|curl|pip|python|docker|import|from) .*$", block.text, re.MULTILINE
        )
        assert hidden == [], f"{block.name}: commands without a language, which nobody runs"


def test_each_exception_is_one_that_the_documents_need() -> None:
    lines = [line for block in blocks("bash") for line in documents.commands(block.text)]
    for pattern, reason, _ in documents.EXCEPTIONS:
        assert any(re.search(pattern, line) for line in lines), f"{pattern} ({reason})"


def test_flags_that_a_command_does_not_have_are_seen_though_it_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    excepted = exception("B$ kvrelay decode --router A:7070 --controlport 1")
    assert excepted is not None
    with pytest.raises(SystemExit):
        excepted.check()
    assert "controlport" in capsys.readouterr().err
    assert exception("kvrelay generate x") is None
    with pytest.raises(AssertionError, match="of another machine"):
        exception("A$ kvrelay generate x")


def test_an_output_is_compared_line_by_line() -> None:
    (step,) = steps("$ kvrelay show\na\n...\nb (c)\n")
    assert step.command == "kvrelay show"
    assert says(step.expected, "a\nb (c)\n")
    assert says(step.expected, "a\n1\n2\nb (c)\n")
    assert not says(step.expected, "a\n1\nb (c)\nd\n")
    assert not says(step.expected, "a\nb c\n")


def test_every_known_fault_names_a_test_that_is_there() -> None:
    table = (ROOT / "docs" / "known-faults.md").read_text()
    rows = re.findall(r"^\| ([A-G]\d\d) \|.*\|(.+)\|$", table, re.MULTILINE)
    assert rows
    for fault, where in rows:
        named = re.findall(r"`([^`]+)::(test_\w+)`", where)
        assert named, fault
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, fault
            assert fault in source, fault
