"""Stop strings are found wherever the text is split, also at its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conductor.gateway.stop_strings import StopStrings


def test_a_stop_completed_by_the_last_piece_ends_the_text() -> None:
    text = StopStrings(["END"])
    assert text.push("some E") == "some"[:4]
    assert text.finish("ND more") == " "
    assert text.is_stopped


def test_text_that_could_begin_a_stop_string_is_held_until_it_does_not() -> None:
    text = StopStrings(["stop"])
    assert text.push("a sto") == "a "
    assert text.push("ry") == "stor"[:2]
    assert text.finish() == "ory"
    assert not text.is_stopped


def test_without_stops_nothing_is_held_back() -> None:
    text = StopStrings([])
    assert (text.push("abc"), text.finish("d"), text.is_stopped) == ("abc", "d", False)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_pieces_given_are_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    text = StopStrings(stops)
    given_out = ""
    for piece in pieces:
        given_out += text.push(piece)
        assert not any(stop in given_out for stop in stops)
    given_out += text.finish()
    whole = "".join(pieces)
    assert text.is_stopped == any(stop in whole for stop in stops)
    assert whole.startswith(given_out)
    if not text.is_stopped:
        assert given_out == whole
    else:
        assert any(whole.startswith(stop, len(given_out)) for stop in stops)
