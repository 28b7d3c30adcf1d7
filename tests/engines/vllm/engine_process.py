"""A real vLLM in a process of its own, driven line by line: JSON commands in, JSON results out.

`EngineProcess` starts it as `python -m tests.engines.vllm.engine_process MODEL RESULTS_FD OPTIONS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class EngineProcess:
    """Starts the process and speaks to it. `wait_ready` before the first command.

    Args:
        extra: the connector's settings; None: vLLM without a connector.
        options: of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any] | None,
        log: Path,
        *,
        role: str = "kv_both",
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        results, writer = os.pipe()
        told = {"extra": extra, "role": role, "options": options}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(model), str(writer), json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=os.environ | ENVIRONMENT | (env or {}),
            )
        os.close(writer)
        self.log = log
        self._results = os.fdopen(results)

    def wait_ready(self, timeout_s: float = 600) -> EngineProcess:
        self._read(timeout_s)
        return self

    def call(self, command: str, timeout_s: float = 300, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self._read(timeout_s)

    def send(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        line = json.dumps({"command": command} | arguments) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()

    def receive(self, timeout_s: float = 300) -> Any:
        return self._read(timeout_s)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **more: Any) -> Any:
        """`{"outputs": token ids of each, "external": tokens from the pool, ...}`."""
        return self.call(
            "generate", prompts=[list(p) for p in prompts], max_tokens=max_tokens, **more
        )

    def leave(self, timeout_s: float) -> None:
        """Let the process end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._results.close()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _read(self, timeout_s: float) -> Any:
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.start()
        try:
            line = self._results.readline()
        finally:
            timer.cancel()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise AssertionError(f"the engine ended, or said nothing for {timeout_s:g} s:\n{tail}")
        return json.loads(line)


class _Served:
    """The engine in the started process."""

    def __init__(self, model: str, told: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if told["extra"] is not None:
            transfer = KVTransferConfig(
                kv_connector="KVPoolConnector",
                kv_connector_module_path="kvpool.engines.vllm",
                kv_role=told["role"],
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=told["extra"],
            )
        options = {"enforce_eager": True, "max_model_len": 2048, "disable_log_stats": False}
        self._llm = LLM(model=model, kv_transfer_config=transfer, **(options | told["options"]))
        self._core = self._llm.llm_engine.engine_core.engine_core

    def generate(self, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> Any:
        from vllm import SamplingParams

        before = self._counted()
        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        results = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=max_tokens, **options),
            use_tqdm=False,
        )
        after = self._counted()
        return {
            "outputs": [list(result.outputs[0].token_ids) for result in results],
            "cached": [result.num_cached_tokens for result in results],
            "external": after["external"] - before["external"],
            "local": after["local"] - before["local"],
        }

    def settle(self) -> Any:
        """Step until the saves are over."""
        while self._core.scheduler.has_requests():
            self._llm.llm_engine.step()
        return self.metrics()

    def reset(self) -> Any:
        """Clear vLLM's own prefix cache."""
        self.settle()
        return self._llm.reset_prefix_cache()

    def metrics(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        totals: dict[str, float] = {}
        for connector in (self._core.scheduler.connector, get_kv_transfer_group()):
            for name, value in connector.metrics.totals.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def hold_loads(self, after: int) -> Any:
        """Stop the next load after `after` buffers, report "held", and wait for a line of input."""
        from kvpool.engines.vllm.loader import Loader

        original = Loader._place
        placed = 0

        def place(loader: Loader, *arguments: Any) -> None:
            nonlocal placed
            original(loader, *arguments)
            placed += 1
            if placed == after:
                Loader._place = original  # type: ignore[method-assign]
                tell("held")
                sys.stdin.readline()

        Loader._place = place  # type: ignore[method-assign,assignment]
        return True

    def _counted(self) -> dict[str, float]:
        counted = {
            metric.name: metric.value
            for metric in self._llm.get_metrics()
            if hasattr(metric, "value")
        }
        return {
            "external": counted.get("vllm:external_prefix_cache_hits", 0),
            "local": counted.get("vllm:prefix_cache_hits", 0),
        }


def tell(result: Any) -> None:
    os.write(int(sys.argv[2]), (json.dumps(result) + "\n").encode())


def main() -> None:
    served = _Served(sys.argv[1], json.loads(sys.argv[3]))
    tell("ready")
    while line := sys.stdin.readline():
        arguments = json.loads(line)
        tell(getattr(served, arguments.pop("command"))(**arguments))


if __name__ == "__main__":
    main()
