"""The sanitizer script: what it makes of a tool's output. The kernels themselves need a GPU."""

import sanitize

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at boundary_kernel+0x120
=========     by thread (3,0,0) in block (0,0,0)
preln: ran with flexible
ldm fast, K = 4: FAILED OLMoConfigurationError: no such backend
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
preln: ran with flexible
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


def run(tmp_path, tool, text, status):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {status}\n")
    fake.chmod(0o755)
    return sanitize.run_chunk([str(fake)], tool, ["preln"], tmp_path / f"{tool}.log")


def test_findings_failures_and_clean_runs_are_told_apart(tmp_path):
    found = run(tmp_path, "memcheck", MEMCHECK, 1)
    assert found["findings"] == 1 and found["exit_status"] == 1
    assert found["kernels_with_findings"] == ["boundary_kernel"]
    assert found["cases_run"] == [("preln", "flexible")]
    assert found["cases_failed"] == [("ldm fast, K = 4", "OLMoConfigurationError: no such backend")]
    clean = run(tmp_path, "racecheck", RACECHECK, 0)
    assert clean["findings"] == 0 and clean["cases_failed"] == []
    dead = run(tmp_path, "memcheck", "========= COMPUTE-SANITIZER\n", 9)
    assert dead["findings"] is None and dead["summary"] == "the tool did not finish"


def test_a_tool_runs_a_few_cases_to_a_process(tmp_path, monkeypatch):
    """The first process finds an error, the second is clean, the third ends without a summary."""
    monkeypatch.setattr(sanitize, "CASES_EACH", 1)
    for i, text in enumerate((MEMCHECK, RACECHECK, "========= COMPUTE-SANITIZER\n")):
        (tmp_path / f"output-{i}").write_text(text)
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        f"#!/bin/sh\nn=$(cat {tmp_path}/n 2>/dev/null || echo 0)\necho $((n + 1)) > {tmp_path}/n\ncat {tmp_path}/output-$n\n"
    )
    fake.chmod(0o755)
    names = ["preln", "ldm fast, K = 4", "mhc flexible, identity"]
    saved = []
    found = sanitize.run_tool(
        [str(fake)],
        "memcheck",
        names,
        tmp_path,
        1,
        lambda r: saved.append((r["findings"], r["complete"])),
    )
    assert saved == [(1, False), (1, False), (1, True)]
    assert [name for name, _ in found["cases_failed"]] == ["ldm fast, K = 4", names[2]]
    report = {
        "date": "2026-11-30", "gpu": "a GPU", "version": "1", "torch": "2", "triton": "3", "commit": "c",
        "cases": names, "tools": [found],
    }  # fmt: skip
    text = sanitize.table(report)
    assert "| memcheck | 2 of 3; not run: ldm fast, K = 4 (OLMoConfigurationError" in text
    assert "mhc flexible, identity (the tool did not finish) | 1 in boundary_kernel |" in text


def test_options_are_those_that_the_version_has(tmp_path):
    fake = tmp_path / "compute-sanitizer"
    for option in ("--kernel-name-exclude", "--kernel-regex-exclude", None):
        for indirect in (sanitize.INDIRECT, None):
            fake.write_text(f"#!/bin/sh\necho '  {option} arg    Do not check\n  {indirect} arg'\n")
            fake.chmod(0o755)
            options = sanitize.options_of(str(fake))
            names = [] if option is None else [option, sanitize.NOT_OURS]
            assert options["memcheck"] == names
            assert options["racecheck"] == names + ([] if indirect is None else [indirect, "yes"])


def test_every_method_with_kernels_has_a_case():
    methods = {(c["method"], c["backend"]) for c in sanitize.CASES.values()}
    assert {
        ("ldm", "flexible"), ("ldm", "fast"), ("ldm", "fast_inference"), ("attnres", "flexible"), ("mhc", "flexible"),
    } <= methods  # fmt: skip
