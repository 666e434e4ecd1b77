"""Flags and recipes made from the config dataclasses: one flat namespace, whatever the nesting.

`--config recipe.yaml` sets defaults (JSON is YAML, so a saved config is a recipe), flags override it. A key that no
field has is an error.
"""

import argparse
import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Config = TypeVar("Config")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # the command shows it once; argparse would print it on every rank


def parse_config(config_class: type[Config], description: str, argv: list[str] | None = None) -> Config:
    """Parse the command line into a config.

    Raises:
        ValueError: a malformed or unknown flag, an unknown key in the recipe, or a value that a dataclass refuses.
    """
    parser = make_parser(config_class, description)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ValueError(f"unknown argument {unknown[0]!r}{_suggestion(unknown[0].partition('=')[0], flags)}")
    args = vars(known)
    recipe = args.pop("config", None)
    return build_config(config_class, {**(read_recipe(recipe, config_class) if recipe else {}), **args})


def make_parser(config_class: type, description: str) -> argparse.ArgumentParser:
    """One argument group for each nested dataclass. A flag that is not given is absent from the namespace."""
    formatter = lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110)  # noqa: E731 (argparse wants a callable)
    parser = _Parser(
        usage="%(prog)s [flags]",
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML recipe of defaults; flags override it")
    for group_class, title in _groups(config_class):
        group = parser.add_argument_group(title)
        for item in _own_fields(group_class):
            names = [alias for alias, name in _aliases(config_class).items() if name == item.name]
            _add_flag(group, item, typing.get_type_hints(group_class)[item.name], names)
    return parser


def read_recipe(path: str, config_class: type) -> dict[str, Any]:
    """The flat mapping of a YAML or JSON recipe.

    Raises:
        ValueError: the file cannot be read or parsed, or has a key that is no flag (the nearest one is suggested).
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: expected a mapping of flags to values, found {type(values).__name__}")
    known = [item.name for group, _ in _groups(config_class) for item in _own_fields(group)]
    aliases = _aliases(config_class)
    for key in values:
        if key not in known and key not in aliases:
            raise ValueError(f"--config {path}: unknown key {key!r}{_suggestion(str(key), known)}")
        if aliases.get(key) in values:
            raise ValueError(f"--config {path}: {key} and {aliases[key]} are the same; give one")
    return {aliases.get(key, key): value for key, value in values.items()}


def build_config(config_class: type[Config], values: dict[str, Any]) -> Config:
    """A config from flat values; ValueError names a missing or ill-typed flag."""
    hints = typing.get_type_hints(config_class)
    kwargs = {}
    for item in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[item.name]):
            kwargs[item.name] = build_config(hints[item.name], values)
        elif item.name in values:
            kwargs[item.name] = _checked(item.name, values[item.name], hints[item.name])
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            short = f"{item.metadata['short']}/" if item.metadata.get("short") else ""
            raise ValueError(f"{short}--{item.name} is required: {item.metadata['help']}")
    return config_class(**kwargs)


def _suggestion(given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _groups(config_class: type) -> list[tuple[type, str]]:
    hints = typing.get_type_hints(config_class)
    nested = [hints[f.name] for f in dataclasses.fields(config_class) if dataclasses.is_dataclass(hints[f.name])]
    return [(config_class, "model"), *((group, group.__doc__.rstrip(".").lower()) for group in nested)]


def _aliases(config_class: type) -> dict[str, str]:
    """Another spelling -> the field's name."""
    return getattr(config_class, "ALIASES", {})


def _own_fields(config_class: type) -> list[dataclasses.Field]:
    return [item for item in dataclasses.fields(config_class) if "help" in item.metadata]


def _add_flag(group: argparse._ArgumentGroup, item: dataclasses.Field, hint: Any, aliases: list[str]) -> None:
    flags = (item.metadata["short"], f"--{item.name}", *(f"--{alias}" for alias in aliases))
    names = [name for name in flags if name]
    default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
    text = item.metadata["help"]
    if default != [] and not any(
        default is absent for absent in (None, False, dataclasses.MISSING)
    ):  # 0 is a default to show
        text += f" (default: {' '.join(default) if isinstance(default, list) else default})"
    kind = _plain_type(hint)
    if kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, dest=item.name, help=text)
    elif item.metadata["many"]:
        many = item.metadata["many"]
        metavar = item.name.rpartition("_")[2].upper().removesuffix("S") if many is str else "N"
        group.add_argument(*names, dest=item.name, nargs="+", type=many, metavar=metavar, help=text)
    else:
        choices = item.metadata["choices"]
        metavar = None if choices else kind.__name__.upper()
        group.add_argument(*names, dest=item.name, type=kind, choices=choices, metavar=metavar, help=text)


def _plain_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return typing.get_origin(hint) or hint


def _item_type(hint: Any) -> type:
    """str of `list[str]` or `list[str] | None`."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(typing.get_args(part)[0] for part in parts if typing.get_origin(part) is list)


def _checked(name: str, value: Any, hint: Any) -> Any:
    if value is None and isinstance(hint, types.UnionType):
        return None
    kind = _plain_type(hint)
    if kind is list and isinstance(value, str):
        value = value.split()
    if kind is list and isinstance(value, list):
        return [_checked(name, part, _item_type(hint)) for part in value]
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 3e-4 as a string
        except ValueError:
            pass
    if kind is int and isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"--{name}: expected {kind.__name__}, got {value!r}")
    return value
