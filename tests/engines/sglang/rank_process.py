"""A second process with its own host pool and backend.

Start it as `python -m tests.engines.sglang.rank_process`. It reads one JSON object per line and
answers with one: {"make": {...}} makes backend and pool, {"call": NAME, "keys": [...], "pages":
[...]} calls the backend, {"page": N} returns a digest of a page.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from tests.engines.sglang.real import indices, mha_pool, page_bytes, storage_config


def main() -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    backend: Any = None
    pool: Any = None
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if "make" in asked:
            if backend is not None:
                backend.close()
            torch.manual_seed(asked["seed"])
            pool = mha_pool("page_first")
            config = storage_config(asked["make"], **asked["fields"])
            backend = StorageBackendFactory.create_backend("dynamic", config, pool)
            backend.register_mem_pool_host(pool)
            backend.on_host_pools_registered()
        elif "page" in asked:
            answer = hashlib.sha256(page_bytes(pool, asked["page"])).hexdigest()
        elif asked["call"] == "batch_exists":
            answer = backend.batch_exists(asked["keys"])
        else:
            answer = getattr(backend, asked["call"])(asked["keys"], indices(pool, asked["pages"]))
        print(json.dumps(answer), flush=True)
    if backend is not None:
        backend.close()


if __name__ == "__main__":
    main()
