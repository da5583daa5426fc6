"""The target of a rehearsal: a training function and its configuration, found by file or module.

A module may offer `rehearsal(argv)`, which gives both for the arguments of a command line; if it
does not, its function `train` is taken and, where there is one, its `CONFIG`. Must not import
torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Target = tuple[Callable[..., None], dict[str, Any]]


class NoTarget(ValueError):
    """There is no such training function; the message says what was looked for."""


def load(target: str, arguments: Sequence[str]) -> Target:
    """The training function and its configuration.

    The working directory and a file's own directory can be imported from, as when the file is run.

    Raises:
        NoTarget: no such file, module or function, or arguments that nobody takes.
        Exception: whatever the module raises while it is imported, `SystemExit` too.
    """
    place, _, name = target.partition(":")
    module = _module(place)
    hook = getattr(module, "rehearsal", None)
    if not name and callable(hook):
        return _checked(hook(list(arguments)), f"rehearsal() of {place}")
    if arguments:
        raise NoTarget(
            f"{place} takes no arguments ({' '.join(arguments)}): define rehearsal(argv) in it, "
            "which returns the training function and its configuration"
        )
    function = getattr(module, name or "train", None)
    if not callable(function):
        raise NoTarget(
            f"{place} has no function {name or 'train'}; it has {_functions(module)}. Name the "
            "training function as FILE:FUNCTION"
        )
    config = getattr(module, "CONFIG", {})
    return _checked((function, config), f"CONFIG of {place}")


def _module(place: str) -> ModuleType:
    _can_import_from(Path.cwd())
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise NoTarget(
                f"no module {place!r} in {Path.cwd()} or on the path: give a FILE.py, or a module "
                "as in jobs.pretrain"
            ) from error
    file = Path(place).resolve()
    if not file.is_file():
        raise NoTarget(f"no file {place}")
    dotted = _dotted(file)
    if dotted is not None:
        return importlib.import_module(dotted)
    _can_import_from(file.parent)
    # A file called random.py must not become everybody's random.
    name = file.stem if file.stem not in sys.modules else f"rehearsed_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _dotted(file: Path) -> str | None:
    """The file's name as a module of a package below the working directory, if it is in one."""
    if not file.is_relative_to(Path.cwd()):
        return None
    parts = file.relative_to(Path.cwd()).with_suffix("").parts
    folders = [Path(*parts[: i + 1]) for i in range(len(parts) - 1)]
    if not folders or not all((folder / "__init__.py").is_file() for folder in folders):
        return None
    return ".".join(parts)


def _can_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _checked(found: Any, what: str) -> Target:
    try:
        function, config = found
        if callable(function) and isinstance(config, dict):
            return function, config
    except TypeError:
        pass
    raise NoTarget(
        f"{what} must give a training function train(run) and a dict, its configuration; "
        f"found {found!r}"
    )


def _functions(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(own) or "none"
