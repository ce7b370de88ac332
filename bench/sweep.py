"""Candidate configurations of a backend, for a person who then edits the backend's table."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

from cuflash import api

from .cases import Case
from .contenders import Contender, cuflash


def candidates(backend: str, case: Case, device: str, grid: list[str]) -> list[Contender]:
    """A contender for each configuration; the backend's own choice comes first.

    Without a grid ("block_q=64,128"), one or two of the whole numbers in the backend's choice are
    halved or doubled. A configuration that the backend cannot run shows up as failed.
    """
    problem = case.problem(device)
    if reason := api.refusal(backend, problem):
        raise ValueError(f"{backend} does not take {case.name}: {reason}")
    module: Any = api.load_backend(backend)
    default = module.default_config(problem)
    configs = [default, *(_grid(default, grid) if grid else _neighbours(default))]
    memory = "cupy" if device == "cuda" else "numpy"
    return [cuflash(backend, memory, config) for config in dict.fromkeys(configs)]


def _neighbours(default: Any) -> list[Any]:
    found = []
    names = [f.name for f in fields(default) if type(getattr(default, f.name)) is int]
    changes = [
        {name: value}
        for name in names
        for value in (getattr(default, name) // 2, getattr(default, name) * 2)
        if value
    ]
    for change in changes:
        found.append(replace(default, **change))
    for one, two in itertools.combinations(changes, 2):
        if one.keys() != two.keys():
            found.append(replace(default, **one, **two))
    return found


def _grid(default: Any, grid: list[str]) -> list[Any]:
    names, choices = [], []
    for text in grid:
        name, _, values = text.partition("=")
        kind = type(getattr(default, name, None))
        if kind not in (int, float, str) or not values:
            known = ", ".join(f.name for f in fields(default))
            raise ValueError(
                f"--grid takes FIELD=VALUE,VALUE with a field of {known}, got {text!r}"
            )
        names.append(name)
        choices.append([kind(value) for value in values.split(",")])
    return [
        replace(default, **dict(zip(names, values, strict=True)))
        for values in itertools.product(*choices)
    ]
