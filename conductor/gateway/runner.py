"""Carries out one request's lifecycle: its calls over connections, its tokens into one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from conductor.gateway.request import GenerationRequest
from conductor.requests import events as e
from conductor.requests.lifecycle import Patience, RequestLifecycle, State
from kvpool.errors import EngineFailed, KvpoolError

log = structlog.get_logger(__name__)


class Surroundings(Protocol):
    """What a run needs of the gateway."""

    def clock(self) -> float:
        """The time of the event loop, in seconds."""

    def call(self, run: RequestRun, action: e.Call) -> Coroutine[Any, Any, e.Event]: ...

    def act(self, run: RequestRun, action: e.Action) -> None: ...


class RequestRun:
    """One request on its way through the gateway.

    Args:
        gateway: makes the calls, and carries out the actions that concern others.
    """

    def __init__(
        self, gateway: Surroundings, request: GenerationRequest, patience: Patience
    ) -> None:
        self.request = request
        self.lifecycle = RequestLifecycle(request.facts, patience)
        self._gateway = gateway
        self._items: asyncio.Queue[Any] = asyncio.Queue()  # None: the end
        self._started = asyncio.Event()
        self._call: asyncio.Task[None] | None = None
        self._given_up: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ for the response

    async def started(self) -> None:
        """Wait until the request is admitted or has ended."""
        await self._started.wait()

    async def next_item(self) -> Any:
        """The next message of a worker with tokens; None after the last one.

        Raises:
            KvpoolError: the request has failed; every item before was delivered.
        """
        item = await self._items.get()
        if item is None and self.lifecycle.error is not None:
            raise self.lifecycle.error
        return item

    def complete(self) -> None:
        """End the request successfully, at a stop string."""
        self.feed(e.Completed())

    def leave(self) -> None:
        """End the request: nobody waits for it. One that has ended already stays as it is."""
        if self.lifecycle.state is not State.DONE:
            self.feed(e.ClientLeft())

    async def close(self) -> None:
        """`leave`, and wait until the calls that were given up have ended."""
        self.leave()
        tasks = {*self._given_up, *((self._call,) if self._call is not None else ())}
        if tasks:  # `wait` leaves them alone if this wait is cancelled: they close connections
            await asyncio.wait(tasks)

    # ------------------------------------------------------------ carrying out

    def feed(self, event: e.Event) -> None:
        """Tell the lifecycle what happened, and do what it says.

        An action that fails by a mistake of ours is logged, and the others are carried out: a
        request must end, and its slot must become free.
        """
        for action in self.lifecycle.on(event, self._gateway.clock()):
            if isinstance(action, e.Emit):  # nearly all actions are
                self._items.put_nowait(action.item)
                continue
            try:
                self._carry_out(action)
            except Exception:
                name = type(action).__name__
                log.exception("an action failed", action=name, request_id=self.request.request_id)

    def _carry_out(self, action: e.Action) -> None:
        match action:
            case e.Cancel():
                self._cancel()
            case e.WaitUntil(at):
                self._set_timer(at)
            case e.Finish():
                self._set_timer(None)
                self._items.put_nowait(None)
                self._started.set()
                self._gateway.act(self, action)
            case e.Schedule() | e.LookUp() | e.Reserve() | e.SendPrefill() | e.SendGenerate():
                self._call = asyncio.create_task(
                    self._answer(action), name=f"{type(action).__name__} {self.request.request_id}"
                )
            case _:
                if isinstance(action, e.Assign):
                    self._started.set()
                self._gateway.act(self, action)

    async def _answer(self, action: e.Call) -> None:
        """Make a call and feed its answer, unless it was given up."""
        task = asyncio.current_task()
        event: e.Event
        try:
            event = await self._gateway.call(self, action)
        except KvpoolError as error:
            event = e.Failed(error)
        except Exception as error:
            log.exception("a call failed", request_id=self.request.request_id)
            event = e.Failed(EngineFailed(f"internal error: {type(error).__name__}"))
        if self._call is task:
            self._call = None
            self.feed(event)

    def _cancel(self) -> None:
        task, self._call = self._call, None
        if task is not None:
            self._given_up.add(task)
            task.add_done_callback(self._given_up.discard)
            task.cancel()

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(e.Tick())
