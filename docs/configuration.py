"""Writes ``configuration.md`` from the configuration models: ``python docs/configuration.py``."""

import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.config import Config

INTRODUCTION = """# Configuration

A run is one YAML file; every field can be overridden on the command line as `section.field=value`.
Unknown keys, wrong types and combinations that cannot work are refused before anything starts.
This page is written from the models in `engine/config/`.
"""


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """Configuration models named anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_of(part)]


def type_text(annotation: Any) -> str:
    """A type as a reader writes it."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return type_text(arguments[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f"`{argument}`" for argument in arguments)
    if typing.get_origin(annotation) is tuple:
        return f"list of {type_text(arguments[0])}"
    if arguments:
        return " \\| ".join(type_text(argument) for argument in arguments)
    return "null" if annotation is type(None) else annotation.__name__


def prose(text: str | None) -> str:
    """A docstring as one line of Markdown."""
    return " ".join((text or "").replace("``", "`").split())


def default_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return ""
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    return f"`{text.encode('unicode_escape').decode() if not text.isprintable() else text}`"


def bounds_text(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ", ".join(f"{sign} {getattr(item, name)}" for item in field.metadata for name, sign in signs.items() if hasattr(item, name))


def table(model: type[BaseModel]) -> list[str]:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = " ".join(filter(None, [type_text(field.annotation), bounds_text(field)]))
        rows.append(f"| `{name}` | {kind} | {default_text(field)} | {prose(field.description)} |")
    return rows


def section(title: str, model: type[BaseModel], level: int = 2) -> list[str]:
    """A model's table, then the tables of the models its fields hold."""
    own_docstring = model.__dict__.get("__doc__")
    lines = ["", f"{'#' * level} {title}", "", *([prose(own_docstring), ""] if own_docstring else []), *table(model)]
    for name, field in model.model_fields.items():
        for child in models_of(field.annotation):
            kind = child.model_fields.get("kind")
            suffix = f" (kind: {typing.get_args(kind.annotation)[0]})" if kind and len(typing.get_args(kind.annotation)) == 1 else ""
            lines += section(f"{title}.{name}{suffix}", child, level + 1)
    return lines


def page() -> str:
    lines = [INTRODUCTION.rstrip()]
    for name, field in Config.model_fields.items():
        for model in models_of(field.annotation):
            lines += section(name, model)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "configuration.md").write_text(page(), encoding="utf-8")
