"""What other parts may hear of the dispatcher's decisions: ``dispatcher.subscribe(observer)``. Of requests as
the scheduler knows them: ``conductor/observer.py``."""

from __future__ import annotations

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixMatch


class DispatchObserver:
    """Override what is to be heard. Called without the lock, on the thread that decides."""

    def on_choice(self, request: ProxyRequest, choice: Choice) -> None:
        """A request is about to be sent. Not called for one that the data plane sends by turns
        (``policy.turns_of``), as it does while no spans are recorded."""

    def on_prompt(self, worker: Worker, match: PrefixMatch) -> None:
        """This worker will hold the prompt whose blocks ``match`` names."""

    def on_records(self, records: bytes) -> None:
        """All that the data plane has recorded since the last call; with the dispatcher's lock."""
