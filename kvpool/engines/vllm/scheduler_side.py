"""The connector's side in vLLM's scheduler: decides what to load and save, and holds the leases.

It moves no bytes. It waits for at most `lookup_deadline_s` per request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Namespace
from kvpool.client.pool import Pool
from kvpool.engines.vllm.identity import extra_keys
from kvpool.engines.vllm.load_costs import LoadCosts
from kvpool.engines.vllm.lookup import Lookup
from kvpool.engines.vllm.lora import LoraVersions
from kvpool.engines.vllm.metadata import LoadJob, SaveJob, StepMetadata, WorkerReport, pages_of
from kvpool.engines.vllm.metrics import MetricsRecorder
from kvpool.engines.vllm.pool_health import PoolHealth
from kvpool.engines.vllm.request_options import RequestOptions, options_of
from kvpool.engines.vllm.settings import VllmSettings
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

NULL_PAGE = 0  # vLLM's placeholder for pages outside a sliding window
SAVE_AGAIN_S = 1.0  # pause after a failed save


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One vLLM request.

    Args:
        extra: what its KV depends on besides its tokens; None if it shares nothing.
        chain: hashes of its full blocks computed so far.
        saved: how many leading blocks the pool has or receives.
        settled_at: how many tokens vLLM had when the answer was "no more"; -1 before that.
    """

    request: Request
    extra: tuple[str, ...] | None
    options: RequestOptions
    chain: list[bytes] = field(default_factory=list)
    saved: int = 0
    lookup: Lookup | None = None
    asked_until: float = 0.0  # monotonic seconds: until then the scheduling loop may wait
    local_tokens: int = 0  # tokens that vLLM had when it last asked
    settled_at: int = -1
    preemptions: int = 0  # preemptions when it last asked
    save_again_at: float = 0.0  # monotonic seconds; no save before, because one failed
    is_loading: bool = False
    is_layerwise: bool = False  # whether the load is
    has_failed: bool = False  # whether a load failed; then the request loads no more


@dataclass(slots=True, frozen=True)
class _HeldPages:
    """Pages of a save job, and how many ranks have not ended it."""

    pages: tuple[int, ...]
    ranks: int
    request_id: str
    first_block: int
    size: int


