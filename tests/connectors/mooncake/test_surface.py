"""Every name and parameter that the original exports is there.

surface.txt has what the wheel of 0.3.13.post1 says of itself: MODULE.NAME(parameters), "_" for one without a
name, "=" behind one with a default; a line without parentheses is an attribute.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

LINES = Path(__file__).with_name("surface.txt").read_text().splitlines()


def found(line: str) -> Any:
    module, _, rest = line.partition(".")
    target: Any = importlib.import_module(f"mooncake.{module}")
    for name in re.split(r"[.(]", rest.split("(")[0]):
        owner, target = target, getattr(target, name, None)
        if inspect.isclass(owner) and issubclass(owner, enum.Enum) and name in ("name", "value", "__init__"):
            return owner  # of each member
        if target is None and inspect.isclass(owner):
            target = name if name in members_of(owner) else None
        assert target is not None, f"mooncake.{line} is not there"
    return target


def members_of(kind: type) -> set[str]:
    """Attributes that instances have without a value in the class, and those that the constructor sets."""
    slots = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())}
    return slots | set(vars(kind()))


@pytest.mark.parametrize("line", LINES)
def test_name_and_parameters(line: str) -> None:
    target = found(line)
    match = re.search(r"\((.*)\)$", line)
    if match is None or line.count(".setup("):  # setup() takes two forms: test_setup.py
        return
    wanted = [word for word in match[1].split(", ") if word]
    if target is object.__init__ or (inspect.isclass(target) and issubclass(target, enum.Enum)):
        return
    signature = inspect.signature(target)
    ours = [p for p in signature.parameters.values() if p.name != "self"]
    if inspect.isclass(target) or line.endswith(".__init__()"):
        assert all(p.default is not p.empty or p.kind is p.VAR_POSITIONAL for p in ours) or wanted
        return
    assert len(ours) >= len(wanted), f"{line}: {signature}"
    for parameter, word in zip(ours, wanted, strict=False):
        name = word.rstrip("=")
        if name == "_":
            assert parameter.kind is not parameter.KEYWORD_ONLY
        elif name.startswith("*"):
            assert parameter.kind is parameter.VAR_POSITIONAL
        else:
            assert parameter.name == name, f"{line}: {signature}"
        if word.endswith("="):
            assert parameter.default is not parameter.empty, f"{line}: {signature}"
    for extra in ours[len(wanted) :]:
        assert extra.default is not extra.empty, f"{line}: {signature}"


def test_old_and_new_attributes_of_a_config() -> None:
    from mooncake.store import ObjectDataType, ReplicateConfig, SoftPinAction

    config = ReplicateConfig()
    assert config.replica_num == 1
    assert config.with_soft_pin is False
    assert config.soft_pin_action is SoftPinAction.PRESERVE
    config.with_soft_pin = True
    config.group_ids = ["a", "b"]
    config.data_type = ObjectDataType.TENSOR
    config.preferred_segment = "host:1"
    assert hasattr(config, "group_ids")
    assert not hasattr(config, "session_ids")
    with pytest.raises(AttributeError, match="session_ids"):
        config.session_ids = []
    for name, value in (
        ("replica_num", "2"),
        ("replica_num", -1),
        ("group_ids", "a"),
        ("preferred_segment", 1),
    ):
        with pytest.raises(TypeError):
            setattr(config, name, value)
    config.group_ids.append("c")
    assert ReplicateConfig().group_ids is None
    assert "replica_num=1" in repr(config)


def test_names_of_the_package() -> None:
    import mooncake
    from mooncake import MooncakeDistributedStore, ReplicateConfig, store

    assert MooncakeDistributedStore is store.MooncakeDistributedStore
    assert ReplicateConfig is store.ReplicateConfig
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = mooncake.Nothing
