"""From a YAML file and dotted overrides to a checked configuration."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.config.base import ConfigError, Model
from headrace.config.run import Config


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Write ``value`` at ``a.b.c`` of a nested dictionary."""
    *parents, leaf = dotted.split(".")
    for depth, key in enumerate(parents):
        branch = tree.get(key)
        if branch is None:
            branch = tree[key] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"override {dotted}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        tree = branch
    tree[leaf] = value


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run's YAML file and apply ``section.field=value`` overrides (values are YAML).

    Raises:
        ConfigError: the file cannot be read, or a field is unknown, missing or out of range; one line per fault.
    """
    return load_model(Config, path, overrides)


M = TypeVar("M", bound=Model)


def load_model(kind: type[M], path: str | Path, overrides: Iterable[str] = ()) -> M:
    """``load_config`` for any model of configuration."""
    return build_model(kind, read_tree(path), overrides, str(path))


def read_tree(path: str | Path) -> dict[str, Any]:
    """A YAML file of sections, not checked any further.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections such as `model:` and `questions:`, got {type(tree).__name__}")
    return tree


def build_model(kind: type[M], tree: dict[str, Any], overrides: Iterable[str], name: str) -> M:
    """A model of configuration from a tree, which ``section.field=value`` overrides change; ``name`` says in faults where it is from.

    Raises:
        ConfigError: a field is unknown, missing or out of range; one line per fault.
    """
    overridden = set()
    for override in overrides:
        dotted, equals, value = override.partition("=")
        dotted = dotted.strip()
        if not equals:
            raise ConfigError(f"override {override!r}: expected section.field=value")
        overridden.add(dotted)
        try:
            _set(tree, dotted, yaml.safe_load(value))
        except yaml.YAMLError:
            raise ConfigError(f"override {override!r}: the value is not YAML") from None
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(kind, fault, name, overridden) for fault in error.errors())) from None


def _line(kind: type[Model], fault: ErrorDetails, name: str, overridden: set[str]) -> str:
    """One fault in one line: where it is from, the field, what is wrong, and the value."""
    field, what = ".".join(map(str, fault["loc"])) or "config", fault["msg"]
    if fault["type"] == "extra_forbidden":
        schema = kind.model_json_schema()
        fields = {known for model in (schema, *schema.get("$defs", {}).values()) for known in model.get("properties", {})}
        near = get_close_matches(str(fault["loc"][-1]), sorted(fields), n=1)
        what = "no such field" + "".join(f"; is {known} meant?" for known in near)
    got = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r:.80})"
    return f"{name}{', override' if field in overridden else ''}: {field}: {what.removeprefix('Value error, ')}{got}"
