"""`kvpool explain`: show the decision about a request, missed blocks, and measured times."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import httpx
import typer

from kvpool.cli.context import invocation, overrides
from kvpool.cli.ids import short_id
from kvpool.cli.output import AsJson, console, format_seconds, print_json, print_table
from kvpool.errors import InvalidArgument, NotFound, Unavailable
from kvpool.wire.credentials import Credentials, credentials_of

TIMEOUT_S = 10.0
SHORT_ID = 12  # characters shown of a worker's or node's id
PARTS = ("queue", "fetch", "prefill", "send", "load", "tail")  # of a predicted TTFT, in order

REASONS = {
    "cost": "least predicted time to the whole response",
    "short": "too little is left to compute for a remote prefill",
    "rule": "first in the strategy's order that has memory and meets the objectives",
    "forced": "the request or the routing rules asked for this mode",
    "nothing_remote": "a remote prefill was asked for, but nothing is left to compute or no "
    "worker can do it",
    "ttft_slo": "no candidate meets the objective for TTFT",
    "tpot_slo": "no candidate meets the objective for TPOT",
    "no_room": "no node has memory for the blocks to write",
    "no_kv_room": "no decode worker has KV memory for the sequence",
    "no_decode_worker": "no decode worker serves this namespace",
    "no_prefill_choice": "no worker may prefill it",
    "prompt_too_long": "longer than any worker accepts",
    "queue_full": "the admission queue is full",
    "queue_slow": "too many requests are ahead of it in the queue",
    "queue_deadline": "it waited in the queue past its deadline",
    "displaced": "a request of a higher class took its place in the queue",
}


def explain(
    ctx: typer.Context,
    request_id: Annotated[
        str | None, typer.Argument(help="The request's id, from the header X-Request-Id.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--last", min=1, max=1000, help="List this many of the last requests."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http", help="HTTP address of the conductor; default: client.conductor_http."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print candidates with predicted times, the choice, missed blocks, and measured times."""
    given = overrides(http=("client.conductor_http", http))
    settings = invocation(ctx).load(given).settings.client
    addresses, credentials = settings.conductor_http.split(","), credentials_of(settings)
    if (request_id is None) == (last is None):
        raise InvalidArgument(
            "give either a request id or --last", hint="--last 10 lists the last 10 requests"
        )
    if request_id is None:
        pages = _fetch(addresses, credentials, f"/v1/requests?limit={last}")
        records = [record for page in pages for record in page["requests"]]
        records.sort(key=lambda record: -record["at_unix_s"])
        del records[last:]
        if as_json:
            print_json(records)
        else:
            _print_list(records)
        return
    if not request_id.replace("-", "").replace("_", "").isalnum():
        raise InvalidArgument(f"{request_id!r} is not a request id")
    found = _fetch(addresses, credentials, f"/v1/requests/{_bare(request_id)}")
    if not found:
        raise NotFound(
            "no conductor knows this request", hint="list the requests that it keeps with --last 20"
        )
    if as_json:
        print_json(found[0])
    else:
        _print_record(found[0])


