"""Templates that would fill the memory or never end are errors; others are rendered as by Jinja."""

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlm_grpo.utils.template_sandbox import Sandbox

OPTIONS = {"trim_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
VARIABLES = {"n": 10**10, "text": "a b", "rows": [{"a": 1, "b": None}, {"a": "x"}], "one": (1, 2)}
GROWS = "{% set ns = namespace(x=START) %}{% for _ in range(99) %}{% set ns.x = STEP %}{% endfor %}"


def render(template: str) -> str:
    sandbox = Sandbox(**OPTIONS)
    return sandbox.render(sandbox.compile_bounded(sandbox.parse(template)), VARIABLES)


def grow(start: str, step: str) -> str:
    return GROWS.replace("START", start).replace("STEP", step)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 10 ** 10 }}", "it has a power"),
        ("{{ 'x' * 1000 * 1000 * 1000 }}", "an operation may make more than"),
        ("{{ 'x' * n }}", "an operation may make more than"),
        ("{{ 'x' | center(n) }}", "an operation may make more than"),
        ("{{ 'x'.ljust(n) }}", "an operation may make more than"),
        ("{{ ('%' ~ n ~ 'd') % 1 }}", "an operation may make more than"),
        ("{{ ('{:' ~ n ~ '}').format(1) }}", "an operation may make more than"),
        ("{{ '%*d' | format(n, 1) }}", "an operation may make more than"),
        ("{{ ('x' * 99999) | replace('x', 'y' * 99999) }}", "an operation may make more than"),
        ("{{ ('x' * 99999).join(range(99999) | map('string') | list) }}", "may make more than"),
        ("{{ (5).to_bytes(n, 'big') }}", "an operation may make more than"),
        (grow("'x'", "ns.x ~ ns.x"), "a value is longer than"),
        (grow("'x'", "ns.x + ns.x"), "a value is longer than"),
        (grow("9", "ns.x * ns.x"), "an operation may make more than"),
        (grow("['x']", "[ns.x, ns.x]"), "it takes more than 1,000,000 steps"),
        (grow("'x'", "{'a': ns.x, 'b': ns.x}"), "it takes more than"),
        (2 * "{% for _ in range(9999) %}" + 2 * "{% endfor %}", "it takes more than"),
        ("{% for _ in range(99999) %}" + 99 * "x" + "{% endfor %}", "a value is longer than"),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}", "takes more"),
        ("{{ range(99999) | map('string') | map('center', 9999) | list }}", "it takes more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ lipsum(99999) }}", "'lipsum' is undefined"),
    ],
)
def test_a_template_that_grows_without_end_is_an_error(template, reason):
    with pytest.raises(TemplateError, match=reason):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for row in rows %}{{ loop.index }}{% if not loop.last %}, {% endif %}{% endfor %}",
        "{% for row in missing %}x{% else %}none{% endfor %}{{ missing }}{{ None }}{{ 1.50 }}",
        "{% for row in rows if row.b is none %}{{ row['a'] ~ '-' ~ row.b }}{% endfor %}",
        "{% for k, v in rows[0].items() %}{{ k }}={{ v }};{% break %}{% endfor %}",
        "{% for x in [1, [7, 8]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% set a, b = one %}{{ a + b }}{{ (a, b) }}{{ {'k': [a]} }}{{ 7 // 2 }}{{ 'a%s' % b }}",
        "{% macro f(x, y=2) %}<{{ x }}{{ y }}{{ caller() }}>{% endmacro %}"
        "{% call f('a') %}in{% endcall %}",
        "{% set ns = namespace(n=0) %}{% for r in rows %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ rows[::-1][0].a }}{{ text.split(' ')[-1] }}{{ text | replace('a', '') }}",
        "{{ rows | map(attribute='a') | join(',') }}{{ rows | selectattr('b', 'none') | list }}",
        "{{ missing | default('-') }}{{ rows | tojson }}{{ dict(a=1) | items | first }}",
        "{% filter indent(2) %}a\nb{% endfilter %}{% set x %}{{ text }}!{% endset %}{{ x | trim }}",
        "{{ '{:>5}|{}'.format(1, text) }}{{ '%05.1f' | format(2.5) }}{{ 'x' | center(9) }}",
    ],
)
def test_other_templates_are_rendered_as_by_jinja(template):
    plain = ImmutableSandboxedEnvironment(**OPTIONS)
    assert render(template) == plain.from_string(template).render(VARIABLES)
