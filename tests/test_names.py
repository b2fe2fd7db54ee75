import re
from pathlib import Path

from fednas_flwr.privacy.mechanism import accounting
from fednas_flwr.settings.names import ACCOUNTANTS, NORMS, SPLITS

PACKAGE = Path(__file__).parents[1] / "fednas_flwr"


def test_every_accountant_computes():
    assert tuple(accounting.ACCOUNTANTS) == ACCOUNTANTS


def test_no_other_module_lists_the_names_again():
    lists = [
        re.compile(r",\s*".join(f'"{name}"' for name in names))
        for names in (SPLITS, NORMS, ACCOUNTANTS)
    ]
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "names.py"]
    assert [path for path in modules for names in lists if names.search(path.read_text())] == []
