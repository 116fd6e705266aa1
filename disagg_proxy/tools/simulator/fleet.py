"""Which instances there are, by place and by name, and which of them a policy may choose."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.instance import Instance, Role
from moonpool.disagg_proxy.conductor.scheduler import Fit
from moonpool.disagg_proxy.tools.simulator.happenings import KINDS


class Fleet:
    """counts: how many of each kind at the beginning: prefill, decode, whole; names are KIND-NUMBER.
    instances: those that may be chosen now, by place. One that joins again has the place it had; one that
    joins begins with what its sisters have learnt.
    """

    def __init__(self, counts: dict[str, int], room_tokens: int) -> None:
        # Where no instance decodes, a policy must not look for one that does.
        computing = Role.PREFILL if counts["decode"] or counts["whole"] else Role.BOTH
        self._roles = dict(zip(KINDS, (computing, Role.DECODE, Role.BOTH), strict=True))
        self._room_tokens = room_tokens
        self._names: list[str] = []  # by place
        self._numbers = dict.fromkeys(KINDS, 0)
        self.at: list[Instance] = []  # by place, those that are gone included
        self.instances: tuple[Instance, ...] = ()
        self._asked: tuple[Instance, ...] | None = None
        self._eligible = Fit((), ())
        made = [self._make(kind, self._name(kind)) for kind in KINDS for _ in range(counts[kind])]
        self.instances = tuple(made)

    def kind(self, place: int) -> str:
        return self._names[place].partition("-")[0]

    def place(self, name: str) -> int:
        """Of an instance that is or was there; -1 for none."""
        return self._names.index(name) if name in self._names else -1

    def join(self, name: str) -> Instance:
        """name: of a kind, or of an instance that is gone."""
        instance = self._make(name.partition("-")[0], name if "-" in name else self._name(name))
        instance.learn_from(self.sisters(instance))
        self.instances = tuple(sorted((*self.instances, instance), key=lambda each: each.place))
        return instance

    def sisters(self, instance: Instance) -> list[Instance]:
        """Of the same kind, that are there."""
        return [each for each in self.instances if each.role is instance.role and each is not instance]

    def leave(self, name: str) -> Instance:
        """It is chosen no more."""
        instance = self.at[self._names.index(name)]
        self.instances = tuple(each for each in self.instances if each is not instance)
        return instance

    @property
    def eligible(self) -> Fit:
        """The instances that may be chosen; none unless one can compute prompts and one can answer."""
        if self._asked is not self.instances:  # it is asked for each request
            self._asked = self.instances
            roles = {instance.role for instance in self.instances}
            serves = Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles
            self._eligible = Fit.of(self.instances if serves else ())
        return self._eligible

    def _name(self, kind: str) -> str:
        name = f"{kind}-{self._numbers[kind]}"
        self._numbers[kind] += 1
        return name

    def _make(self, kind: str, name: str) -> Instance:
        place = self._names.index(name) if name in self._names else len(self._names)
        instance = Instance(place, name, self._roles[kind], room_tokens=self._room_tokens)
        instance.obeys = True
        if place == len(self._names):
            self._names.append(name)
            self.at.append(instance)
        else:
            self.at[place] = instance
        return instance
