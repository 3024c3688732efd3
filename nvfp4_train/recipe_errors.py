"""Faults of a recipe: collected, located by key path, and told all at once with the nearest valid spelling."""

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

Path = tuple[str | int, ...]


class Fault(NamedTuple):
    """One fault: where it stands (``("fprop", "input", "rounding")``) and what was expected there."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.message}" if self.path else self.message


class RecipeError(ValueError):
    """A recipe that cannot be. ``faults`` holds every fault found, ``where`` the file or the object they are in."""

    def __init__(self, where: str, faults: Iterable[Fault], lines: dict[Path, int] | None = None):
        self.where = where
        self.faults = list(faults)
        told = [_with_line(fault, lines or {}) for fault in self.faults]
        count = "1 fault" if len(told) == 1 else f"{len(told)} faults"
        super().__init__(f"{where}: {told[0]}" if len(told) == 1 else f"{where}: {count}\n  " + "\n  ".join(told))

    def __reduce__(self):
        return _rebuilt, (self.where, self.faults, str(self))


def _rebuilt(where: str, faults: list[Fault], text: str) -> RecipeError:
    error = RecipeError(where, faults)
    error.args = (text,)
    return error


def path_text(path: Path) -> str:
    """``("schedule", 0, "from")`` -> ``schedule[0].from``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def nearest(word: Any, choices: Iterable[str]) -> str | None:
    """The choice spelled most like ``word``, or None when none is near."""
    choices = list(choices)
    lowered = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(str(word).lower(), lowered, n=1, cutoff=0.55)
    return lowered[found[0]] if found else None


def did_you_mean(word: Any, choices: Iterable[str]) -> str:
    found = nearest(word, choices)
    return f"; did you mean {found!r}?" if found else ""


def listed(choices: Iterable[Any]) -> str:
    """``a, b or c``."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def one_of(value: Any, choices: Iterable[str], what: str) -> Any:
    """``value`` if it is one of ``choices``; otherwise a ValueError that lists them and names the nearest."""
    choices = list(choices)
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{value!r} is not {what}: expected {listed(choices)}{did_you_mean(value, choices)}")


class Strict(BaseModel):
    """Base of the recipe schema: frozen, no unknown keys, and every fault told as a RecipeError with its key path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, /, **data: Any):
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise RecipeError(type(self).__name__, _faults(error, type(self))) from None

    @classmethod
    def keys(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def of(cls, value: Any, example: str) -> Any:
        """``value`` if it is an instance, or built from the mapping ``value``. ValueError (all faults) otherwise."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping such as {example}, got {value!r}")
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ValueError(f"keys must be text, got {odd[0]!r}; expected {listed(cls.keys())}")
        return cls(**value)


def _faults(error: ValidationError, model: type[Strict]) -> list[Fault]:
    errors = error.errors(include_url=False)
    keys = model.keys()
    meant = {nearest(item["loc"][0], keys) for item in errors if item["type"] == "extra_forbidden"}
    faults = []
    for item in errors:
        path, kind = item["loc"], item["type"]
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, RecipeError):  # a part of this part: its faults, seen from here
            faults += [Fault((*path, *fault.path), fault.message) for fault in cause.faults]
        elif kind == "extra_forbidden":
            faults.append(Fault(path, f"unknown key; expected {listed(keys)}{did_you_mean(path[0], keys)}"))
        elif kind == "missing":
            if path[0] not in meant:  # its misspelling is told already
                faults.append(Fault(path, "missing; it must be written out"))
        else:
            faults.append(Fault(path, item["msg"].removeprefix("Value error, ")))
    return faults


def _with_line(fault: Fault, lines: dict[Path, int]) -> str:
    path = fault.path
    while path and path not in lines:  # a missing key has no line: the mapping it is missing from has
        path = path[:-1]
    return f"line {lines[path]}: {fault}" if path in lines else str(fault)


def read_yaml(text: str, where: str) -> tuple[Any, dict[Path, int], list[Fault]]:
    """The document, the line of each key path, and the faults of its keys (a key that stands twice).

    Raises RecipeError naming line and column where ``text`` is not YAML at all.
    """
    loader = None
    lines: dict[Path, int] = {}
    faults: list[Fault] = []
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(where, [Fault((), "the file is empty")])
        _walk(node, (), lines, faults, set())
        return loader.construct_document(node), lines, faults
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(where, [Fault((), f"{place}not valid YAML: {error.problem or error.context}")]) from None
    except RecipeError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(where, [Fault((), f"not valid YAML: {error}")]) from None
    except RecursionError:
        raise RecipeError(where, [Fault((), "not valid YAML: nested too deeply")]) from None
    finally:
        if loader is not None:
            loader.dispose()


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], faults: list[Fault], above: set[int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in above:
        raise ValueError("an alias stands inside the thing it names")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, faults, above | {id(node)})
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and name != "<<":
                faults.append(Fault((*path, name), f"the key stands twice, on lines {seen[name]} and {line}"))
            seen[name] = line
            lines[(*path, name)] = line
            _walk(value, (*path, name), lines, faults, above | {id(node)})
