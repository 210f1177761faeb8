"""Tests of the project that hold the device's code against the reference, run on the device (HPC_ES_TEST_DEVICE).

On a CPU only one of them, as Triton's interpreter takes seconds for each.
"""

import sys
from pathlib import Path

import pytest
from findings import arguments, begin
from outcomes import counts, row_of

TESTS = Path(__file__).resolve().parents[2] / "tests"
TWIN = TESTS / "contract" / "triton_twin.py"
PIPELINES = TESTS / "contract" / "test_device_pipelines.py"
APART = {"update": f"{TWIN}::test_update[0]", "momentum": f"{TWIN}::test_update[1]", "adam": f"{TWIN}::test_update[2]"}
PARTS = {
    **{part: [test] for part, test in APART.items()},
    "perturb": [TWIN, "-k", "test_perturb"],
    "digest": [
        TWIN,
        "-k",
        "not test_perturb",
        *(f"--deselect=tests/contract/triton_twin.py::test_update[{n}]" for n in range(3)),
    ],
    "pipelines": [PIPELINES, TESTS / "unit" / "test_device_room.py"],
}
REHEARSED = {
    "digest": [f"{TWIN}::test_versions_with_other_numbers_of_subspaces_follow_each_other"],
    "pipelines": [f"{PIPELINES}::test_an_update_streamed_through_a_device_is_the_arenas[32768-2-none]"],
}


class Outcomes:
    """A plugin of pytest: the tests that ran, skipped and failed."""

    def __init__(self) -> None:
        self.rows = list[dict[str, object]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            cause = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr)[-300:])
            self.rows.append(row_of(name, "FAILED", cause.replace("\n", " ")[:300]))
        elif report.skipped:
            self.rows.append(row_of(name, "not run", str(report.longrepr)[-200:]))
        elif report.when == "call":
            self.rows.append(row_of(name, "passed"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    options = parser.parse_args()
    findings, outcomes = begin(options), Outcomes()
    tests = (PARTS if findings.on_gpu else REHEARSED)[options.part]
    code = pytest.main(["-p", "no:cacheprovider", "--tb=short", *map(str, tests)], plugins=[outcomes])
    for row in outcomes.rows:
        if row["status"] == "FAILED":
            findings.check(str(row["what"]), False, str(row["detail"]))
        elif row["status"] == "not run":
            findings.not_run(str(row["what"]), str(row["detail"]))
    passed = sum(row["status"] == "passed" for row in outcomes.rows)
    findings.check(f"{options.part}: tests", code == 0 and passed > 0, counts(outcomes.rows) or f"pytest: {code!s}")


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
