"""The helpers for error messages."""

from vlm_grpo.errors import UserError, bullets, list_bad_rows, printable


def test_fifty_problems_are_listed_and_the_others_counted():
    assert bullets(map(str, range(53))).endswith("\n  - 49\n  … and 3 more")


def test_rows_with_one_problem_are_listed_once():
    alike = [f"r:{n}: example {n}-{'ab'[n % 2]}: '{'a' * n}' has {n} tokens" for n in range(3)]
    lines = list_bad_rows([alike[0], "r:9: it has no id", *alike[1:]]).splitlines()
    assert lines == [f"  - {alike[0]}", "    2 more like it: r:1, r:2", "  - r:9: it has no id"]
    for others in (alike[:2], [f"f: no answer to '{n}'" for n in range(5)]):
        assert list_bad_rows(others) == bullets(others)
    assert list_bad_rows(["no row", "no row either"], limit=1) == "  - no row\n  … and 1 more"


def test_a_terminal_obeys_nothing_that_a_message_quotes():
    quoted = "\x1b]0;title\x07 \x9b31m \r \u202e\u2066 naïve 日本\t😀\n"
    plain = "\\x1b]0;title\\x07 \\x9b31m \\r \\u202e\\u2066 naïve 日本\t😀\n"
    assert printable(quoted) == str(UserError(quoted)) == plain