class SchedulerSide:
    """The connector's side in the scheduler. Before `start`, it finds and saves nothing.

    Args:
        loads, saves: whether this instance's role loads and saves.
        may_load_in_step: whether vLLM recovers safely from a load that fails in the step that uses
            it.
        ranks: how many ranks save each block.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        loads: bool,
        saves: bool,
        may_load_in_step: bool,
        ranks: int,
        metrics: MetricsRecorder,
        loras: LoraVersions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._loads = loads
        self._saves = saves
        self._is_layerwise = settings.layerwise_load and may_load_in_step
        if settings.layerwise_load and not may_load_in_step:
            log.warning(
                "layerwise_load is off: with prefix caching or asynchronous scheduling, vLLM does"
                " not recover safely from a load that fails in the step that uses it"
            )
        self._ranks = ranks
        self.metrics = metrics
        self._loras = loras
        self._clock = clock
        self.costs = LoadCosts(settings.prefill_tokens_per_s)
        self._tracked: dict[str, TrackedRequest] = {}
        self._jobs: list[LoadJob] = []
        self._held: dict[int, _HeldPages] = {}
        self._held_bytes = 0
        self._next_job = 0
        self._block_pool: BlockPool | None = None
        self._pool: Pool | None = None
        self._namespace: Namespace | None = None
        self._page_tokens = 1
        self._step_tokens = 0
        self._step_at = 0.0
        self._waiting = 0
        self._since_reset: tuple[str, ...] = ()  # extra keys of all requests since a reset

    # ------------------------------------------------------------ start and end

    def start(self, pool: Pool, health: PoolHealth, namespace: Namespace, page_tokens: int) -> None:
        """Begin to use the pool, once the ranks have sent their layout."""
        self._pool, self._health = pool, health
        self._namespace, self._page_tokens = namespace, page_tokens

    def bind(self, block_pool: BlockPool) -> None:
        """Set the block pool, whose pages are held during saves."""
        self._block_pool = block_pool

    def close(self) -> None:
        """End all leases."""
        for tracked in self._tracked.values():
            self._release(tracked)
        self._tracked.clear()
        self._loras.close()

    def reset(self) -> None:
        """Stop sharing blocks with the past and with other instances, unless `fixed_weights`.

        vLLM resets its caches when its weights are updated, but does not say why it resets. The
        namespace names the old weights. So from now on this instance shares only with itself.
        """
        if self._settings.fixed_weights:
            return
        self._since_reset = (f"reset:{secrets.token_hex(16)}",)
        for tracked in self._tracked.values():
            tracked.extra = None  # partly computed with the old weights
            if not tracked.is_loading:
                self._release(tracked)
        log.info("vLLM reset its caches: from now on this instance shares only with itself")

    @property
    def has_pending_saves(self) -> bool:
        """Whether pages are held for saves, so that vLLM must continue stepping."""
        return bool(self._held)

    @property
    def leases(self) -> int:
        """How many look-ups hold blocks, or may hold some when they end."""
        return sum(tracked.lookup is not None for tracked in self._tracked.values())

    # ------------------------------------------------------------ looking up

    def on_new_request(self, request: Request) -> None:
        """Begin to look up the blocks of a new request."""
        if self._namespace is None:
            return
        # A resumable session may drop tokens when its next input comes, which makes block names
        # invalid.
        extra = None
        if not request.resumable:
            extra = extra_keys(request, self._loras, self._settings.lookup_deadline_s)
        if extra is not None:
            extra += self._since_reset
        tracked = TrackedRequest(request, extra, options_of(request))
        self._tracked[request.request_id] = tracked
        if tracked.extra is None:
            self.metrics.count("requests_not_shareable")
        elif self._may_load(tracked):
            self._begin(tracked)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many more tokens the pool has, and whether they load asynchronously.

        None instead of a number while the look-up runs (`get_num_new_matched_tokens`).
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._may_load(tracked):
            return 0, False
        if request.num_preemptions > tracked.preemptions:  # it lost its blocks
            tracked.preemptions, tracked.settled_at = request.num_preemptions, -1
        if tracked.settled_at == local_tokens or tracked.has_failed:
            return 0, False
        if tracked.lookup is not None and tracked.lookup.is_over:
            self._release(tracked)
        lookup = tracked.lookup or self._begin(tracked)
        if lookup is None:
            if not self._health.is_well:
                self.metrics.count("lookups_without_pool")
            tracked.settled_at = local_tokens
            return 0, False
        now = self._clock()
        tracked.asked_until = tracked.asked_until or now + self._settings.lookup_deadline_s
        asked = now
        is_done = lookup.wait(tracked.asked_until - now)
        self.metrics.add("lookup_wait_s", self._clock() - asked)
        if not is_done:
            if self._clock() < lookup.waiting_until:
                self._waiting += 1  # blocks come from a disk, faster than computing them
                return None, False
            self.metrics.count("lookups_too_late")
            return 0, False
        tokens = lookup.found * self._block_tokens
        tracked.is_layerwise = (
            self._is_layerwise
            and self._bytes_of(tokens) <= self._settings.staging_bytes * self._ranks
        )
        if tracked.is_layerwise:
            # The step must compute at least the last token.
            whole = (request.num_tokens - 1) // self._block_tokens
            tokens = min(tokens, whole * self._block_tokens)
        new_tokens = tokens - local_tokens
        tracked.local_tokens = local_tokens
        if new_tokens <= 0:
            self._no_load(tracked)
            return 0, False
        if self.costs.worth_s(new_tokens, self._bytes_of(new_tokens), 1.0) <= 0:
            self.metrics.count("loads_declined")
            self._no_load(tracked)
            return 0, False
        return new_tokens, not tracked.is_layerwise

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, new_tokens: int) -> None:
        """Prepare the load of a request that vLLM gave pages to (`update_state_after_alloc`)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.is_loading:
            return
        lookup = tracked.lookup
        if not new_tokens or lookup is None:
            self._no_load(tracked)
            return
        pages_per_block = self._block_tokens // self._page_tokens
        first = tracked.local_tokens // self._block_tokens
        last = (tracked.local_tokens + new_tokens) // self._block_tokens
        pages = pages_of(blocks.get_block_ids()[0], first * pages_per_block, last * pages_per_block)
        self._jobs.append(
            LoadJob(
                request.request_id,
                lookup.hashes[first:last],
                _shifted(lookup.segments, first, last),
                pages,
                tracked.local_tokens // self._page_tokens - first * pages_per_block,
                tracked.is_layerwise,
            )
        )
        tracked.is_loading = True
        tracked.saved = max(tracked.saved, lookup.found)
        self.metrics.count("loads")
        self.metrics.add("loaded_tokens", new_tokens)

    # ------------------------------------------------------------ one step

    def metadata(self, output: SchedulerOutput) -> StepMetadata:
        """The workers' jobs of this step (`build_connector_meta`)."""
        jobs, self._jobs = self._jobs, []
        waiting, self._waiting = self._waiting, 0
        self._step_at = self._clock()
        self._step_tokens = output.total_num_scheduled_tokens
        if self._namespace is None:
            return StepMetadata()
        return StepMetadata(
            self._namespace.namespace_id,
            jobs,
            self._save_jobs(output) if self._saves else [],
            not output.total_num_scheduled_tokens,
            waiting > 0,
        )

    def on_output(self, report: WorkerReport | None, received: set[str]) -> None:
        """Record what the workers did in a step (`update_connector_output`)."""
        if self._step_tokens:
            self.costs.record_step(self._step_tokens, self._clock() - self._step_at)
            self._step_tokens = 0
        if report is not None:
            self.costs.record_load(report.loaded_bytes, report.load_s)
            for request_id in report.failed_loads:
                if (tracked := self._tracked.get(request_id)) is not None:
                    tracked.saved = 0  # store again what the pool lost
                    tracked.has_failed = True
            for job_id, count in report.ended_saves.items():
                self._end_save(job_id, count, job_id in report.dropped_saves)
            received = received | {
                name
                for name in report.ended_loads
                if (tracked := self._tracked.get(name)) is not None and tracked.is_layerwise
            }
        for request_id in received:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.is_loading = False
                self._release(tracked)
                if tracked.request.is_finished():
                    del self._tracked[request_id]

    def on_finished(self, request: Request) -> None:
        """Forget a request, unless it is loading (`request_finished_all_groups`)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and not tracked.is_loading:
            self._release(tracked)
            del self._tracked[request.request_id]

    # ------------------------------------------------------------ internal

    @property
    def _block_tokens(self) -> int:
        assert self._namespace is not None
        return self._namespace.layout.block_tokens

    def _may_load(self, tracked: TrackedRequest) -> bool:
        is_shared = tracked.extra is not None and self._loads and tracked.options.load
        return is_shared and not tracked.request.skip_reading_prefix_cache

    def _bytes_of(self, tokens: int) -> int:
        assert self._namespace is not None
        return tokens * self._namespace.layout.bytes_per_token

    def _chain(self, tracked: TrackedRequest, blocks: int) -> list[bytes]:
        """Hashes of the first `blocks` blocks of a request, or fewer if it has fewer full ones."""
        assert self._namespace is not None
        known = len(tracked.chain)
        if blocks > known:
            tokens = tracked.request.all_token_ids
            fresh = tokens[known * self._block_tokens : blocks * self._block_tokens]
            parent = tracked.chain[-1] if tracked.chain else None
            tracked.chain += hash_chain(self._namespace, fresh, tracked.extra or (), parent=parent)
        return tracked.chain[:blocks]

    def _begin(self, tracked: TrackedRequest) -> Lookup | None:
        """Begin a look-up of the request's blocks.

        None without a reachable pool or a full block.
        """
        if not self._loads or self._pool is None or self._namespace is None:
            return None
        blocks = tracked.request.num_tokens // self._block_tokens
        if not blocks:
            return None
        if not self._health.is_well:
            return None
        chain = self._chain(tracked, blocks)
        tracked.asked_until = 0.0
        tracked.lookup = Lookup(
            self._pool,
            self._health,
            self._namespace,
            chain,
            worth_s=self._worth_s,
            lease_s=self._settings.lease_s,
            timeout_s=self._settings.load_timeout_s + self._settings.max_disk_wait_s,
        )
        self.metrics.count("lookups")
        self.metrics.add("looked_up_tokens", blocks * self._block_tokens)
        return tracked.lookup

    def _worth_s(self, blocks: int) -> float:
        tokens = blocks * self._block_tokens
        return self.costs.worth_s(tokens, self._bytes_of(tokens), self._settings.max_disk_wait_s)

    def _no_load(self, tracked: TrackedRequest) -> None:
        """End the lease at once, because vLLM does not load."""
        lookup = tracked.lookup
        if lookup is not None:
            tracked.saved = max(tracked.saved, lookup.found)
            tracked.settled_at = tracked.local_tokens
            if lookup.is_done and not lookup.found:
                self.metrics.count("misses")
        self._release(tracked)

    def _release(self, tracked: TrackedRequest) -> None:
        if tracked.lookup is not None:
            tracked.lookup.release()
            tracked.lookup = None

    def _save_jobs(self, output: SchedulerOutput) -> list[SaveJob]:
        state = output.kv_connector_block_state
        if state is None or not self._health.is_well:
            return []
        jobs = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.extra is None or not tracked.options.save:
                continue
            # A load of this step may fail, and so what the step computes from it may be wrong.
            if tracked.is_loading:
                continue
            job = self._save_job(tracked, scheduled, state.get_block_ids)
            if job is not None:
                jobs.append(job)
        return jobs

    def _save_job(
        self,
        tracked: TrackedRequest,
        scheduled: int,
        block_ids: Callable[[str], Sequence[Sequence[int]] | None],
    ) -> SaveJob | None:
        """Save the blocks that are final after this step and not saved yet.

        None if there are none.
        """
        request = tracked.request
        # Tokens that are not sampled yet, or only drafted, do not count.
        final = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if not self._settings.save_decoded:
            final = min(final, request.num_prompt_tokens)
        first, last = tracked.saved, final // self._block_tokens
        if last <= first or self._clock() < tracked.save_again_at:
            return None
        size = (last - first) * self._block_tokens
        size_bytes = self._bytes_of(size)
        if self._held_bytes + size_bytes > self._settings.max_pending_save_bytes:
            # A later step of the request tries again.
            self.metrics.count("saves_put_off")
            return None
        tables = block_ids(request.request_id)
        if tables is None or self._block_pool is None:
            return None
        pages_per_block = self._block_tokens // self._page_tokens
        pages = pages_of(tables[0], first * pages_per_block, last * pages_per_block)
        if len(pages) < (last - first) * pages_per_block or (pages == NULL_PAGE).any():
            return None
        chain = self._chain(tracked, last)
        self._block_pool.touch([self._block_pool.blocks[page] for page in pages.tolist()])
        job_id = self._next_job
        self._next_job += 1
        self._held[job_id] = _HeldPages(
            tuple(pages.tolist()), self._ranks, request.request_id, first, size_bytes
        )
        self._held_bytes += size_bytes
        tracked.saved = last
        self.metrics.count("saves")
        parent = chain[first - 1] if first else b""
        return SaveJob(job_id, request.request_id, tuple(chain[first:last]), parent, pages)

    def _end_save(self, job_id: int, count: int, is_dropped: bool) -> None:
        held = self._held.pop(job_id, None)
        if held is None:
            return
        if is_dropped:
            tracked = self._tracked.get(held.request_id)
            if tracked is not None:
                tracked.saved = min(tracked.saved, held.first_block)
                tracked.save_again_at = self._clock() + SAVE_AGAIN_S
        if count < held.ranks:
            self._held[job_id] = _HeldPages(
                held.pages, held.ranks - count, held.request_id, held.first_block, held.size
            )
            return
        self._held_bytes -= held.size
        assert self._block_pool is not None
        # The end of a chain first, because vLLM reuses the page that was freed first.
        self._block_pool.free_blocks(
            [self._block_pool.blocks[page] for page in reversed(held.pages)]
        )


def _shifted(segments: Sequence[m.Segment], first: int, last: int) -> tuple[m.Segment, ...]:
    """The part of `segments` in blocks [first, last), with starts counted from `first`."""
    cut = []
    for segment in segments:
        start = max(segment.start, first)
        end = min(segment.start + segment.count, last)
        if end > start:
            cut.append(m.Segment(segment.node_id, start - first, end - start, segment.tier))
    return tuple(cut)
