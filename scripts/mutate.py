"""Put faults into the package one at a time, and count those that the tests notice.

    scripts/mutate.sh [--packages privacy clients ...] [--number 60] [--seed 1] [--file <lines>]
                      [--place <folder>] [--quick]

The faults are those of cosmic-ray, drawn at random, and one of our own: a keyword argument that is
not passed on. Each is written into a copy of the checkout. There the tests that ran its line (by
coverage of the whole suite, measured first on all cores) run until one fails, the quickest first.
With ``--quick`` (and a separate ``--file``) only the tests of the quick tier are run and measured.
Coverage that the ``--place`` has is not measured again. A line of JSON is written per fault, and
faults in the file are not run again. Faults that no test notices are printed at the end, except
those of ``equivalent_faults.json``, which says why no test can.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from compileall import compile_dir
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from py_compile import PycInvalidationMode

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

PACKAGES = ("privacy", "client", "server", "protocol", "pipeline", "algorithms")
OPERATORS = re.compile(
    r"core/(AddNot|ExceptionReplacer|NumberReplacer|ReplaceAndWithOr|ReplaceOrWithAnd|"
    r"Replace(Break|Continue)With\w+|Replace(True|False)With\w+|ZeroIterationForLoop|"
    r"ReplaceUnaryOperator_Delete_\w+|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|"
    r"Mod_Add|Pow_Mul|FloorDiv_Div)|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|"
    r"Gt_GtE|GtE_Gt|Lt_Gt|Gt_Lt|In_NotIn|NotIn_In|Is_IsNot|IsNot_Is))"
)
DROPPED = "drop-keyword"
QUICK = 6.0  # seconds of tests that run first, in a separate process
MOST = 120.0  # seconds of tests for one fault
EQUIVALENT = Path(__file__).with_name("equivalent_faults.json")  # and why: [{file, before, after}]
PRELOADED = ("torchvision", "flwr.simulation", "opacus", "pandas", "sklearn.linear_model", "hydra")
NO_TESTS = 5  # pytest's exit code
SLACK = 30.0  # further seconds before a fault counts as one that hangs
ALL = ["-m", "not slow and not gpu and not network"]  # both tiers
BEYOND = ["tests/sites", "tests/deploy/test_deployment.py", "tests/test_generated_settings.py"]


@dataclass(frozen=True)
class Fault:
    """One change of a file."""

    file: str
    line: int
    operator: str
    occurrence: int


def faults_in(root: Path, file: str) -> Iterator[Fault]:
    """Yield every fault that can be put into a file."""
    source = (root / file).read_text()
    tree = get_ast(source)
    for name in filter(OPERATORS.fullmatch, operator_names()):
        operator = get_operator(name)()
        positions = (p for node in ast_nodes(tree) for p in operator.mutation_positions(node))
        for occurrence, ((line, _), _) in enumerate(positions):
            yield Fault(file, line, name, occurrence)
    for occurrence, keyword in enumerate(_keywords(source)):
        yield Fault(file, keyword.lineno, DROPPED, occurrence)


def _keywords(source: str) -> list[ast.keyword]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [keyword for call in calls for keyword in call.keywords if keyword.arg]


def with_fault(source: str, fault: Fault) -> str:
    """Return the source with the fault in it."""
    if fault.operator != DROPPED:
        return mutate_code(source, get_operator(fault.operator)(), fault.occurrence) or source
    keyword = _keywords(source)[fault.occurrence]
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    before = b"".join(lines[: keyword.lineno - 1]) + lines[keyword.lineno - 1][: keyword.col_offset]
    last = lines[keyword.end_lineno - 1]
    after = last[keyword.end_col_offset :] + b"".join(lines[keyword.end_lineno :])
    return (before + re.sub(rb"\A\s*,", b"", after)).decode()


def differs(source: str, changed: str) -> bool:
    """Return True if a changed source is another program; cosmic-ray takes ``**`` for a power."""
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(changed))
    except SyntaxError:
        return False


def measure(root: Path, place: Path, *, quick: bool) -> Path:
    """Run the tests once; return the folder with each test's lines and time."""
    place = place / ("quick" if quick else "all")
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "durations.xml").is_file():
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", *([] if quick else ALL)]
        command += ["--cov=fednas_flwr", "--cov-context=test", "--cov-report="]
        command += [f"--junitxml={place / 'durations.xml'}"]
        command += [*(f"--ignore={path}" for path in BEYOND), "tests"]
        subprocess.run(command, cwd=root, env=os.environ | {"COVERAGE_FILE": f"{place}/coverage"})
    return place


def tests_by_line(root: Path, place: Path) -> dict[str, dict[int, set[str]]]:
    """Return the tests that run each line of each file, without lines that are run on import."""
    data = CoverageData(str(place / "coverage"))
    data.read()
    found: dict[str, dict[int, set[str]]] = {}
    for path in data.measured_files():
        tests: dict[int, set[str]] = defaultdict(set)
        for line, contexts in data.contexts_by_lineno(path).items():
            tests[line] = {c.rpartition("|")[0] for c in contexts if c}
        found[str(Path(path).relative_to(root))] = tests
    return found


