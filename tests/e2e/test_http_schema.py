"""What the router's own OpenAPI document promises, held against the router by schemathesis."""

import asyncio
import sys
from pathlib import Path

import pytest
from support.http_router import answering_router

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_whatever_the_document_allows_or_forbids_is_answered_as_it_says(tmp_path: Path) -> None:
    async with answering_router(tmp_path) as router:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{router.http_url}/openapi.json",
            "--checks",
            CHECKS,
            "--phases",
            "examples,coverage,fuzzing",
            "--max-examples",
            "40",
            "--seed",
            "1",
            "--generation-database",
            "none",
            "--no-color",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