def _bare(request_id: str) -> str:
    """The id without the prefix of OpenAI's objects."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _fetch(addresses: list[str], credentials: Credentials, path: str) -> list[Any]:
    """The JSON documents of the conductors that have this path.

    Raises:
        Unavailable: no conductor answers.
    """
    documents, failures = [], []
    scheme = "https" if credentials.tls else "http"
    headers = {"Authorization": f"Bearer {credentials.token}"} if credentials.token else {}
    with httpx.Client(headers=headers, verify=credentials.tls or True, timeout=TIMEOUT_S) as client:
        for address in addresses:
            try:
                response = client.get(f"{scheme}://{address}{path}")
            except httpx.HTTPError as error:
                failures.append(f"{scheme}://{address}: {error}")
                continue
            if response.is_success:
                documents.append(response.json())
            elif response.status_code != httpx.codes.NOT_FOUND:
                failures.append(f"{scheme}://{address} answered {response.status_code}")
    if len(failures) == len(addresses):
        raise Unavailable(
            f"no conductor answers: {'; '.join(failures)}",
            hint="give --http HOST:PORT, or several addresses",
        )
    return documents


def _print_list(records: list[dict[str, Any]]) -> None:
    if not records:
        console().print(
            "no requests: a conductor keeps those of its own gateway, not those that clients "
            "send straight"
            " to an engine"
        )
        return
    numbers = ("prompt", "reused", "TTFT", "predicted", "TPOT")
    rows = []
    for record in records:
        decision, outcome = record["decision"], record["outcome"] or {}
        is_served = outcome.get("ttft_s", 0) > 0
        rows.append(
            (
                decision["request_id"],
                _clock(record["at_unix_s"]),
                outcome.get("status", "running"),
                decision["mode"] if decision["mode"] != "refused" else decision["reason"],
                _short(decision["prefill"] or decision["decode"]),
                _short(decision["decode"]),
                decision["prompt_tokens"],
                decision["reuse_blocks"] * record["block_tokens"],
                format_seconds(outcome["ttft_s"]) if is_served else "-",
                format_seconds(decision["ttft_s"]),
                format_seconds(outcome["tpot_s"]) if outcome.get("tpot_s") else "-",
                _summary(outcome.get("misses", [])),
            )
        )
    columns = ("request", "at", "status", "mode", "prefill", "decode", *numbers, "misses (blocks)")
    print_table(columns, rows, right=numbers, styles={"failed": "red", "refused": "yellow"})


def _print_record(record: dict[str, Any]) -> None:
    decision, outcome = record["decision"], record["outcome"]
    out = console()

    def line(name: str, text: str) -> None:
        out.print(f"{name:<10} {text}", markup=False)

    line("request", f"{decision['request_id']}, {_clock(record['at_unix_s'])}")
    line("prompt", f"{decision['prompt_tokens']} tokens of {record['namespace']}")
    line("strategy", decision["strategy"])
    if record["routing"] and not record["routing"].startswith(":"):  # a routing rule applied
        line("routing", record["routing"])
    line("class", record["priority"])
    line("choice", _choice(decision))
    line(
        "why", f"{decision['reason']}: {REASONS.get(decision['reason'], 'see docs/scheduling.md')}"
    )
    tokens = record["block_tokens"]
    found, reuse = record["found_blocks"], decision["reuse_blocks"]
    line("reuse", f"{reuse} blocks ({reuse * tokens} tokens) planned, {found} found in the pool")
    for copy in decision["replicate"]:
        where = f"from node {_short(copy['source'])} to {_short(copy['target'])}"
        line("replicate", f"blocks {copy['start']} to {copy['start'] + copy['count'] - 1} {where}")
    out.print()
    _print_candidates(decision)
    out.print()
    if outcome is None:
        out.print("The request is still running; nothing has been measured yet.")
        return
    _print_outcome(decision, outcome)
    out.print()
    _print_misses(outcome["misses"], tokens)


def _choice(decision: dict[str, Any]) -> str:
    if decision["mode"] == "refused":
        return f"refused; retry after {format_seconds(decision['retry_after_s'])}"
    if decision["mode"] == "local":
        return f"local: prefill and decode on {decision['decode']}"
    where = f"prefill on {decision['prefill']}, decode on {decision['decode']}"
    return f"disaggregated: {where}, blocks to node {decision['target_node']}"


def _print_candidates(decision: dict[str, Any]) -> None:
    rows = []
    for number, one in enumerate(decision["candidates"]):
        is_chosen = number == 0 and decision["mode"] != "refused"
        rows.append(
            (
                one["mode"],
                _short(one["prefill"] or one["decode"]),
                _short(one["decode"]),
                one["reuse_blocks"],
                *(format_seconds(one[f"{part}_s"]) if one[f"{part}_s"] else "-" for part in PARTS),
                format_seconds(one["ttft_s"]),
                format_seconds(one["tpot_s"]),
                one["rejected"] or ("chosen" if is_chosen else ""),
            )
        )
    numbers = ("reuse", *PARTS, "TTFT", "TPOT")
    print_table(
        ("mode", "prefill", "decode", *numbers, ""),
        rows,
        title="Candidates, with predicted times",
        right=numbers,
        styles={"chosen": "green"},
    )


def _print_outcome(decision: dict[str, Any], outcome: dict[str, Any]) -> None:
    rows = []
    for name in ("ttft", "tpot"):
        predicted, measured = decision[f"{name}_s"], outcome[f"{name}_s"]
        ratio = outcome[f"{name}_error_ratio"]
        rows.append(
            (
                name.upper(),
                format_seconds(predicted) if predicted else "-",
                format_seconds(measured) if measured else "-",
                f"{ratio:.2f}" if ratio else "-",
            )
        )
    rows += [(n, "", format_seconds(s), "") for n, s in sorted(outcome["phases"].items())]
    numbers = ("predicted", "measured", "ratio")
    title = f"Measured: {outcome['status']}"
    if outcome["fallback_reason"]:
        title += f", fell back ({outcome['fallback_reason']})"
    print_table(("", *numbers), rows, title=title, right=numbers)


def _print_misses(misses: list[dict[str, Any]], block_tokens: int) -> None:
    if not misses:
        console().print("No misses: every full block of the prompt was reused.")
        return
    print_table(
        ("missed because", "blocks", "tokens", "detail"),
        [(m["reason"], m["blocks"], m["blocks"] * block_tokens, m["detail"]) for m in misses],
        right=("blocks", "tokens"),
    )


def _summary(misses: list[dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for miss in misses:
        counts[miss["reason"]] = counts.get(miss["reason"], 0) + miss["blocks"]
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _short(member_id: str | None) -> str:
    return short_id(member_id or "-", SHORT_ID)


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S") if unix_s else "-"