def durations(place: Path) -> dict[str, float]:
    """Return the seconds of every test that passed, by its file's module and its name."""
    return {
        f"{c.get('classname')}::{c.get('name')}": float(c.get("time", 0))
        for c in ET.parse(place / "durations.xml").iter("testcase")
        if c.find("failure") is None and c.find("error") is None
    }


def name_in_report(test: str) -> str:
    """Return the name of a test in the report of a pass."""
    file, _, name = test.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}::{name}"


def chosen(tests: set[str], seconds: dict[str, float]) -> dict[str, float]:
    """Return the quickest of the tests, the quickest first, with the seconds of each."""
    costs = {test: seconds.get(name_in_report(test)) for test in tests}
    known = sorted((cost, test) for test, cost in costs.items() if cost is not None)
    ordered = {test: cost for cost, test in known}
    names = up_to(MOST, ordered) or list(ordered)[:1]
    return {name: ordered[name] for name in names}


def up_to(most_s: float, tests: dict[str, float]) -> list[str]:
    """Return the first tests that together take up to ``most_s`` seconds."""
    sums = accumulate(tests.values())
    return [name for name, total in zip(tests, sums, strict=True) if total <= most_s]


def noticed(root: Path, tests: dict[str, float]) -> str:
    """Return ``killed``, ``hung`` or ``survived``: the quickest tests first, then the others."""
    quick, end = up_to(QUICK, tests), "survived"
    for names in (quick, [name for name in tests if name not in quick]):
        if end == "survived" and names:
            end = outcome(root, names, 5 * sum(tests[name] for name in names) + SLACK)
    return end


def outcome(root: Path, names: list[str], limit_s: float) -> str:
    """Return the outcome of the tests in a copy of this process."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            os.chdir(root)
            sys.path.insert(0, str(root))
            import pytest

            options = ["-x", "-q", "-n", "0", *ALL, "--assert=plain", "-p", "no:cacheprovider"]
            os._exit(int(pytest.main([*options, *names])))
        os._exit(1)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ran = os.waitstatus_to_exitcode(status) != NO_TESTS
            return "survived" if status == 0 or not ran else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def main() -> None:
    """Put in faults, one after the other, and print those that no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packages", nargs="+", default=PACKAGES, choices=PACKAGES)
    parser.add_argument("--number", type=int, default=60, help="of faults, a package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--quick", action="store_true", help="run the tests of the quick tier only")
    parser.add_argument("--place", type=Path, help="folder of the copy and the coverage")
    options = parser.parse_args()
    place = options.place or Path(tempfile.mkdtemp(prefix="mutants-"))
    root = place / "checkout"
    if not root.is_dir():
        subprocess.run(["git", "clone", "--quiet", Path(__file__).parents[1], root], check=True)
    sys.dont_write_bytecode = True  # compiled once from the unchanged sources, by their hash
    compile_dir(root, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["FEDNAS_CACHE"] = str(place / "cache")
    measured = measure(root, place, quick=options.quick)
    lines, seconds = tests_by_line(root, measured), durations(measured)
    written = options.file.read_text().splitlines() if options.file.exists() else []
    known = {(r["file"], r["operator"], r["occurrence"]): r for r in map(json.loads, written)}

    for name in PRELOADED:
        import_module(name)
    rows = []
    for package in options.packages:
        files = sorted(p.relative_to(root) for p in (root / "fednas_flwr" / package).rglob("*.py"))
        faults = [fault for file in files for fault in faults_in(root, str(file))]
        drawn = random.Random(f"{options.seed} {package}").sample(faults, len(faults))
        first = len(rows)
        for fault in drawn:
            if len(rows) - first == options.number:
                break
            tests = lines.get(fault.file, {}).get(fault.line, set())
            path = root / fault.file
            source = path.read_text()
            changed = with_fault(source, fault)
            if not differs(source, changed):
                continue
            if not tests:  # run on import, or never: take all tests that run the file
                tests = set().union(*lines.get(fault.file, {}).values())
            key = (fault.file, fault.operator, fault.occurrence)
            if key not in known:
                names = chosen(tests, seconds)
                path.write_text(changed)
                begin = time.monotonic()
                try:
                    end = noticed(root, names)
                finally:
                    path.write_text(source)
                text = (source.splitlines()[fault.line - 1], changed.splitlines()[fault.line - 1])
                known[key] = asdict(fault) | {
                    "package": package,
                    "outcome": end,
                    "tests": len(names),
                    "all_tests": len(tests),
                    "seconds": round(time.monotonic() - begin, 1),
                    "before": text[0].strip(),
                    "after": text[1].strip(),
                }
                with options.file.open("a") as file:
                    file.write(json.dumps(known[key]) + "\n")
            rows.append(known[key])
    equivalent = {(e["file"], e["before"], e["after"]) for e in json.loads(EQUIVALENT.read_text())}
    for row in rows:
        if row["outcome"] == "survived":
            if (row["file"], row["before"], row["after"]) in equivalent:
                row["outcome"] = "equivalent"
                continue
            print(f"{row['file']}:{row['line']}: {row['before']}  ->  {row['after']}")
    for package in options.packages:
        counts = Counter(row["outcome"] for row in rows if row["package"] == package)
        print(
            f"{package}: {counts.total()} faults, {counts['killed'] + counts['hung']} noticed, "
            f"{counts['survived']} unnoticed, {counts['equivalent']} equivalent"
        )


if __name__ == "__main__":
    main()
