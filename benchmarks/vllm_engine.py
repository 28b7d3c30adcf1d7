"""vLLM in a process of its own for `kvpool bench vllm`: JSON commands in and JSON results out, one per line.

vLLM runs as its users run it: scheduler and model in a process of their own, chunked prefill and
prefix caching on. Results go through a pipe of their own, because vLLM and its connectors write to
stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvpool.errors import KvpoolError

START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
MAX_MODEL_TOKENS = 8192
OUTPUT_TOKENS = 8  # greedy, since outputs are compared
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # A core for each thread. If they may move, the kernel sometimes leaves two on one core for
    # 0.15 s, while vLLM's scheduler spins on the other: a hit of 0.06 s then takes 0.22 s.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


# A killed worker is reported before the errors that its loss causes in others.
_ERROR = re.compile(r"(Error|Exception): |died unexpectedly")


class EngineFailed(KvpoolError):
    """A vLLM process did not start, ended, or did not answer in time."""

    code = "bench_engine_failed"


class BenchEngine:
    """The parent's end of the process. Use it as a context manager, and call `ready` first.

    Args:
        transfer: vLLM's `KVTransferConfig`; None: without a connector.
        log: where its output goes.
    """

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        log: Path,
        *,
        cache_gib: int,
        env: dict[str, str] | None = None,
    ) -> None:
        reader, writer = os.pipe()
        order = json.dumps({"model": str(model), "transfer": transfer, "results": writer})
        environment = ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib)} | (env or {})
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.vllm_engine", order],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=os.environ | environment,
                start_new_session=True,  # vLLM's own children end with it, however it ends
            )
        os.close(writer)
        self._log = log
        self._results = os.fdopen(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._results.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def ready(self) -> Self:
        """Wait until it serves. Raises EngineFailed with the reason from its log."""
        self._read(START_TIMEOUT_S)
        return self

    def generate(
        self,
        prompt: Sequence[int],
        output_tokens: int = OUTPUT_TOKENS,
        *,
        may_load: bool = True,
    ) -> dict[str, Any]:
        """Serve one prompt alone.

        Args:
            may_load: False asks kvpool's connector to load nothing.

        Returns:
            `ttft_s`, `output` (token ids), `external` and `local` (tokens that vLLM counts as hits
            of the connector and of its own cache), `loaded` (tokens that kvpool's connector began
            to load).
        """
        result: dict[str, Any] = self._call(
            "generate", prompt=list(prompt), output_tokens=output_tokens, may_load=may_load
        )
        return result

    def prefill(self, prompts: Sequence[Sequence[int]], *, is_saved: bool = True) -> float:
        """Seconds that the prompts take one after another, each until its first token.

        Args:
            is_saved: False asks kvpool's connector to save nothing.
        """
        plain = [list(prompt) for prompt in prompts]
        return float(self._call("prefill", prompts=plain, is_saved=is_saved))

    def forget(self) -> None:
        """Drop vLLM's own prefix cache."""
        if not self._call("forget"):
            raise EngineFailed("vLLM did not drop its prefix cache")

    def _call(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        line = json.dumps({"command": command, "arguments": arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"vLLM has ended: {self._reason()}") from error
        return self._read(CALL_TIMEOUT_S)

    def _read(self, timeout_s: float) -> Any:
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        started = time.monotonic()
        try:
            line = self._results.readline()
        finally:
            timer.cancel()
        if not line:
            is_late = time.monotonic() - started >= timeout_s
            what = f"no answer within {timeout_s:g} s" if is_late else "it ended"
            raise EngineFailed(f"{what}: {self._reason()}")
        return json.loads(line)

    def _reason(self) -> str:
        """The first error in its log. Later ones come from processes that lost the failed one."""
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if _ERROR.search(line)]
        return (errors or lines or ["its log is empty"])[0].strip()[-300:]


class _Served:
    """The child's end."""

    def __init__(self, order: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = order["transfer"]
        self._llm = LLM(
            model=order["model"],
            dtype="bfloat16",
            max_model_len=MAX_MODEL_TOKENS,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        self._count = 0

    def generate(self, prompt: list[int], output_tokens: int, may_load: bool) -> dict[str, Any]:
        before = self._counted()
        ttft_s, output = self._serve(prompt, output_tokens, {"kvpool": {"load": may_load}})
        after = self._counted()
        counts = {name: int(after[name] - before[name]) for name in before}
        return {"ttft_s": ttft_s, "output": output, **counts}

    def prefill(self, prompts: list[list[int]], is_saved: bool) -> float:
        started = time.perf_counter()
        for prompt in prompts:
            self._serve(prompt, 1, {"kvpool": {"save": is_saved}})
        return time.perf_counter() - started

    def forget(self) -> bool:
        deadline = time.monotonic() + 30.0
        while not self._llm.reset_prefix_cache():  # it refuses while pages are being saved
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _serve(
        self, prompt: list[int], output_tokens: int, transfer: dict[str, Any]
    ) -> tuple[float, list[int]]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        self._count += 1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer},
        )
        ttft_s = 0.0
        output: list[int] = []
        started = time.perf_counter()
        engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for result in engine.step():
                output = list(result.outputs[0].token_ids)
                ttft_s = ttft_s or (time.perf_counter() - started if output else 0.0)
        return ttft_s, output

    def _counted(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        ours = ("loaded_tokens", "misses", "lookups_too_late", "loads_declined", "loads_failed")
        return {
            "external": found.get("vllm:external_prefix_cache_hits_total", 0.0),
            "local": found.get("vllm:prefix_cache_hits_total", 0.0),
            **{name: found.get(f"kvpool_vllm_{name}_total", 0.0) for name in ours},
        }


def _main() -> None:
    order = json.loads(sys.argv[1])

    def tell(result: Any) -> None:
        os.write(order["results"], (json.dumps(result) + "\n").encode())

    served = _Served(order)
    tell("ready")
    while line := sys.stdin.readline():
        told = json.loads(line)
        tell(getattr(served, told["command"])(**told["arguments"]))


if __name__ == "__main__":
    _main()
