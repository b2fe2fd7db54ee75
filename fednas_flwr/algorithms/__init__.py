"""Server side: a folder per algorithm, its rounds in the order of the paper's pseudocode.

A folder's ``__init__.py`` has the algorithm's settings and registry entry and imports no torch;
``strategy.py`` has its class. Importing this package registers the algorithms of all folders.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    if _module.ispkg:
        import_module(f"{__name__}.{_module.name}")
